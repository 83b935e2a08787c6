"""Where in their responses the tokens are that are off. Numbers only; the rules compare them.

Of a large step a sample of rows is at hand, and the worst rows: each worst row stands for itself, the others for the
rest. x = trainer - engine, nats. Axes: N tokens of all rows at hand, B bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dlc_sentinel.core.probe import SAMPLE_TOKENS, UNSURE_NATS, WholeRow
from dlc_sentinel.core.shape import STRAY_NATS
from dlc_sentinel.maths.cells import LOGP_EDGES, logp_bin
from dlc_sentinel.maths.chance import SURE_NATS, chance_nats
from dlc_sentinel.records import F64, I64, Bool, Json

FAR_TOKEN_SCALES, FAR_TOKEN_FLOORS, FAR_TOKEN_NATS = 8.0, 3.0, 0.05
"""A token is far where |x| is beyond all three; a scale is the median |x| of tokens about as likely."""
MIN_BIN_TOKENS = 20
MAX_SCALE = 6.0
FILL_IN_NATS = -1.0
"""A logprob of exactly 0 in one stream, where the other is below this, was put there by hand: no transform makes it."""
WILD_NATS = 20.0
MODULI = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MIN_PLACED = 3
SPECIAL_SHARE = 0.25
"""A place is special where so many of its tokens are far, beyond chance among so many places."""
SECOND_SHARE = 0.2
"""The second of a chunk's edges holds at least so much of what the first does, or there is but one (special: any)."""
ABOUT = 0.9
"""A multiple of a chunk that holds about as many far tokens is the chunk: strays fall on its parts, too."""
WHOLE_SHARE = 0.9
EDGE_TIMES = 3.0
"""Edges are far where so many times more of them are than of tokens away from them: some masks leave hardly others."""


def places_of(
    sample: Sequence[WholeRow], far_rows: Sequence[WholeRow], num_tokens: int, floor_rms: float, is_cut: bool
) -> dict[str, Json]:
    """What `Profile` says of single tokens. `far_rows`: the worst, worst first; `num_tokens`: of the whole step.

    `is_cut`: the engine sampled from a cut distribution, so tokens anywhere are off by what that leaves out.
    """
    rows, weight_N = _at_hand(sample, far_rows, num_tokens)
    engine_N = np.concatenate([row.engine_T for row in rows]).astype(np.float64)
    trainer_N = np.concatenate([row.trainer_T for row in rows]).astype(np.float64)
    x_N = trainer_N - engine_N
    num_sampled = sum(len(row.engine_T) for row in sample)
    far_N = _far(x_N, engine_N, trainer_N, num_sampled, floor_rms)
    if is_cut:
        far_N &= np.abs(x_N) > STRAY_NATS
    filled_N = (engine_N == 0.0) ^ (trainer_N == 0.0)
    zero_N = filled_N & (np.minimum(engine_N, trainer_N) < FILL_IN_NATS)
    wild_N = np.abs(x_N) > WILD_NATS
    whole = float(weight_N.sum())
    rest_N = np.where(filled_N | wild_N | far_N, 0.0, weight_N)
    rest = float(rest_N.sum())
    return (
        _placed(rows, far_N, weight_N)
        | _filled(rows, filled_N, zero_N, weight_N)
        | {
            "far_tokens": float(weight_N[far_N].sum()) / whole,
            "zero_tokens": float(weight_N[zero_N].sum()) / whole,
            "wild_tokens": float(weight_N[wild_N].sum()) / whole,
            "rest_rms": math.sqrt(float(rest_N @ (x_N * x_N)) / rest) if rest else math.nan,
        }
    )


def _filled(rows: Sequence[WholeRow], filled_N: Bool, zero_N: Bool, weight_N: F64) -> dict[str, Json]:
    """How the tokens with a logprob of exactly 0 on one side lie: whole rows of them, runs, or last tokens."""
    if not zero_N.any():
        return {}
    starts_S = np.cumsum([0] + [len(row.engine_T) for row in rows])[:-1]
    lengths_S = np.diff(np.append(starts_S, len(zero_N)))
    whole_S = np.add.reduceat(filled_N, starts_S, dtype=np.int64) >= WHOLE_SHARE * lengths_S
    whole_N = np.repeat(whole_S, lengths_S)
    zeros = float(weight_N[zero_N].sum())
    last_N = np.zeros(len(zero_N), np.bool_)
    last_N[starts_S + lengths_S - 1] = True
    part_N = filled_N & ~whole_N
    begins_N = part_N & ~np.concatenate([[False], part_N[:-1]])
    begins_N |= part_N & np.isin(np.arange(len(part_N)), starts_S)
    begun = float(weight_N[begins_N].sum())
    return {
        "zero_whole": float(weight_N[zero_N & whole_N].sum()) / zeros,
        "zero_last": float(weight_N[zero_N & last_N].sum()) / zeros,
        "zero_run": float(weight_N[part_N].sum()) / begun if begun else math.nan,
    }


def _at_hand(sample: Sequence[WholeRow], far_rows: Sequence[WholeRow], num_tokens: int) -> tuple[list[WholeRow], F64]:
    """The sampled rows, then the worst that are not of them, and the tokens of the step that each token stands for."""
    taken, num_taken = {id(row) for row in sample}, 0
    worst: dict[int, WholeRow] = {}
    for row in far_rows:
        worst[id(row)] = row
        num_taken += 0 if id(row) in taken else len(row.engine_T)
        if num_taken > SAMPLE_TOKENS:
            break
    rows = [*sample, *(row for key, row in worst.items() if key not in taken)]
    num_worst = sum(len(row.engine_T) for row in worst.values())
    num_others = sum(len(row.engine_T) for row in sample if id(row) not in worst)
    others = max((num_tokens - num_worst) / num_others, 1.0) if num_others else 1.0
    weights = [1.0 if id(row) in worst else others for row in rows]
    return rows, np.repeat(weights, [len(row.engine_T) for row in rows])


