"""Started by torch.distributed.run on every rank: a GRPOTrainer over gloo, attached to the sentinel of DLC_SENTINEL.

python ranks_job.py FOLDER STEPS; prints one JSON line: rank, steps trained, versions the engine generated with.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from dlc_sentinel.integrations.trl_hook import attach
from stacks.trl.job import ExactEngine, grpo


def main(folder, max_steps):
    with pytest.MonkeyPatch.context() as patch:
        job = grpo(
            patch, Path(folder), max_steps=max_steps, steps_per_generation=max_steps, learning_rate=3e-2,
            prompts_per_step=2, engine=ExactEngine, ddp_backend="gloo",
        )  # fmt: skip
        attached = attach(job.trainer)
        job.trainer.train()
        attached.hook.close()
    rank = int(os.environ["RANK"])
    out = {"rank": rank, "trained": job.trainer.state.global_step, "syncs": job.engine.num_syncs}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(out | {"errors": attached.num_errors}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
