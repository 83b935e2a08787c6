"""What the producers' own settings say before any data: transforms on one side, bounds that cannot bite. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dlc_sentinel.records import Json

MIN_TEMPERATURE = 0.01
"""vLLM samples at this where less is asked for, and greedily at 0."""
MIN_CLIP = 1e-3
"""A clip range below the noise of bf16 numerics clips noise."""
CLIPPED_ESS = 2.0
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def warnings(engine: Mapping[str, Json], trainer: Mapping[str, Json]) -> list[str]:
    """One sentence for each setting that will hurt; what is not known is not judged."""
    return [*_temperature(engine, trainer), *_cuts(engine), *_bounds(trainer)]


def unreported(engine: Mapping[str, Json]) -> dict[str, Json]:
    """The engine's settings where what it samples from is not what it reports: no number of the streams can show it."""
    if not str(engine.get("logprobs_mode", "")).startswith("raw"):
        return {}
    temperature = _number(engine, "temperature")
    tempered = not math.isnan(temperature) and temperature != 1.0
    if not tempered and not _cut_by(engine):
        return {}
    names = ("logprobs_mode", "temperature", "top_p", "top_k", "min_p", *PENALTIES)
    return {name: engine[name] for name in names if name in engine}


def _temperature(engine: Mapping[str, Json], trainer: Mapping[str, Json]) -> list[str]:
    sampled, scored = _number(engine, "temperature"), _number(trainer, "temperature")
    mode = str(engine.get("logprobs_mode", ""))
    found = []
    if not math.isnan(sampled) and not math.isnan(scored) and sampled != scored:
        found.append(f"the engine samples at temperature {sampled:g}, the trainer scores at {scored:g}")
    if mode.startswith("raw") and not math.isnan(sampled) and sampled != 1.0:
        found.append(
            f"the engine samples at temperature {sampled:g} but reports {mode}: logprobs of another policy than "
            "the one that sampled; set logprobs_mode=processed_logprobs"
        )
    if 0.0 < sampled < MIN_TEMPERATURE:
        found.append(f"temperature {sampled:g} is below {MIN_TEMPERATURE:g}, which vLLM raises to {MIN_TEMPERATURE:g}")
    return found


def _cut_by(engine: Mapping[str, Json]) -> list[str]:
    top_p, top_k, min_p = (_number(engine, name) for name in ("top_p", "top_k", "min_p"))
    cuts = []
    cuts += [f"top_p {top_p:g}"] if top_p < 1.0 else []
    cuts += [f"top_k {top_k:g}"] if top_k > 0 else []
    cuts += [f"min_p {min_p:g}"] if min_p > 0.0 else []
    cuts += [f"{name} {engine[name]}" for name, neutral in PENALTIES.items() if engine.get(name, neutral) != neutral]
    return cuts


def _cuts(engine: Mapping[str, Json]) -> list[str]:
    cuts = _cut_by(engine)
    if not cuts:
        return []
    text = "the engine samples with {}, of which the trainer's logprobs know nothing: they will differ by the kept mass"
    return [text.format(" and ".join(cuts))]


def _bounds(trainer: Mapping[str, Json]) -> list[str]:
    found = []
    for name in ("clip_ratio_low", "clip_ratio_high"):
        if 0.0 < _number(trainer, name) < MIN_CLIP:
            found.append(
                f"{name} {_number(trainer, name):g} is below the noise of any engine: it clips noise, not steps"
            )
    cap = _number(trainer, "rollout_is_threshold")
    if 0.0 < cap <= CLIPPED_ESS:
        found.append(
            f"the stack clips its weights at {cap:g}: an ESS of clipped weights stays above {1.0 / cap:.2g} whatever "
            "happens; the sentinel's is of the weights as they are"
        )
    return found


def _number(settings: Mapping[str, Json], name: str) -> float:
    value = settings.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
