"""What the rows of a step look like where they are off: by row, by place, as a function of logp. Numbers only.

Each number is what one kind of fault moves and the others do not; the rules compare them. x = trainer - engine, nats,
at the generator's weights where these rows are exact. Axes: S rows, N tokens of all sampled rows, T tokens of one row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from dlc_sentinel.core.pairing import RowClass, Usual, classify, usual_of
from dlc_sentinel.core.places import places_of
from dlc_sentinel.core.probe import UNSURE_NATS, Probe, RowTable, WholeRow
from dlc_sentinel.core.rowfloor import FAR_NATS, RowFloor, row_floor
from dlc_sentinel.core.rowkeys import keys_of
from dlc_sentinel.core.shape import FunctionOfLogp, function_of_logp
from dlc_sentinel.maths.arrays import UNKNOWN_AGE
from dlc_sentinel.maths.cells import LOGP_EDGES, logp_bin
from dlc_sentinel.records import F64, Json

NAN = math.nan
LABEL_TIMES = 2.0
END_FLOORS, END_NATS = 3.0, 0.05
MAX_CLASSIFIED = 48
MIN_BIN_TOKENS = 20
FEW_TOKENS = 1 << 14
"""What has no place in a row is measured on about so many."""
LIKELY_NATS = -1.0
MIN_OWN_TOKENS = 1000
"""Fewer say nothing of whether the trainer's two passes are of one text."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Shares are 0..1 and of all rows or all tokens, as far as these are at hand; nan = too little to say."""

    num_rows: int = 0
    num_tokens: int = 0
    correlation: float = NAN
    """Of engine and trainer logprobs, on sampled tokens with engine logp < -0.05 ..."""
    correlation_tokens: int = 0
    """... of which there are so many."""
    own_correlation: float = NAN
    """The same of the trainer's two passes, at the generator's weights and now."""
    far_rows: float = NAN
    """Share of all rows that are far."""
    near_rows: float = NAN
    """Share of all rows within twice the floor."""
    shifted_rows: float = 0.0
    """Far rows in which one stream fits the other some places on ..."""
    offset: int = 0
    """... and by how many, most often: engine[t] belongs to trainer[t + offset]."""
    offset_rows: int = 0
    """Rows looked at that are shifted ..."""
    offset_share: float = 0.0
    """... and share of them that are so by `offset`."""
    unpaired_rows: float = 0.0
    """Far rows in which no offset makes the streams fit."""
    broken_rows: float = 0.0
    """Far rows that are fine up to a token and do not fit after it ..."""
    broken_at: float = NAN
    """... the middle one of these tokens' places."""
    fitting_rows: float = 0.0
    """Far rows whose streams belong together all the same: of other weights, or of another transform."""
    others_correlation: float = NAN
    """Median correlation of the two streams of far rows that are neither shifted, nor unpaired, nor broken."""
    mislabelled_rows: float = 0.0
    """Exact rows of age > 0 that fit the trainer's present weights twice as well as their label's."""
    last_far: float = 0.0
    """Share of rows whose last token is off ..."""
    last_zero: float = 0.0
    """... by a logprob of exactly 0 in one stream."""
    last_usual: float = 0.0
    """... and share of the other tokens, about as likely as these, that are off by as much."""
    first_far: float = 0.0
    first_usual: float = 0.0
    far_tokens: float = 0.0
    far_run: float = NAN
    """Mean length of a run of far tokens."""
    zero_tokens: float = 0.0
    """Tokens with a logprob of exactly 0 in one stream, below -1 in the other."""
    zero_whole: float = 0.0
    """Share of these in rows that are all but wholly such ..."""
    zero_last: float = 0.0
    """... and on the last token of their row."""
    zero_run: float = NAN
    """Mean length of a run of logprobs of exactly 0 in one stream, in the other rows."""
    rest_rms: float = NAN
    """rms of the tokens that are not far, wild or exactly 0 in one stream."""
    wild_tokens: float = 0.0
    """Tokens more than 20 nats apart, as no two models of one text are."""
    modulus: int = 0
    """Far tokens sit at one place modulo this ..."""
    modulus_tokens: float = 0.0
    """... this share of them ..."""
    modulus_seen: int = 0
    """... of so many that were looked at."""
    place: int = -1
    """The one place in the response at which tokens are far beyond chance ..."""
    place_far: float = NAN
    """... this share of them."""
    edge_far: float = NAN
    """Share of first tokens after a masked span that are far."""
    edge_of_far: float = NAN
    """Share of far tokens in runs that begin after a masked span."""
    likely_rms: float = NAN
    """rms of tokens that are likely to the trainer."""
    place_ratio: float = NAN
    """rms of the last quarter of places over that of the first, where it grows over all four."""
    distinct: float = NAN
    """Distinct engine logprobs per token, over the trainer's own share."""
    replica: str = ""
    """The replicas whose rows alone are far."""
    cached_alone: bool = False
    """Rows whose prompts came from the prefix cache are off and the others are not."""
    long_from: int = 0
    """Tokens from which on rows are far, and hardly any shorter one is; 0 = that is not so."""
    keyed_groups: float = 0.0
    """Share of groups, of two rows or more, whose rows are all far, where the others' are not."""
    function: FunctionOfLogp = field(default_factory=FunctionOfLogp)


