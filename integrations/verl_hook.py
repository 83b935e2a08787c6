"""verl: `pip install dlc-sentinel`, `export DLC_SENTINEL=...`, start the job as ever. No line of config changes.

    dlc-sentinel serve &
    export DLC_SENTINEL=1                      # or tcp://host:5757; also needed on the Ray workers of a cluster
    python -m verl.trainer.main_ppo ...

verl 0.9+ imports this module in each of its processes (entry point group `verl.plugins`); older ones do with
VERL_USE_EXTERNAL_MODULES=dlc_sentinel.integrations.verl_hook. Unset, DLC_SENTINEL means: nothing is wrapped.

With `actor_rollout_ref.actor.policy_loss.loss_mode=dlc` the job trains with the DLC loss, watched or not: see verl_dlc.

verl_actor reads the streams in the actor ranks, verl_rollout notes weight versions where rows are generated,
verl_driver reports steps and carries out commands. `dlc-sentinel attach` puts the first two into a job that runs.
"""

from __future__ import annotations

import os

from dlc_sentinel.integrations import verl_actor, verl_driver, verl_rollout
from dlc_sentinel.integrations.verl_wraps import Wraps, quietly

__all__ = ["install", "wraps"]

wraps = Wraps()
"""The wraps of this process."""


@quietly
def install() -> None:
    """Wraps verl in this process, now and as its modules load. Does nothing where DLC_SENTINEL is unset or 0."""
    if os.environ.get("DLC_SENTINEL", "").strip() in ("", "0"):
        return
    for part in (verl_actor, verl_rollout, verl_driver):
        part.install(wraps)
    from dlc_sentinel.integrations import verl_dlc  # noqa: F401  # the loss of loss_mode=dlc, by its import


install()
