"""What verl leaves on disk with a logprob per token, read without running it: queue checkpoints, skip dumps.

A checkpoint of the transfer queue holds the batch that was trained last (until the queue is cleared) and rows that
still wait. Its `old_log_probs` are the trainer's at the start of the step, so they are the current stream of update 0.
A dump of the SkipManager holds the engine's side only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.pickled import Array, Tensor, Thing
from dlc_sentinel.offline.samples import Sample, records
from dlc_sentinel.offline.unpickle import load_bytes, load_file
from dlc_sentinel.records import F32, I64, UNKNOWN_VERSION, Bool, Hello, Json, Record, Source, StepEnd

STEP_FOLDER = re.compile(r"global_step_(\d+)")
SKIP_NAMES = ("gen_batch.dp", "tq_batch.pt")
SEGMENTS = "dlc_segments"
"""The hook's own account of which tokens are of which weights."""
Columns = Mapping[str, Mapping[Json, Json]]


def checkpoint_files(path: Path) -> dict[int, list[Path]]:
    """{step: storage files} of a run's checkpoint folder, of one global_step_N, or of any folder or file in it."""
    if path.is_file():
        return {_step_of(path): [path]} if path.suffix == ".pkl" and path.name.startswith("su_") else {}
    found: dict[int, list[Path]] = {}
    for file in sorted(path.glob("**/su_*.pkl")):
        found.setdefault(_step_of(file), []).append(file)
    return dict(sorted(found.items()))


def skip_files(path: Path) -> dict[int, list[Path]]:
    """{step: files} of a SkipManager's folder: DIR/.../{step}/gen_batch.dp or {step}/{inner}/tq_batch.pt."""
    files = [path] if path.is_file() else sorted(p for name in SKIP_NAMES for p in path.glob(f"**/{name}"))
    found: dict[int, list[Path]] = {}
    for file in files:
        if file.name in SKIP_NAMES:
            above = file.parents[1] if file.name == "tq_batch.pt" else file.parent
            found.setdefault(int(above.name) if above.name.isdigit() else 0, []).append(file)
    return dict(sorted(found.items()))


def _step_of(path: Path) -> int:
    numbers = [int(match[1]) for part in path.resolve().parts if (match := STEP_FOLDER.fullmatch(part))]
    return numbers[-1] if numbers else 0


