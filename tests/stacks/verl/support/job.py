"""Starts a small real verl job in processes of its own, and reads what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[4]
SUPPORT = Path(__file__).parent
QUICK_START = SUPPORT / "quick_start"
PYTHON = REPO / ".venv-verl" / "bin" / "python"
MARK = "DLC_TEST_JOB"
"""Environment variable by which all processes of a job are known."""

COMMON = [
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.total_epochs=1000",
    'trainer.logger=["console","file"]',
    "trainer.val_before_train=False",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.project_name=t",
    "trainer.experiment_name=t",
    "data.max_prompt_length=64",
    "data.dataloader_num_workers=0",
    "data.filter_overlong_prompts=False",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.rollout.name=cpuhf",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "reward.custom_reward_function.name=compute_score",
    "+ray_kwargs.ray_init.num_cpus=32",
    "+ray_kwargs.ray_init.num_gpus=4",
    "+ray_kwargs.ray_init.include_dashboard=False",
]
BY_MODULE = {
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu,dlc_sentinel.integrations.verl_hook",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
}
"""How the plug-in gets into a verl that knows no plug-ins."""
FLOAT32 = [
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32",
    "actor_rollout_ref.rollout.dtype=float32",
]
SEPARATE = [
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=shmfile",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_cpu.weights",
]


@dataclass(frozen=True)
class Size:
    """How much a job does per step."""

    steps: int = 3
    prompts: int = 4
    samples: int = 2
    mini_batch: int = 2
    response: int = 16
    lr: float = 1e-3

    def overrides(self) -> list[str]:
        return [
            f"trainer.total_training_steps={self.steps}",
            f"data.train_batch_size={self.prompts}",
            f"data.max_response_length={self.response}",
            f"actor_rollout_ref.rollout.n={self.samples}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={self.mini_batch * self.samples}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.mini_batch}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={self.mini_batch * self.samples}",
            f"actor_rollout_ref.actor.optim.lr={self.lr}",
        ]


TWICE = "actor_rollout_ref.actor.ppo_epochs=2"
SYNC = Size(steps=40, prompts=8, samples=4, mini_batch=8, response=32, lr=5e-4)
SYNC_MODE = (*FLOAT32, TWICE)
SYNC_ENV = {"VERL_CPU_ROUND_WEIGHTS": "1"}
"""The job that the tests of verl's default trainer share, or start anew where it must be another.

Its one mini-batch holds all rows of a step, and its engine computes in float32 with weights rounded to 8 bits: so two
jobs of one seed agree to 1e-5 whatever the order in which rows arrive, though engine and trainer differ.
"""
DELIVERED = 3
"""Version of the newest weights that reach the engine in the shared job."""
UNDELIVERED = {"VERL_CPU_STALE_AFTER": str(DELIVERED)}
JOB_S = 1200
"""Longest life of a job, seconds; a quiet machine needs a tenth of it."""


@dataclass
class Job:
    """A running or finished job."""

    folder: Path
    process: subprocess.Popen[bytes]
    name: str
    temp: Path
    ended_s: float = float("nan")
    """When `wait` saw it end, by the monotonic clock."""

    @property
    def log(self) -> str:
        return (self.folder / "job.log").read_text(errors="replace")

    def metrics(self) -> dict[int, dict[str, float]]:
        """step -> verl's own metrics, as its file logger wrote them."""
        path = self.folder / "metrics.jsonl"
        steps: dict[int, dict[str, float]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            steps.setdefault(int(entry["step"]), {}).update(entry["data"])
        return steps

    def wait(self, timeout_s: float) -> int:
        """The exit code. Raises: AssertionError with the end of the log when it takes longer."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"job still runs after {timeout_s:.0f} s; its log ends:\n{self.log[-3000:]}") from None
        self.ended_s = time.monotonic()
        return code

    def ended_well(self, timeout_s: float) -> Job:
        code = self.wait(timeout_s)
        assert code == 0, f"job ended with {code}; its log ends:\n{self.log[-4000:]}"
        return self

    def stop(self) -> None:
        """Ends every process of this job and removes Ray's temporary folder."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for pid in self._leftovers():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(self.temp, ignore_errors=True)

    def _leftovers(self) -> list[int]:
        mark = f"{MARK}={self.name}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


def start(
    folder: Path,
    model: Path,
    size: Size,
    *overrides: str,
    env: Mapping[str, str] | None = None,
    main: str = "verl.trainer.main_ppo",
    resume: str = "disable",
    warm: str = "",
) -> Job:
    """A job in `folder` with the model of `make_model`; `env` is added to a clean environment.

    `warm`: the socket of a `warm_up`, where its processes are to be forked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix="dlcv", dir="/tmp"))
    paths: Sequence[str] = (
        f"actor_rollout_ref.model.path={model / 'model'}",
        f"data.train_files={model / 'train.parquet'}",
        f"data.val_files={model / 'val.parquet'}",
        f"reward.custom_reward_function.path={model / 'reward.py'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"trainer.resume_mode={resume}",
    )
    is_main = main == "verl.trainer.main_ppo"
    queue = ["transfer_queue.backend.SimpleStorage.num_data_storage_units=1"] if is_main else []
    command = [str(PYTHON), "-m", main, *COMMON, *queue, *paths, *size.overrides(), *overrides]
    name = temp.name
    whole = environment(folder, temp, name) | ({"VERL_CPU_WARM": warm} if warm else {}) | dict(env or {})
    with open(folder / "job.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=whole, stdout=log, stderr=log, start_new_session=True)
    return Job(folder, process, name, temp)


@contextmanager
def warm_up() -> Iterator[str]:
    """The socket of a process that has imported the large libraries, and forks the processes of jobs."""
    folder = Path(tempfile.mkdtemp(prefix="dlcw", dir="/tmp"))
    path = str(folder / "warm")
    command = [str(PYTHON), str(QUICK_START / "warm.py"), path]
    with subprocess.Popen(command, env=environment(folder, folder, "warm"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the process that forks the jobs did not start"
        yield path
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def environment(folder: Path, temp: Path, name: str) -> dict[str, str]:
    """A clean environment for a process of job `name`."""
    kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    return kept | {
        MARK: name,
        "HOME": str(temp),
        "PYTHONPATH": os.pathsep.join((str(SUPPORT), str(QUICK_START))),
        "OMP_NUM_THREADS": "1",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "VERL_CPU_WEIGHTS_DIR": str(temp),
        "RAY_TMPDIR": str(temp),
        "RAY_DEDUP_LOGS": "0",
        "RAY_memory_usage_threshold": "0.99",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
