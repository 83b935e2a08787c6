"""verl's platform interface on a CPU: every device call does nothing, Ray's "GPU" is a number we declare."""

import contextlib
import os
import types

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_NOTHING = ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats")
_ZERO = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


def _device_module():
    calls = {name: lambda *a: None for name in _NOTHING} | {name: lambda *a: 0 for name in _ZERO}
    return types.SimpleNamespace(
        **calls,
        is_available=lambda: False,
        current_device=lambda: "cpu",
        device_count=lambda: 1,
        mem_get_info=lambda *a: (1, 1),
        get_rng_state=lambda *a: torch.get_rng_state(),
        set_rng_state=lambda state, *a: torch.set_rng_state(state),
        get_device_name=lambda *a: "CPU",
    )


class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return os.environ.get("VERL_PLATFORM") == "cpu"

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, index):
        return None

    def synchronize(self, index=None):
        return None

    def manual_seed(self, seed):
        return None

    def manual_seed_all(self, seed):
        return None

    def set_allocator_settings(self, settings):
        return None

    def empty_cache(self):
        return None

    def get_device_capability(self, index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, message):
        yield

    def profiler_start(self):
        return None

    def profiler_stop(self):
        return None

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def ray_resource_options(self, num_gpus):
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


def register():
    PlatformRegistry.register(platform="cpu")(PlatformCPU)
