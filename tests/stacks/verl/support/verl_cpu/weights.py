"""A checkpoint engine that carries weights from trainer to separate rollouts through a file in shared memory."""

import asyncio
import os
from pathlib import Path

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("shmfile")
class SharedFile(CheckpointEngine):
    def __init__(self, bucket_size=0, is_master=False, **rest):
        self.is_master = is_master

    @staticmethod
    def _path(global_steps):
        return Path(os.environ["VERL_CPU_WEIGHTS_DIR"], f"weights.{global_steps}")

    def prepare(self):
        return {}

    @classmethod
    def build_topology(cls, num_actors, num_rollouts, metadata):
        ranks = list(range(num_actors + num_rollouts))
        return {"rank": ranks[:num_actors]}, {"rank": ranks[num_actors:]}

    def init_process_group(self, **rest):
        return None

    def finalize(self):
        return None

    async def send_weights(self, weights, global_steps=None):
        state = {}
        for name, tensor in weights:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            state[name] = whole.detach().cpu().float().clone()
        if self.is_master:
            path = self._path(global_steps)
            torch.save(state, f"{path}.part")
            os.replace(f"{path}.part", path)
        return {}

    async def receive_weights(self, global_steps=None):
        path = self._path(global_steps)
        while not path.exists():
            await asyncio.sleep(0.02)
        for name, tensor in torch.load(path).items():
            yield name, tensor
