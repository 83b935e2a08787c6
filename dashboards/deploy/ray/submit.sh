#!/usr/bin/env bash
# ./submit.sh: a Ray job whose workers all find the sentinel on the head node. Run it there.
# Keys once, where every node can read them: dlc-sentinel keys new /shared/dlc-keys
set -euo pipefail

keys=${DLC_SENTINEL_KEYS:-/shared/dlc-keys}
run=${DLC_SENTINEL_RUN:-ray-$(date +%Y%m%d-%H%M%S)}
head_ip=$(hostname -I | awk '{print $1}')

DLC_SENTINEL_CFG_SERVE_ADDRESS="tcp://0.0.0.0:5757" DLC_SENTINEL_CFG_SERVE_METRICS_HOST=0.0.0.0 \
  dlc-sentinel serve --keys "$keys" --tape "tapes/$run" &
sentinel=$!
trap 'kill -TERM "$sentinel" 2>/dev/null || true; wait "$sentinel" 2>/dev/null || true' EXIT

# verl and vLLM find the plug-in of the installed package by themselves; the variables are all that it needs.
ray job submit --runtime-env-json "{\"env_vars\": {
    \"DLC_SENTINEL\": \"tcp://${head_ip}:5757\",
    \"DLC_SENTINEL_KEYS\": \"${keys}\",
    \"DLC_SENTINEL_RUN\": \"${run}\"
  }}" -- python train.py
