"""verl's two ends of a rollout backend: the replica that starts the engine, the adapter that pushes weights into it."""

import os

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from verl_cpu.engine import Engine


def engine_name(replica_rank):
    return f"cpuhf_server_{replica_rank}_0"


class CpuReplica(RolloutReplica):
    async def launch_servers(self):
        options = {"name": engine_name(self.replica_rank), "num_cpus": 0, "max_concurrency": 1000}
        server = ray.remote(Engine).options(**options).remote(self.model_config.path, self.config.response_length)
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"127.0.0.1:{9000 + self.replica_rank}"


class ServerAdapter(BaseRollout):
    def __init__(self, config, model_config, device_mesh, replica_rank=-1, **rest):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self.sleep_level = 2

    async def resume(self, tags):
        return None

    async def release(self):
        return None

    async def update_weights(self, weights, wire_format="named_tensors", global_steps=None, **rest):
        state = {}
        async for name, tensor in ensure_async_iterator(weights):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            state[name] = whole.detach().to("cpu", torch.float32)
        # Only rank 0 owns an engine; the other trainer ranks take part in gathering the tensors.
        try:
            engine = ray.get_actor(engine_name(self.replica_rank))
        except ValueError:
            return
        await engine.load.remote(state, global_steps)
        if global_steps is not None:
            await engine.set_global_steps.remote(global_steps)
