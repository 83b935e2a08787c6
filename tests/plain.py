"""The published numbers once more, from the frames of a tape, in the plainest numpy: loops, no chunks, no sketches.

Nothing of `dlc_sentinel.maths` or `core` is used, except the bucket a quantile is rounded to (by its documented rule).
Exact streams only: cur and old (the generator's) in every trainer record, engine logprobs there or in rollouts.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np

from dlc_sentinel.records import Rollout, Train
from dlc_sentinel.tape.replay import read_tape
from dlc_sentinel.wire.codec import decode

RUNGS = {"1": 1, "8": 8, "32": 32, "128": 128, "512": 512, "inf": None}


def recompute(directory, horizon=32, run=None, only=None):
    """{step: the numbers of its step object}, of one run (or of the only one), for the steps in `only`."""
    rows, generated = {}, {}
    for frame in read_tape(directory):
        if frame.channel != "data":
            continue
        record, _ = decode(frame.frame)
        if isinstance(record, Rollout) and run in (None, record.source.run):
            for i, name in enumerate(record.ids):
                a, b = int(record.offsets_S1[i]), int(record.offsets_S1[i + 1])
                parts = generated.setdefault(name, ([], []))
                parts[0].append(record.logprobs_N[a:b])
                parts[1].append(token_versions(record, a, b))
        if isinstance(record, Train) and run in (None, record.source.run) and (only is None or record.step in only):
            rows.setdefault(record.step, {}).setdefault(record.update, []).append(record)
    return {
        step: numbers(
            {u: [row for r in records for row in rows_of(r, generated)] for u, records in updates.items()},
            horizon,
            step,
        )
        for step, updates in sorted(rows.items())
    }


def token_versions(record, a, b):
    """Generator version of each token a..b of a record."""
    versions = np.zeros(b - a, np.int64)
    for k, start in enumerate(record.span_start_K):
        if a <= start < b:
            versions[start - a :] = record.span_version_K[k]
    return versions


def agree(a, b):
    """True when the published value is the recomputed one to 1e-9; keys that only it has do not count."""
    if isinstance(b, dict):
        return all(agree(a[key], value) for key, value in b.items())
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(agree, a, b))
    if b is None or isinstance(b, str):
        return a == b
    return a is not None and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def rows_of(record, generated):
    for i, name in enumerate(record.ids):
        a, b = int(record.offsets_S1[i]), int(record.offsets_S1[i + 1])
        keep = slice(None) if record.mask_N is None else record.mask_N[a:b]
        if record.engine_N is None:
            engine, versions = (np.concatenate(parts) for parts in generated[name])
        else:
            engine, versions = record.engine_N[a:b], token_versions(record, a, b)
        cur, old, engine = (x.astype(np.float64)[keep] for x in (record.cur_N[a:b], record.old_N[a:b], engine))
        prompt = record.groups[i] if record.groups else name
        group = int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest(), "little", signed=True)
        yield {
            "lag": cur - old,
            "disc": old - engine,
            "total": cur - engine,
            "age": record.version - versions[keep],
            "group": group,
        }


def numbers(updates, horizon, step):
    order = sorted(updates)
    last = order[-max(1, len(order) // 4) :]
    everything = [row for u in order for row in updates[u]]
    rows = [row for u in last for row in updates[u]]
    lags = [row["lag"] for row in rows]
    logw = {name: [np.concatenate([blocks(x, h) for x in lags])] for name, h in RUNGS.items()}
    ess = {name: kish(np.concatenate(parts)) for name, parts in logw.items()}
    by_age = {}
    for row in rows:
        for weight, age in zip(blocks(row["lag"], horizon), blocks(row["age"], horizon, np.max), strict=True):
            by_age.setdefault(int(age), []).append(weight)
    out = {
        "num_tokens": sum(len(row["lag"]) for row in everything),
        "num_groups": len({row["group"] for row in everything}),
        "num_blocks": {name: len(parts[0]) for name, parts in logw.items()},
        "version_age": {
            "mean": float(np.mean(np.concatenate([row["age"] for row in everything]))),
            "max": float(max(row["age"].max() for row in everything)),
        },
        "updates": [last[0], last[-1]],
        "lag_ess": ess,
        "lag_ess_by_age": {str(age): kish(np.array(w)) for age, w in sorted(by_age.items())},
        "lag_ess_interval": interval(rows, horizon, step),
        "coverage": {name: coverage(lags, h) for name, h in RUNGS.items()},
        "lag": stream([row["lag"] for row in rows]),
        "total": stream([row["total"] for row in rows]),
        "discrepancy": stream([row["disc"] for row in everything]),
        "kl": kl(lags),
    }
    out["half_horizon"] = half_horizon(ess, out["coverage"])
    return out


def blocks(x, horizon, reduce=np.sum):
    """Reduced values of blocks of `horizon` tokens; what is left over: the last `horizon` tokens are one more block."""
    if horizon is None or len(x) <= horizon:
        return np.array([reduce(x)])
    whole = len(x) // horizon
    cuts = [x[k * horizon : (k + 1) * horizon] for k in range(whole)]
    if len(x) % horizon:
        cuts.append(x[-horizon:])
    return np.array([reduce(cut) for cut in cuts])


def kish(logw):
    w = np.exp(logw - logw.max())
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def coverage(lags, horizon):
    if horizon is None:
        return 1.0
    full = sum(len(blocks(x, horizon)) for x in lags if len(x) >= horizon)
    return full / sum(len(blocks(x, horizon)) for x in lags)


def half_horizon(ess, covered):
    reached = 0.0
    for name, horizon in RUNGS.items():
        if ess[name] < 0.5 or covered[name] < 0.5:
            break
        reached = math.inf if horizon is None else float(horizon)
    return "inf" if math.isinf(reached) else reached


def interval(rows, horizon, seed, draws=200, level=0.90):
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(blocks(row["lag"], horizon))
    if len(groups) < 2:
        return [None, None]
    per_group = [np.concatenate(groups[key]) for key in sorted(groups)]
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(draws):
        values.append(
            kish(np.concatenate([per_group[i] for i in rng.integers(0, len(per_group), size=len(per_group))]))
        )
    return [float(v) for v in np.quantile(values, [(1 - level) / 2, (1 + level) / 2])]


def stream(parts):
    x = np.concatenate(parts)
    return {
        "mean": float(x.mean()),
        "rms": float(np.sqrt((x**2).mean())),
        "p50_abs": quantile(x, 0.5),
        "p99_abs": quantile(x, 0.99),
    }


def quantile(x, q):
    """Value of rank ceil(q n) of |x|, moved to the middle of its bucket: 128 equal ones to an octave."""
    value = float(np.sort(np.abs(x))[max(math.ceil(q * len(x)), 1) - 1])
    if value < 2.0**-30:
        return 0.0
    octave = 2.0 ** math.floor(math.log2(value))
    return octave * (1 + (math.floor((value / octave - 1) * 128) + 0.5) / 128)


def kl(lags):
    x = np.concatenate(lags)
    k3 = np.expm1(x) - x
    weights = [np.exp(np.cumsum(lag)) for lag in lags]
    full = 0.0
    for t in range(max(map(len, lags))):
        top = sum(w[t] * lag[t] for w, lag in zip(weights, lags, strict=True) if t < len(lag))
        full += top / sum(w[min(t, len(w) - 1)] for w in weights)
    return {
        "gen_now_prefix": float(k3.mean()),
        "gen_now_full": float(k3.sum() / len(lags)),
        "gen_now_k1": float(-x.sum() / len(lags)),
        "now_gen_prefix": float((np.exp(x) * x - np.exp(x) + 1).mean()),
        "now_gen_full": float(full),
    }
