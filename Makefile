# The commands that people and CI use. `make` lists them.

PLATFORM ?= cpu
PYTHON ?= python3
BIN := .venv/bin

# The demo on simulated devices: the platform npu in an environment of its own, without graphs and
# with little memory, which the simulation takes from the host.
ifeq ($(PLATFORM),npu-sim)
$(if $(filter check unit test,$(MAKECMDGOALS)),$(error PLATFORM=npu-sim is for env and demo; the tests on it are `make npu-sim`))
DEMO_RUN := ASCEND_SIM_MEM_MB=2048 .venv-npu-sim/bin/python -m epd_portable.demo.run --platform npu \
	--set engine_args.enforce_eager=true --set engine_args.gpu_memory_utilization=0.4 \
	--set transfer.pool_bytes=16MiB
DEMO_NOTE := real torch_npu and vllm-ascend over a simulated runtime: no Ascend hardware
else
DEMO_RUN := $(BIN)/python -m epd_portable.demo.run --platform $(PLATFORM)
endif

.DEFAULT_GOAL := help
.PHONY: help env check unit test full mutants npu-sim faults engines hooks perf demo clean

help:  ## List the commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z%-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PLATFORM=cpu|cuda|npu chooses what is installed (default: cpu);"
	@echo "  for env and demo also npu-sim: the real torch_npu over a simulated Ascend runtime."

env:  ## Make .venv with the package, its PLATFORM extra and the development tools
	@$(PYTHON) -m ci.make_env --platform $(PLATFORM)

check: env  ## Check format, lint, types, import layers and the documentation site
	@ci/check.sh

unit: env  ## Run the unit tests (half a minute, no engine)
	$(BIN)/python -m pytest -n 2 --dist=loadfile --no-loadscope-reorder tests/unit

test: env  ## Run the checks and what of the tests fits twelve minutes on two cores
	@ci/system_packages.sh
	@$(PYTHON) -m ci.suite

test-%: env  ## Run one piece of `make test`, such as test-faults; a wrong name lists all
	@ci/system_packages.sh
	@$(PYTHON) -m ci.suite $*

full:  ## Run all tests, what `make test` leaves out too, for hours; again to go on where it ended
	@ci/jobs/full.sh

mutants: env  ## Report the mutants of a package that its tests do not kill: PACKAGES="transfer wire"
	$(BIN)/python -m tests.mutants $(or $(PACKAGES),transfer wire)

npu-sim:  ## Test the NPU side: the real torch_npu over a simulated Ascend runtime, .venv-npu-sim
	PYTHON=$(PYTHON) ci/jobs/npu-sim.sh

faults: env  ## Run the whole fault suite: every fault at every point with every seed (hours)
	$(BIN)/python -m pytest tests/faults --full -v

engines:  ## Compare the split with one process on other versions of vLLM (minutes each)
	ci/jobs/engines.sh

hooks: env  ## Report the work for release VERSION=… of vLLM: hooks, smoke test, limits (minutes)
	@$(if $(VERSION),,$(error name a release: make hooks VERSION=0.34.0))$(BIN)/python -m ci.release $(VERSION)

perf:  ## Measure under load beside plain vLLM (idle machine)
	ci/jobs/perf.sh

demo: env  ## Ask a picture of an encode and a prefill+decode instance, and compare with one process
	$(if $(DEMO_NOTE),@echo "$(DEMO_NOTE)")
	$(DEMO_RUN)

clean:  ## Remove caches and build outputs (environments stay: rm -r .venv*)
	rm -rf .site .suite build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
