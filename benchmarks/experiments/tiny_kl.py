"""Testbed C: on-policy reference runs on disk, KL from them, and the jobs of all arms.

Axes: S responses, T response tokens, V vocabulary, R reference runs, E evaluated steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from benchmarks.experiments.job import ARMS, EVERY, REFERENCE, REFERENCE_SEEDS, SEEDS, SPEC, TinyArm, spread
from benchmarks.experiments.store import Job, Row, play, rounded, rows_of
from benchmarks.experiments.tiny import Probe, TinyRun
from dlc_sentinel.demo.policy import load_weights, make_policy, response_log_softmax, weights_of
from dlc_sentinel.demo.shape import PolicyShape
from dlc_sentinel.demo.spec import ArmSpec

ROWS, FOLDER = "c.jsonl", "c-references"
SAME = 1e-9
"""Below this many nats two references have not parted yet (step 0), and a ratio is nan."""


@torch.no_grad()
def divergence(left_STV: Tensor, right_STV: Tensor) -> float:
    """KL(left || right) in nats per response, mean over S: the closed form at each prefix, summed over T."""
    return float((left_STV.exp() * (left_STV - right_STV)).sum(-1).sum(-1).double().mean())


class References:
    """The on-policy runs: their policies at each evaluated step, and the KL between two of them."""

    def __init__(self, folder: Path, spec: ArmSpec = SPEC, seeds: Sequence[int] = REFERENCE_SEEDS) -> None:
        self._held = [np.load(folder / f"{seed}.npz") for seed in seeds]
        shape = PolicyShape(vocab_size=spec.vocab_size)
        self._models: list[Qwen3ForCausalLM] = [make_policy(shape, 0) for _ in seeds]
        self._step = -1

    @torch.no_grad()
    def log_softmax(self, probe: Probe, step: int) -> list[Tensor]:
        """R times [S, T, V]: what the references' policies of that step say at the probe's prefixes."""
        self._load(step)
        return [response_log_softmax(model, probe.prompts_SP, probe.tokens_ST) for model in self._models]

    def _load(self, step: int) -> None:
        if step != self._step:
            for model, held in zip(self._models, self._held, strict=True):
                names = [name for name in held.files if name.startswith(f"{step}/")]
                load_weights(model, {name.split("/", 1)[1]: held[name] for name in names if "/probe." not in name})
            self._step = step

    def own(self, number: int, step: int) -> Probe:
        """Fresh samples of a reference."""
        prompts, tokens = (self._held[number][f"{step}/probe.{part}"] for part in ("prompts", "tokens"))
        return Probe(torch.from_numpy(prompts), torch.from_numpy(tokens))

    def apart(self, step: int) -> float:
        """KL between two on-policy runs, nats per response: mean over ordered pairs, prefixes of the first."""
        values = []
        for number in range(len(self._models)):
            logps = self.log_softmax(self.own(number, step), step)
            values += [divergence(logps[number], other) for at, other in enumerate(logps) if at != number]
        return float(np.mean(values))


def make_reference(folder: Path, seed: int, spec: ArmSpec = SPEC) -> None:
    """One on-policy run; its weights and fresh samples at evaluated steps go to a file."""
    kept: dict[str, np.ndarray] = {}

    def keep(run: TinyRun, step: int) -> None:
        kept.update({f"{step}/{name}": value for name, value in weights_of(run.policy).items()})
        kept[f"{step}/probe.prompts"] = run.own.prompts_SP.numpy()
        kept[f"{step}/probe.tokens"] = run.own.tokens_ST.numpy()

    run = TinyRun(REFERENCE, seed, measure=keep, spec=spec)
    for step in range(spec.num_steps):
        run.step(step)
    kept["true_reward"] = np.array(run.course.true_reward)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{seed}.npz", **kept)  # type: ignore[arg-type]  # its stub takes ** for a flag


def run_arm(
    arm: TinyArm, seed: int, references: References, apart_E: Sequence[float], *, syncs: int = 0, spec: ArmSpec = SPEC
) -> Row:
    """One run of an arm as a row; apart_E: KL between two references at evaluated steps; syncs: of a fixed period."""
    full: list[float] = []
    prefix: list[float] = []

    def measure(run: TinyRun, step: int) -> None:
        with torch.no_grad():
            own_STV = response_log_softmax(run.policy, run.own.prompts_SP, run.own.tokens_ST)
            seen_STV = response_log_softmax(run.policy, run.seen.prompts_SP, run.seen.tokens_ST)
        full.append(float(np.mean([divergence(own_STV, on) for on in references.log_softmax(run.own, step)])))
        ons = references.log_softmax(run.seen, step)
        pairs = float(np.mean([divergence(left, right) for left, right in permutations(ons, 2)]))
        prefix.append(
            float(np.mean([divergence(seen_STV, on) for on in ons])) / pairs if pairs > SAME else float("nan")
        )

    at = spread(syncs, spec.num_steps) if arm.like else frozenset[int]()
    run = TinyRun(arm, seed, measure=measure, syncs_at=at, spec=spec)
    for step in range(spec.num_steps):
        run.step(step)
    apart = np.where(np.array(apart_E) > SAME, apart_E, np.nan)
    return _row(run, seed, {"ratio": np.array(full) / apart, "prefix": prefix})


def _row(run: TinyRun, seed: int, ratios: Mapping[str, Sequence[float] | np.ndarray]) -> Row:
    course = run.course
    values = {**ratios, "return": course.true_reward}
    per_step = {"seen_return": course.reward, "lag_rms": course.lag_rms, "discrepancy_rms": course.discrepancy_rms}
    return {
        "name": name_of(run.arm, seed), "world": "C", "length": run.spec.response_tokens, "arm": run.arm.name,
        "seed": seed, "every": EVERY, "num_steps": run.spec.num_steps, "syncs": course.syncs,
        "ess": {name: rounded(np.array(of)) for name, of in course.ess.items()},
        **{key: rounded(np.array(of, dtype=np.float64)) for key, of in {**values, **per_step}.items()},
    }  # fmt: skip


def name_of(arm: TinyArm, seed: int) -> str:
    """The row's name."""
    return f"C/{arm.name}/{seed}"


