"""Forks the processes of test jobs from one that has imported the large libraries already; verl and Ray it has not.

`python warm.py SOCKET`. A job is about ten processes, and each would spend its first 7 s of CPU on the same imports.
What is under test (verl, its plug-ins, Ray) is imported by each process itself, with its own environment.
"""

import atexit
import contextlib
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading

LARGE = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel",
    "torch.distributed.device_mesh", "torch.export", "tensordict", "transformers.modeling_utils",
    "transformers.generation", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.tokenization_auto", "datasets", "pandas", "pyarrow.parquet", "fastapi", "uvicorn",
    "hydra", "accelerate", "peft", "numpy", "zmq", "msgspec", "aiohttp", "torchdata.stateful_dataloader",
    "codetiming", "cachetools", "httpx", "jinja2", "PIL.Image", "tensorboard", "opentelemetry", "rich", "orjson",
)  # fmt: skip


class Warm:
    """One thread, so that a fork finds no lock held by another."""

    def __init__(self, path):
        self._ready = selectors.DefaultSelector()
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(path)
        self._door.listen(64)
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        self._waker = waker
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._ready.register(self._door, selectors.EVENT_READ, self._start)
        self._ready.register(woken, selectors.EVENT_READ, self._collect)
        self._children = {}

    def serve(self):
        print("ready", flush=True)
        while True:
            for key, _ in self._ready.select():
                key.data(key.fileobj)

    def _start(self, door):
        wire, _ = door.accept()
        order, streams = read_order(wire)
        child = os.fork()
        if child == 0:
            for key in list(self._ready.get_map().values()):
                key.fileobj.close()
            wire.close()
            become(order, streams)
        for stream in streams:
            os.close(stream)
        self._children[child] = wire
        self._ready.register(wire, selectors.EVENT_READ, lambda wire: self._pass_on(wire, child))

    def _pass_on(self, wire, child):
        """Signals from the stand-in to the child; a stand-in that is gone ends it."""
        number = wire.recv(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number[0] if number else signal.SIGKILL)
        if not number:
            self._ready.unregister(wire)

    def _collect(self, woken):
        woken.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._tell_end(*ended)

    def _tell_end(self, child, status):
        wire = self._children.pop(child)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            wire.sendall(bytes([code if code >= 0 else 128 - code]))
        with contextlib.suppress(KeyError):
            self._ready.unregister(wire)
        wire.close()


def read_order(wire):
    """(order, three open files) of one process."""
    size, streams, _, _ = socket.recv_fds(wire, 4, 3)
    left, parts = int.from_bytes(size, "little"), []
    while left:
        parts.append(wire.recv(left))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), streams


def become(order, streams):
    """Turns this fork into the process that was asked for; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for place, stream in enumerate(streams):
            os.dup2(stream, place)
            os.close(stream)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        random.seed()
        code = run_python(order["argv"])
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_python(argv):
    """Exit code of what `python ARGV...` would run: options, then `-m MODULE` or FILE, then arguments."""
    while argv[0].startswith("-") and argv[0] != "-m":
        argv = argv[1:]
    try:
        if argv[0] == "-m":
            sys.argv, sys.path[0] = argv[1:], os.getcwd()
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = argv, os.path.dirname(argv[0])
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
    return 0


if __name__ == "__main__":
    for name in LARGE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    Warm(sys.argv[1]).serve()
