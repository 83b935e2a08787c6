"""verl with the DLC loss: `loss_mode=dlc`, and this module as the model's external_lib.

    python -m verl.trainer.main_ppo ... \\
        actor_rollout_ref.actor.policy_loss.loss_mode=dlc \\
        actor_rollout_ref.model.external_lib=dlc_sentinel.integrations.verl_dlc

With DLC_SENTINEL set the plug-in imports it, and the first line is enough. Nothing is changed for another loss_mode.

verl_dlc_topk carries the engine's most probable tokens from the rollout server to the actor, as columns of the batch;
verl_dlc_loss centres the score at them, where the actor's logits are. The lag is measured from the trainer's
log-probabilities at the generator's weights: verl's old_log_probs pass gives them, for the listed tokens too, in verl's
decoupled mode and for rows of the version that was last delivered. Other rows (bypass mode, stale rows) are weighted
by the total ratio, engine included: `dlc/lag_exact_share` says how many tokens are not. `dlc/centring` is 1 (centred)
or 0 (no top-k came: the V0 trainers, a server other than vLLM).
"""

from __future__ import annotations

from dlc_sentinel.integrations import verl_dlc_loss, verl_dlc_topk
from dlc_sentinel.integrations.verl_wraps import Wraps

__all__ = ["install", "wraps"]

wraps = Wraps()
"""The wraps of this process."""
_installed: list[str] = []


def install() -> None:
    """Registers the loss and wraps what it needs, now and as verl's modules load; a second call does nothing."""
    if _installed:
        return
    _installed.append("")
    verl_dlc_topk.install(wraps)
    verl_dlc_loss.install(wraps)


install()