class VerlDump:
    """Checkpoints or skip dumps under one path. `records` once; then `problems` and `notes` say what was not used."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = checkpoint_files(self.path)
        self._is_checkpoint = bool(self._files)
        self._files = self._files or skip_files(self.path)
        self.problems: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self.run = self.path.stem
        self.done, self.total = 0, sum(p.stat().st_size for files in self._files.values() for p in files)
        self._num_queued = 0
        if not self._files:
            raise TapeError(f"{path}: no su_*.pkl of a transfer queue and no {' or '.join(SKIP_NAMES)} below it")

    def records(self) -> Iterator[Record]:
        source = Source(self.run, "trainer", "dump")
        yield Hello(source, stack="verl")
        for step, files in self._files.items():
            # verl names a step by the weights it ends with
            version = step - 1 if self._is_checkpoint else UNKNOWN_VERSION
            for micro, file in enumerate(files):
                tree = load_file(file)
                rows = _stored(tree, file) if self._is_checkpoint else _dumped(tree, file)
                samples = list(self._samples(rows, f"{step}-{micro}"))
                yield from records(source, step, version, samples, micro=micro * 10**6)
                self.done += file.stat().st_size
            yield StepEnd(source, step)
        if self._num_queued:
            self.notes.append(f"{self._num_queued} rows still wait in the queue and were trained on by nobody yet")
        if not self._is_checkpoint:
            self.notes.append("a skip dump holds the engine's logprobs only: there is nothing to compare them with")

    def _samples(self, rows: Iterator[Mapping[str, Json]], where: str) -> Iterator[Sample]:
        for number, row in enumerate(rows):
            try:
                sample = _sample(row, f"{where}-{number}")
            except (ValueError, TypeError) as error:
                self.problems.append((number, f"{where}: {error}"))
                continue
            if sample.cur_T is None and self._is_checkpoint:
                self._num_queued += 1
            else:
                yield sample


def _stored(tree: Json, file: Path) -> Iterator[Mapping[str, Json]]:
    """Rows of a storage unit: {field_data: {field: {index: value}}}."""
    columns = tree.get("field_data") if isinstance(tree, dict) else None
    if not isinstance(columns, dict):
        raise TapeError(f"{file}: no field_data in it; is this a storage unit of a transfer queue?")
    if tree.get("format"):
        raise TapeError(f"{file}: its values lie in files of their own (SSD offload); not read")
    for index in columns.get("rollout_log_probs", {}):
        yield {name: column[index] for name, column in columns.items() if index in column}


def _dumped(tree: Json, file: Path) -> Iterator[Mapping[str, Json]]:
    """Rows of a DataProto or of a {tensordict, tags, keys}."""
    columns: dict[str, Json] = {}
    if isinstance(tree, Thing) and isinstance(tree.state, tuple) and len(tree.state) == 3:
        columns = _fields(load_bytes(tree.state[0], str(file)))
    elif isinstance(tree, dict):
        columns = _fields(tree.get("tensordict"))
    engine = columns.get("rollout_log_probs")
    if engine is None:
        raise TapeError(f"{file}: no rollout_log_probs in it (rollout.calculate_log_probs was off?)")
    for index in range(len(engine)):
        yield {name: column[index] for name, column in columns.items() if len(column) == len(engine)}


def _fields(tree: Json) -> dict[str, list[Array]]:
    """{name: rows} of a TensorDict in any of the ways torch writes one; what is no tensor is left out."""
    fields: dict[str, list[Array]] = {}
    if not isinstance(tree, Thing):
        return fields
    if tree.name.endswith("_consolidated"):
        layout, storage = tree.args
        data = storage.array().tobytes()
        for name, (kind, shape, start, end, pad) in layout["leaves"].items():
            fields[name] = list(_leaf(data[start : end - pad], kind, shape))
        return fields
    for name, value in _inner(tree).items():
        if isinstance(value, Tensor):
            fields[name] = list(value.array())
        elif isinstance(value, Thing) and value.name.endswith("_rebuild_njt"):
            jagged = value.args[0]
            fields[name] = np.split(jagged["values"].array(), jagged["offsets"].array()[1:-1])
    return fields


def _inner(tree: Thing) -> Mapping[str, Json]:
    for part in (tree.state, *tree.args):
        if isinstance(part, dict) and isinstance(part.get("_tensordict"), dict):
            inner: dict[str, Json] = part["_tensordict"]
            return inner
    return {}


def _leaf(data: bytes, kind: str, shape: list[int]) -> Array:
    if kind == "torch.bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, np.dtype(kind.removeprefix("torch."))).reshape(shape)


def _array(value: Json) -> Array | None:
    return value.array() if isinstance(value, Tensor) else value if isinstance(value, np.ndarray) else None


def _sample(row: Mapping[str, Json], name: str) -> Sample:
    engine, old = _array(row.get("rollout_log_probs")), _array(row.get("old_log_probs"))
    mask = _array(row.get("response_mask"))
    if engine is None:
        raise ValueError("a row without rollout_log_probs")
    mask_T: Bool = np.ones(engine.size, np.bool_) if mask is None else mask.reshape(-1) != 0
    extra = row.get("extra_fields")
    starts, versions = _spans(extra if isinstance(extra, dict) else {}, engine.size, mask_T)
    group = row.get("uid")
    return Sample(
        name, _f32(engine), None if old is None else _f32(old), mask_T, group if isinstance(group, str) else "",
        starts, versions,
    )  # fmt: skip


def _f32(values: Array) -> F32:
    return values.reshape(-1).astype(np.float32)


def _spans(extra: Mapping[str, Json], length: int, mask_T: Bool) -> tuple[I64, I64]:
    """(first token, version) of a row's spans: by the hook's own account, else where all of it is of one version."""
    segments = extra.get(SEGMENTS)
    if isinstance(segments, dict) and segments.get("versions") and segments.get("turns", 1) <= 1:
        starts = np.concatenate([[0], np.cumsum(segments["tokens"])[:-1]]).astype(np.int64)
        versions = np.array(segments["versions"], np.int64)
        inside = starts < max(length, 1)
        return starts[inside], versions[inside]
    oldest, newest = extra.get("min_global_steps"), extra.get("max_global_steps")
    version = oldest if isinstance(oldest, int) and oldest == newest else UNKNOWN_VERSION
    return np.zeros(1, np.int64), np.full(1, version, np.int64)
