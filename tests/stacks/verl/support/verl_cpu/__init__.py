"""Real verl without a GPU: a "cpu" platform, gloo process groups and a rollout backend named `cpuhf`.

Imported by verl itself through VERL_USE_EXTERNAL_MODULES=verl_cpu in every process of a job. Settings come from the
environment, because verl carries it to all its processes; see `job.py`.
"""

import functools
import os

import torch.distributed
from dlc_sentinel.integrations.verl_wraps import Wraps
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_cpu import meter, platform  # noqa: F401  # meter: by its import, where asked for


def _replica():
    from verl_cpu.replica import CpuReplica

    return CpuReplica


def _keep_snapshots(fsdp_utils):
    """On a CPU `.cpu()` is no copy: without this a model saved by verl would move on with the training."""
    save = fsdp_utils.fsdp2_sharded_save_to_cpu

    def save_copy(model):
        state, spec = save(model)
        return {name: (tensor.clone(), own) for name, (tensor, own) in state.items()}, spec

    fsdp_utils.fsdp2_sharded_save_to_cpu = save_copy


def _poll_often(replay_buffer):
    """verl's trainer looks for finished rows every two seconds, longer than a whole step takes here."""
    init = replay_buffer.ReplayBuffer.__init__

    @functools.wraps(init)
    def poll_often(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.poll_interval = 0.1

    replay_buffer.ReplayBuffer.__init__ = poll_often


def _gloo(init_process_group):
    def init(*args, **kwargs):
        if "cpu:gloo,cpu" in (kwargs.get("backend") or ""):
            kwargs["backend"] = "gloo"
        return init_process_group(*args, **kwargs)

    return init


platform.register()
os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the FSDP engines are registered for it
torch.distributed.init_process_group = _gloo(torch.distributed.init_process_group)
rollout_base._ROLLOUT_REGISTRY["cpuhf", "async"] = "verl_cpu.replica.ServerAdapter"
RolloutReplicaRegistry.register("cpuhf", _replica)
Wraps().when_loaded("verl.utils.fsdp_utils", _keep_snapshots)
Wraps().when_loaded("verl.trainer.ppo.v1.replay_buffer", _poll_often)
