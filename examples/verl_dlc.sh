#!/usr/bin/env bash
# Trains with the DLC loss: two lines more than any verl job. Give your own job's settings as arguments.
set -euo pipefail
exec python3 -m verl.trainer.main_ppo \
  actor_rollout_ref.actor.policy_loss.loss_mode=dlc \
  actor_rollout_ref.model.external_lib=dlc_sentinel.integrations.verl_dlc \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  algorithm.adv_estimator=grpo \
  "$@"