def profile_of(probe: Probe, floor_rms: float) -> Profile:
    """The profile of a step's rows against the run's floor, nats."""
    table, sample, worst = probe.table(), probe.sample(), probe.worst()
    if not sample:
        return Profile()
    floor = row_floor(table, floor_rms)
    far_S = floor.far(table)
    x_N = np.concatenate([row.x_T for row in sample])
    engine_N = np.concatenate([row.engine_T for row in sample]).astype(np.float64)
    trainer_N = np.concatenate([row.trainer_T for row in sample]).astype(np.float64)
    far_rows = [row for row in worst if floor.is_far(row)]
    far_share = float(far_S.mean())
    near_share = float(floor.near(table).mean())
    usual = usual_of(sample, floor.rms)
    classes = _classes(worst, sample, far_share, floor, usual)
    # of a noisy engine's rows only some are far although all are shifted
    shifted = near_share < 0.5 and classes.get("shifted_rows", 0.0) > 0.5 * far_share
    function = _function(sample, classes, usual, int(classes["offset"]) if shifted else 0)
    if far_S.any() and not function.is_transform:
        # some requests were sampled otherwise, or one replica samples so
        of_far = _function([row for row in sample if floor.is_far(row)], classes, usual, 0)
        function = of_far if of_far.is_transform else function
    return Profile(
        num_rows=len(table.num_S),
        num_tokens=int(table.num_S.sum()),
        **_correlation(engine_N, trainer_N),
        own_correlation=_own_correlation(trainer_N, sample) if probe.exact else NAN,
        far_rows=far_share,
        near_rows=near_share,
        **classes,
        **_ends(table, sample, x_N, np.maximum(engine_N, trainer_N), floor_rms),
        **places_of(sample, far_rows, int(table.num_S.sum()), floor_rms, function.is_cut),
        mislabelled_rows=_mislabelled(sample) if probe.exact else 0.0,
        **_engine_shape(sample, x_N, engine_N, trainer_N),
        **keys_of(table, far_S, sample, usual),
        function=function,
    )


def _correlation(engine_N: F64, trainer_N: F64) -> dict[str, Json]:
    unsure_N = engine_N < UNSURE_NATS
    num = int(unsure_N.sum())
    e_N, t_N = engine_N[unsure_N], trainer_N[unsure_N]
    constant = num < 2 or e_N.std() == 0.0 or t_N.std() == 0.0
    return {"correlation": NAN if constant else float(np.corrcoef(e_N, t_N)[0, 1]), "correlation_tokens": num}


def _own_correlation(trainer_N: F64, sample: Sequence[WholeRow]) -> float:
    own = _correlation(trainer_N, np.concatenate([row.current_T for row in sample]).astype(np.float64))
    return float(own["correlation"]) if own["correlation_tokens"] >= MIN_OWN_TOKENS else NAN


def _classes(
    worst: Sequence[WholeRow], sample: Sequence[WholeRow], far_share: float, floor: RowFloor, usual: Usual
) -> dict[str, Json]:
    """Far rows by class; what is seen of the rows at hand stands for all far rows."""
    seen = {id(row): row for row in (*worst, *sample)}.values()
    far = [row for row in seen if floor.is_far(row)][:MAX_CLASSIFIED]
    if not far:
        return {}
    found = [classify(row, usual) for row in far]

    def share(kind: RowClass) -> float:
        return far_share * sum(f.kind == kind for f in found) / len(found)

    offsets = [f.offset for f in found if f.kind == "shifted"]
    offset = max(sorted(set(offsets)), key=offsets.count) if offsets else 0
    breaks = [f.place for f in found if f.kind == "broken"]
    others = [f.correlation for f in found if f.kind in ("fitting", "unknown")]
    return {
        "shifted_rows": share("shifted"),
        "unpaired_rows": share("unpaired"),
        "broken_rows": share("broken"),
        "fitting_rows": share("fitting"),
        "others_correlation": float(np.median(others)) if others else NAN,
        "offset": offset,
        "offset_rows": len(offsets),
        "offset_share": offsets.count(offset) / len(offsets) if offsets else 0.0,
        "broken_at": float(np.median(breaks)) if breaks else NAN,
    }