def _far(x_N: F64, engine_N: F64, trainer_N: F64, num_sampled: int, floor_rms: float) -> Bool:
    """Beyond what tokens about as likely are off by; binned by the likelier side, so that a wrong value stands out.

    What is usual, the first `num_sampled` tokens say: a random sample.
    """
    logp_N, size_N = np.maximum(engine_N, trainer_N), np.abs(x_N)
    bin_N = logp_bin(logp_N)
    size_M, bin_M, unsure_M = size_N[:num_sampled], bin_N[:num_sampled], logp_N[:num_sampled] < UNSURE_NATS
    usual = float(np.median(size_M[unsure_M])) if unsure_M.any() else 0.0
    scale_B = np.full(len(LOGP_EDGES) + 1, usual)
    for index in range(len(scale_B)):
        of_bin = size_M[bin_M == index]
        if len(of_bin) >= MIN_BIN_TOKENS:
            scale_B[index] = min(float(np.median(of_bin)), MAX_SCALE * usual)
    limit_B = np.maximum(FAR_TOKEN_SCALES * scale_B, max(FAR_TOKEN_FLOORS * floor_rms, FAR_TOKEN_NATS))
    return size_N > limit_B[bin_N]


def _placed(rows: Sequence[WholeRow], far_N: Bool, weight_N: F64) -> dict[str, Json]:
    """Runs, edges of masked spans, one place, or places modulo a chunk."""
    if far_N.sum() < MIN_PLACED:
        return {}
    place_N, starts_N = _starts(rows)
    edge_N = np.zeros(len(place_N), np.bool_)
    edge_N[1:] = np.diff(place_N) > 1
    edge_N = (edge_N & ~starts_N) | (starts_N & (place_N > 0))
    # both sides of a masked span: a mask may begin a token late, too
    edge_N[:-1] |= edge_N[1:] & ~starts_N[1:]
    begins_N = far_N & ~(np.concatenate([[False], far_N[:-1]]) & ~starts_N & ~edge_N)
    far = float(weight_N[far_N].sum())
    out: dict[str, Json] = {"far_run": far / float(weight_N[begins_N].sum())}
    if edge_N.sum() >= MIN_PLACED:
        out |= _at_edges(far_N, edge_N, begins_N, weight_N)
    return out | _at_places(place_N, far_N)


def _at_edges(far_N: Bool, edge_N: Bool, begins_N: Bool, weight_N: F64) -> dict[str, Json]:
    """How many edges are far, and how many far tokens lie in runs from there; {} where tokens elsewhere are as far."""
    begun_N = np.maximum.accumulate(np.where(begins_N, np.arange(len(far_N)), 0))
    of_edge_N = far_N & edge_N[begun_N]
    free_N = ~(edge_N | of_edge_N)
    at_edge = float(weight_N[far_N & edge_N].sum() / weight_N[edge_N].sum())
    free = float(weight_N[free_N].sum())
    if free and at_edge < EDGE_TIMES * float(weight_N[far_N & free_N].sum()) / free:
        return {}
    return {"edge_far": at_edge, "edge_of_far": float(weight_N[of_edge_N].sum() / weight_N[far_N].sum())}


def _at_places(place_N: I64, far_N: Bool) -> dict[str, Json]:
    """One place or a chunk, of the tokens at hand: of the places that are far beyond chance, else of all far tokens."""
    num_P = np.bincount(place_N)
    far_P: F64 = np.bincount(place_N, far_N).astype(np.float64)
    share_P = far_P / np.maximum(num_P, 1)
    sure_P = chance_nats(share_P, far_N.mean(), num_P) >= SURE_NATS + math.log(len(num_P))
    special_P = sure_P & (share_P >= SPECIAL_SHARE) & (far_P >= MIN_PLACED)
    out: dict[str, Json] = {}
    if special_P.sum() == 1:
        out = {"place": int(special_P.argmax()), "place_far": float(share_P[special_P][0])}
    several = special_P.sum() > 1
    if several:
        far_P = np.where(special_P, far_P, 0.0)
    shares = {modulus: _share_of_one_class(far_P, modulus, 0.0 if several else SECOND_SHARE) for modulus in MODULI}
    share = max(shares.values())
    best = max(modulus for modulus in MODULI if shares[modulus] >= ABOUT * share)
    return out | {"modulus": best if share else 0, "modulus_tokens": shares[best], "modulus_seen": int(far_P.sum())}


def _share_of_one_class(far_P: F64, modulus: int, second_share: float) -> float:
    """Of the far tokens, the share at places of one remainder; 0 where these are all but one place."""
    counts = np.bincount(np.arange(len(far_P)) % modulus, far_P)
    of_class = np.sort(far_P[counts.argmax() :: modulus])
    several = len(of_class) > 1 and of_class[-2] > second_share * of_class[-1]
    return float(counts.max() / far_P.sum()) if several else 0.0


def _starts(rows: Sequence[WholeRow]) -> tuple[I64, Bool]:
    """([N] places in the response, [N] True on the first token of each row)."""
    place_N = np.concatenate([row.place_T for row in rows])
    starts_N = np.zeros(len(place_N), np.bool_)
    starts_N[np.cumsum([0] + [len(row.place_T) for row in rows[:-1]])] = True
    return place_N, starts_N
