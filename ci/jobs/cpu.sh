#!/usr/bin/env bash
# Job "cpu": everything that a machine without an accelerator can check, real vLLM included.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec make test PLATFORM=cpu