def play_c(out: Path, seconds: float) -> bool:
    """Reference runs, then arm by arm; True when none is left."""
    torch.set_num_threads(1)
    return play(out / ROWS, seconds, _jobs(out))


def _jobs(out: Path) -> Iterator[Job]:
    folder = out / FOLDER
    for seed in REFERENCE_SEEDS:
        yield [f"C/reference/{seed}"], partial(_reference, folder, seed)
    yield ["C/apart"], partial(_apart, folder)
    held: list[tuple[References, list[float]]] = []
    for arm in ARMS:
        for seed in SEEDS:
            yield [name_of(arm, seed)], partial(_run, out, arm, seed, held)


def _reference(folder: Path, seed: int) -> Sequence[Row]:
    make_reference(folder, seed)
    with np.load(folder / f"{seed}.npz") as kept:
        return [{"name": f"C/reference/{seed}", "return": rounded(kept["true_reward"])}]


def _apart(folder: Path) -> Sequence[Row]:
    references = References(folder)
    apart = [references.apart(step) for step in range(0, SPEC.num_steps, EVERY)]
    return [{"name": "C/apart", "kl": rounded(np.array(apart))}]


def _run(out: Path, arm: TinyArm, seed: int, held: list[tuple[References, list[float]]]) -> Sequence[Row]:
    rows = {row["name"]: row for row in rows_of(out / ROWS)}
    if not held:  # loaded once, by the first arm that runs
        held.append((References(out / FOLDER), rows["C/apart"]["kl"]))
    references, apart = held[0]
    syncs = len(rows[f"C/{arm.like}/{seed}"]["syncs"]) if arm.like else 0
    return [run_arm(arm, seed, references, apart, syncs=syncs)]