def _mislabelled(sample: Sequence[WholeRow]) -> float:
    """Share of rows, of age > 0, whose label is wrong: a right one makes trainer now - engine the larger of the two."""
    aged = [row for row in sample if 0 < row.age < UNKNOWN_AGE]
    pairs = [(row.rms, _rms(row.current_T.astype(np.float64) - row.engine_T)) for row in aged]
    wrong = [at_label > max(LABEL_TIMES * now, FAR_NATS) for at_label, now in pairs]
    return sum(wrong) / len(sample)


def _function(sample: Sequence[WholeRow], classes: Mapping[str, Json], usual: Usual, offset: int) -> FunctionOfLogp:
    """The shape of trainer - engine, all shifted back by `offset` (0: no shifted row), of rows that belong together."""
    if not sample:
        return FunctionOfLogp()
    torn = ("unpaired", "broken") if offset else ("unpaired", "broken", "shifted")
    if any(classes.get(f"{kind}_rows", 0.0) for kind in torn):
        kept = [row for row in sample[:MAX_CLASSIFIED] if classify(row, usual).kind not in torn]
        if not kept:
            return FunctionOfLogp()
        sample = kept
    engine, trainer = (slice(max(k, 0), min(k, 0) or None) for k in (-offset, offset))
    # without last tokens: a hand-made one is no sampling transform
    engine_N = np.concatenate([row.engine_T[:-1][engine] for row in sample]).astype(np.float64)
    trainer_N = np.concatenate([row.trainer_T[:-1][trainer] for row in sample]).astype(np.float64)
    row_N = np.repeat(np.arange(len(sample)), [max(len(row.engine_T) - 1 - abs(offset), 0) for row in sample])
    few = slice(None, None, 1 + len(engine_N) // FEW_TOKENS)
    return function_of_logp(engine_N[few], trainer_N[few], row_N[few])


def _ends(table: RowTable, sample: Sequence[WholeRow], x_N: F64, likelier_N: F64, floor_rms: float) -> dict[str, Json]:
    """First and last tokens that are off, beside the others about as likely; `likelier_N`: the likelier side's logp."""
    limit = max(END_FLOORS * floor_rms, END_NATS)
    inner_N = np.ones(len(x_N), np.bool_)
    ends_S = np.cumsum([len(row.engine_T) for row in sample])
    inner_N[ends_S - 1] = inner_N[np.append(0, ends_S[:-1])] = False
    far_N = np.abs(x_N) > limit
    whole = float(far_N.mean())
    far_B, num_B = (
        np.bincount(logp_bin(likelier_N[of_N]), minlength=len(LOGP_EDGES) + 1) for of_N in (inner_N & far_N, inner_N)
    )
    usual_B = np.where(num_B >= MIN_BIN_TOKENS, far_B / np.maximum(num_B, 1), whole)
    out: dict[str, Json] = {}
    for end in ("first", "last"):
        engine_S, trainer_S = getattr(table, f"{end}_engine_S"), getattr(table, f"{end}_trainer_S")
        is_far_S = np.abs(trainer_S.astype(np.float64) - engine_S) > limit
        out[f"{end}_far"] = float(is_far_S.mean())
        out[f"{end}_usual"] = max(float(usual_B[logp_bin(np.maximum(engine_S, trainer_S))].mean()), whole)
        if end == "last":
            out["last_zero"] = float((is_far_S & ((engine_S == 0.0) ^ (trainer_S == 0.0))).mean())
    return out


def _engine_shape(sample: Sequence[WholeRow], x_N: F64, engine_N: F64, trainer_N: F64) -> dict[str, Json]:
    place_N = np.concatenate([row.place_T for row in sample])
    few = slice(None, None, 1 + len(x_N) // FEW_TOKENS)
    x_N, engine_N, trainer_N, place_N = x_N[few], engine_N[few], trainer_N[few], place_N[few]
    likely_N = trainer_N > LIKELY_NATS
    out: dict[str, Json] = {}
    if likely_N.sum() >= MIN_BIN_TOKENS:
        out["likely_rms"] = _rms(x_N[likely_N])
    quarter_N = np.minimum(4 * place_N // max(int(place_N.max()) + 1, 1), 3)
    quarters = [_rms(x_N[quarter_N == q]) if (quarter_N == q).sum() >= MIN_BIN_TOKENS else NAN for q in range(4)]
    if all(a < b for a, b in pairwise(quarters)):
        out["place_ratio"] = quarters[3] / max(quarters[0], 1e-12)
    unsure_N = (engine_N < UNSURE_NATS) & (trainer_N < UNSURE_NATS)
    if unsure_N.sum() >= 256:
        own = len(np.unique(trainer_N[unsure_N]))
        out["distinct"] = len(np.unique(engine_N[unsure_N])) / own
    return out


def _rms(x_N: F64) -> float:
    return math.sqrt(float(np.mean(x_N * x_N))) if len(x_N) else NAN
