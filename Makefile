# The commands that people and CI use. `make` lists them.

PLATFORM ?= cpu
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help env check unit test engines demo clean

help:  ## List the commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PLATFORM=cpu|cuda|npu chooses what is installed (default: cpu)."

env:  ## Make .venv with the package, its PLATFORM extra and the development tools
	@$(PYTHON) ci/make_env.py --platform $(PLATFORM)

check: env  ## Check format, lint, types and import layers
	@ci/check.sh

unit: env  ## Run the unit and contract tests (seconds, no engine)
	$(BIN)/python -m pytest tests/unit tests/contract

test: check  ## Run the checks, then every test that this machine can run
	$(BIN)/python -m pytest

engines:  ## Compare the split with one process on other versions of vLLM (minutes each)
	ci/jobs/engines.sh

demo: env  ## Ask a picture of an encode and a prefill+decode instance, and compare with one process
	$(BIN)/python -m epd_portable.demo.run --platform $(PLATFORM)

clean:  ## Remove caches and build outputs (the environment stays: rm -r .venv)
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
