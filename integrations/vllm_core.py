"""One engine core of vLLM: the version of its weights, and what the sentinel is told when it changes."""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlc_sentinel.integrations.vllm_front import setting
from dlc_sentinel.integrations.vllm_weights import AUTO, Update, Versions, lora_version

from dlc_sentinel.records import UNKNOWN_VERSION
from dlc_sentinel.wire.pack import version_of

if TYPE_CHECKING:
    from dlc_sentinel.integrations.vllm_engine import Plugin

_log = logging.getLogger("dlc_sentinel.vllm")

CHECKSUM_S = 1.0
"""A checksum of the weights that takes longer is not repeated, unless DLC_SENTINEL_CHECKSUM=1."""


class Core:
    """One engine core: the version of its weights, and what the sentinel is told when it changes."""

    def __init__(self, plugin: Plugin, engine_core: Any) -> None:
        self.setting = False
        """True while the label being set is ours."""
        self._plugin = plugin
        self._core = weakref.ref(engine_core)
        self._adapters: dict[str, tuple[Any, Any]] = {}
        self._checksum = setting("CHECKSUM")
        self.versions = Versions(plugin.counting, self._set_label, self._tell)

    def changed(self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """An update of the weights went through."""
        if not self._plugin.counting.enabled:
            return
        core = self._core()
        running = 0 if core is None or core.is_scheduler_paused() else core.scheduler.get_num_unfinished_requests()
        in_flight = len(getattr(core, "batch_queue", None) or ())
        self.versions.changed(method, tuple(args or ()), kwargs or {}, running=running, in_flight=in_flight)

    def lora_loaded(self, lora: Any) -> None:
        """An adapter was loaded. Loaded again under its old name it is an update; a new name is told, no more."""
        name, what = str(lora.lora_name), (lora.lora_int_id, getattr(lora, "lora_path", ""))
        known = self._adapters.get(name)
        self._adapters[name] = what
        if known is not None and (known != what or getattr(lora, "load_inplace", False)):
            self.changed("load_lora", (), {})
        elif known is None:
            self._synced(lora_version(name), f"lora {name}", "")

    def _set_label(self, label: str) -> None:
        core = self._core()
        setter = getattr(core, "set_weight_version", None)
        if setter is None:
            return
        self.setting = True
        try:
            setter(label)
        finally:
            self.setting = False

    def _tell(self, update: Update) -> None:
        label = update.label
        if update.running:
            label += f" (by {update.why}, not paused: {update.running} requests running)"
            _log.warning("dlc-sentinel: weights changed by %s while %d requests ran", update.why, update.running)
        elif label.startswith(AUTO):
            label += f" (by {update.why})"
        # A late label for counted weights repeats their checksum; that would look like weights never delivered.
        self._synced(version_of(update.label), label, "" if update.names_old else self._weights_checksum())

    def _synced(self, version: int, label: str, checksum: str) -> None:
        core = self._core()
        hook = self._plugin.hook(getattr(core, "vllm_config", None))
        hook.synced(version, UNKNOWN_VERSION, label=label, checksum=checksum or None)

    def _weights_checksum(self) -> str:
        """Blake2b-128 over vLLM's own checksums of all parameters of all ranks; "" where it offers none or is slow."""
        compute = getattr(self._core(), "compute_weight_checksums", None)
        if compute is None or self._checksum == "0":
            return ""
        start_s = time.monotonic()
        parts = sorted(f"{name}={digest}" for rank in compute() for name, digest in rank.items())
        took_s = time.monotonic() - start_s
        if took_s > CHECKSUM_S and self._checksum != "1":
            self._checksum = "0"
            text = "a checksum of the weights took %.1f s and is not repeated; DLC_SENTINEL_CHECKSUM=1 keeps it"
            _log.warning("dlc-sentinel: " + text, took_s)
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
