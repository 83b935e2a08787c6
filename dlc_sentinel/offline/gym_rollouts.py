"""Rollouts of NeMo Gym: what an engine generated, with no trainer beside it; only the engine's own side can be checked.

A line is one rollout, {"response": {"output": [call, ...]}}, or one call; a call has prompt_token_ids,
generation_token_ids and generation_log_probs. A dialogue must go on where it was: the prompt of a call begins with the
prompt and the response of the call before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.lines import numbered, opened, tree_of
from dlc_sentinel.offline.samples import Sample, records
from dlc_sentinel.records import Hello, Json, Record, Source, StepEnd


class GymRollouts:
    """One file. `records` once; then `problems` holds (line number, why), `notes` what was seen in the rest."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.problems: list[tuple[int, str]] = []
        self.notes = ["rollouts of NeMo Gym hold the engine's logprobs only: there is nothing to compare them with"]
        self.run = self.path.name.removesuffix(".gz").removesuffix(".jsonl")
        self.done, self.total = 0, self.path.stat().st_size
        self._num_responses = self._num_tokens = self._num_bad = 0
        self._broken: list[str] = []

    def records(self) -> Iterator[Record]:
        source = Source(self.run, "engine", "dump")
        yield Hello(source, stack="NeMo Gym")
        for number, text in self._lines():
            try:
                samples = self._samples(tree_of(text), number)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self.problems.append((number, f"{type(error).__name__}: {error}"))
                continue
            yield from records(source, 0, -1, samples)
        yield StepEnd(source, 0)
        self._say()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with opened(self.path) as file:
                for number, text in numbered(file, self.problems):
                    self.done = min(self.done + len(text), self.total)
                    if text.strip():
                        yield number, text
        except (OSError, EOFError) as error:
            raise TapeError(f"{self.path}: cannot be read ({error})") from error

    def _samples(self, tree: Mapping[str, Json], number: int) -> list[Sample]:
        calls = _calls(tree)
        if not calls:
            raise ValueError("no call with generation_log_probs")
        samples = []
        for turn, call in enumerate(calls):
            engine_T = np.array(call["generation_log_probs"], np.float32)
            self._num_responses += 1
            self._num_tokens += len(engine_T)
            self._num_bad += int((~np.isfinite(engine_T) | (engine_T > 0)).sum())
            if turn and (at := _break(calls[turn - 1], call)) >= 0:
                self._broken.append(f"line {number}, call {turn}, token {at}")
            samples.append(Sample(f"{number}-{turn}", engine_T, None, np.ones(len(engine_T), np.bool_)))
        return samples

    def _say(self) -> None:
        self.notes.append(
            f"{self._num_responses} responses, {self._num_tokens} tokens, {self._num_bad} of them no logprob "
            "(not finite, or above 0)"
        )
        if self._broken:
            self.notes.append(
                f"in {len(self._broken)} calls the prompt does not go on where the call before ended (retokenised, or "
                f"an earlier turn was rewritten), first: {self._broken[0]}; a trainer that scores the whole text "
                "compares other tokens from there on"
            )


def _calls(tree: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    """The model calls of a line that carry token data, in order."""
    if "generation_log_probs" in tree:
        return [tree]
    response = tree.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    return [call for call in output or () if isinstance(call, dict) and call.get("generation_log_probs")]


def _break(before: Mapping[str, Json], call: Mapping[str, Json]) -> int:
    """Place of the first token at which a call's prompt differs from what came before it; -1 = none, or not known."""
    told: Sequence[int] = [*before.get("prompt_token_ids", ()), *before.get("generation_token_ids", ())]
    prompt: Sequence[int] = call.get("prompt_token_ids", ())
    if not told or not prompt:
        return -1
    return next((at for at, (a, b) in enumerate(zip(told, prompt, strict=False)) if a != b), -1)
