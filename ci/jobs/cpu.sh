#!/usr/bin/env bash
# Job "cpu": everything that a machine without an accelerator can check, real vLLM included. The
# simulated NPU has a job of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
make check PLATFORM=cpu
ci/system_packages.sh
exec .venv/bin/python -m pytest
