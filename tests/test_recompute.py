"""All published numbers agree with a plain numpy recomputation from the tape to 1e-9."""

from __future__ import annotations

import numpy as np
import pytest
from factories import make_source, make_train
from plain import agree, recompute

from dlc_sentinel.config import Config
from dlc_sentinel.records import StepEnd
from dlc_sentinel.runtime import replay
from dlc_sentinel.tape.recorder import Recorder
from dlc_sentinel.tape.schema import TapeFrame
from dlc_sentinel.wire.codec import encode


def ragged(step, update, rng):
    """Sequences of 1 to 700 tokens, masked in places, in-flight versions, 5 groups; a few heavy tails."""
    lengths = rng.integers(1, 700, 24)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    num = int(offsets[-1])
    base = make_train(step, rows=1, length=num, lag=0.01 * (step + 1) * (update + 1), disc=2e-3, rng=rng)
    mask = rng.random(num) < 0.8
    mask[offsets[:-1]] = True
    starts = offsets[:-1]
    return make_train(
        step, version=step + 2, update=update, rows=24, length=1,
        offsets_S1=offsets, cur_N=base.cur_N, old_N=base.old_N, engine_N=base.engine_N,
        mask_N=mask if step % 2 else None, span_start_K=starts, span_version_K=rng.integers(step, step + 3, 24),
        groups=[f"g{i % 5}" for i in range(24)], ids=[f"{step}-{update}-{i}" for i in range(24)],
    )  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(step objects that the sentinel published, the same recomputed from its tape)."""
    folder = tmp_path_factory.mktemp("tape")
    rng = np.random.default_rng(7)
    recorder = Recorder(folder, token_bytes=2**30, part_bytes=2**22)
    frame_no, source = 0, make_source()
    for step in range(6):
        records = [ragged(step, update, rng) for update in range(1 + 4 * (step == 3))] + [StepEnd(source, step)]
        for record in records:
            for frame in encode(record, frame_no):
                recorder.frame(TapeFrame(1000.0 + step, "data", "p0", frame_no, bytes(frame)))
                frame_no += 1
    recorder.close(1010.0)
    _, _, report = replay(folder, Config())
    return {step["step"]: step for step in report["steps"]}, recompute(folder)


def test_every_step_was_published(published):
    steps, plain = published

    assert sorted(steps) == sorted(plain) == list(range(6))


@pytest.mark.parametrize("step", range(6))
def test_the_numbers_of_a_step_agree_to_1e_9(published, step):
    steps, plain = published

    wrong = {key: (steps[step][key], v) for key, v in plain[step].items() if not agree(steps[step][key], v)}

    assert wrong == {}
