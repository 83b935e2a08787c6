"""What a path holds, told by its names and first bytes, and the reader for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.gym_rollouts import GymRollouts
from dlc_sentinel.offline.interchange import Interchange
from dlc_sentinel.offline.lines import MAX_LINE_BYTES, opened, tree_of
from dlc_sentinel.offline.metrics import STATE_NAME, MetricLog
from dlc_sentinel.offline.token_lines import TokenLines, nemo_files, nemo_sample, prime_files, prime_sample
from dlc_sentinel.offline.verl_dumps import SKIP_NAMES, VerlDump, checkpoint_files, skip_files
from dlc_sentinel.records import Record
from dlc_sentinel.tape.schema import is_tape

KINDS = ("tape", "lines", "metrics", "trainer_state", "transfer_queue", "skip_dump", "prime_rl", "nemo_rl", "nemo_gym")
PROBE_LINES = 20
WANTED = (
    "wanted a tape folder, a .jsonl of this format, metrics.jsonl, a transfer_queue checkpoint or a skip dump of verl, "
    f"{STATE_NAME} of TRL, token_exports of prime-rl, train_data_step*.jsonl of NeMo-RL or rollouts of NeMo Gym"
)


class TokenSource(Protocol):
    """A reader of records: `records` once, then `problems` and `notes`; `done` of `total` bytes are read."""

    run: str
    problems: list[tuple[int, str]]
    notes: list[str]
    done: int
    total: int

    def records(self) -> Iterator[Record]: ...


def kind_of(path: str | Path) -> str:
    """One of KINDS.  Raises: TapeError if it is none of them, or not there."""
    place = Path(path)
    if is_tape(place):
        return "tape"
    if not place.exists():
        raise TapeError(f"{path}: no such file or folder; {WANTED}")
    kind = _folder_kind(place) if place.is_dir() else _file_kind(place)
    if not kind:
        here = "no tape in this folder, nor anything else that is read" if place.is_dir() else "not a recording"
        raise TapeError(f"{path}: {here}; {WANTED}")
    return kind


def token_source(path: str | Path, kind: str, *, on_policy: bool = False) -> TokenSource:
    """The reader of a path that holds tokens.  Raises: TapeError if it cannot be read."""
    if kind == "lines":
        return Interchange(path)
    if kind == "prime_rl":
        return TokenLines(path, prime_files(Path(path)), prime_sample, "prime-rl", on_policy=on_policy)
    if kind == "nemo_rl":
        return TokenLines(path, nemo_files(Path(path)), nemo_sample, "NeMo-RL", on_policy=on_policy)
    if kind == "nemo_gym":
        return GymRollouts(path)
    return VerlDump(path)


def metric_log(path: str | Path) -> MetricLog:
    """The log of numbers at `path`: a file, or the newest one of a folder.  Raises: TapeError if it cannot be read."""
    place = Path(path)
    return MetricLog(_log_in(place) or place)


def _log_in(folder: Path) -> Path | None:
    if not folder.is_dir():
        return None
    states = [*folder.glob(STATE_NAME), *folder.glob(f"checkpoint-*/{STATE_NAME}")]
    if states:
        return max(states, key=lambda file: file.stat().st_mtime)
    return next(iter(sorted(folder.glob("metrics.jsonl"))), None)


def tokens_beside(path: str | Path) -> str:
    """The kind of a token dump in the same folder as a log of numbers, which tells more of less; "" = there is none."""
    return _token_kind(Path(path)) if Path(path).is_dir() else ""


def _folder_kind(folder: Path) -> str:
    """A log of the whole run comes before dumps of some of its steps."""
    log = _log_in(folder)
    if log is not None:
        return "trainer_state" if log.name == STATE_NAME else "metrics"
    return _token_kind(folder)


def _token_kind(folder: Path) -> str:
    found = (
        ("transfer_queue", checkpoint_files(folder)),
        ("skip_dump", skip_files(folder)),
        ("prime_rl", prime_files(folder)),
        ("nemo_rl", nemo_files(folder)),
    )
    return next((kind for kind, files in found if files), "")


def _file_kind(file: Path) -> str:
    if file.name == STATE_NAME:
        return "trainer_state"
    if file.suffix == ".pkl":
        return "transfer_queue"
    if file.name in SKIP_NAMES or file.suffix in (".dp", ".pt"):
        return "skip_dump"
    return _lines_kind(file)


def _lines_kind(file: Path) -> str:
    """By the first line that is a JSON object; a file with none is taken for lines, and each is reported."""
    for text in _first_lines(file):
        try:
            tree = tree_of(text)
        except ValueError:
            continue
        if not isinstance(tree, dict):
            continue
        if "type" in tree:
            return "lines"
        if "data" in tree and "step" in tree:
            return "metrics"
        if "inference_logprobs" in tree:
            return "prime_rl"
        if "prev_logprobs" in tree:
            return "nemo_rl"
        if "generation_log_probs" in tree or isinstance(tree.get("response"), dict):
            return "nemo_gym"
    return "lines"


def _first_lines(file: Path) -> Iterator[bytes]:
    try:
        with opened(file) as lines:
            for _ in range(PROBE_LINES):
                yield lines.readline(MAX_LINE_BYTES)
    except (OSError, EOFError) as error:
        raise TapeError(f"{file}: cannot be read ({error}); wanted JSON lines, plain or gzip") from error
