"""Measures what watching costs an actor rank: on in even steps, off in odd ones, one JSON line per optimizer update.

Switched on by VERL_CPU_METER=FILE; steps up to VERL_CPU_METER_AFTER are all watched. wall_s and cpu_s (the process's,
all threads) are over the update; record_s is the training thread's part of it spent in our code; cpu_from_s and
sender_from_s are the CPU of process and sender thread since their start, when the update began.
"""

import json
import os
import threading
import time

from dlc_sentinel.integrations.verl_actor import ActorTap


def install(path, after):
    """From now on every tap of this process is measured."""
    tap_install, record = ActorTap.install, ActorTap._record
    spent = {"record_s": 0.0}

    def metered_record(self, *args, **kwargs):
        if self._step % 2 and self._step > after:
            return
        began = time.thread_time()
        record(self, *args, **kwargs)
        spent["record_s"] += time.thread_time() - began

    def metered_install(self):
        tap_install(self)
        engine = self._worker.actor.engine
        inner = engine.train_batch

        def train_batch(*args, **kwargs):
            spent["record_s"] = 0.0
            wall, cpu, sender = time.perf_counter(), time.process_time(), sender_time()
            result = inner(*args, **kwargs)
            line = {
                "step": self._step,
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - cpu,
                "record_s": spent["record_s"],
                "cpu_from_s": cpu,
                "sender_from_s": sender,
            }
            with open(path, "a") as out:
                out.write(json.dumps(line) + "\n")
            return result

        engine.train_batch = train_batch

    ActorTap.install, ActorTap._record = metered_install, metered_record


def sender_time():
    """CPU seconds of the sender thread so far."""
    senders = [thread for thread in threading.enumerate() if thread.name == "dlc-sentinel-sender"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in senders)


if os.environ.get("VERL_CPU_METER") and os.environ.get("DLC_SENTINEL"):
    install(os.environ["VERL_CPU_METER"], int(os.environ.get("VERL_CPU_METER_AFTER", "0")))
