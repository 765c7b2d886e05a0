#!/usr/bin/env bash
# Job "soak": an hour of mixed load on real engines on the CPU, of which one is killed every minute; fails where the memory, threads,
# sockets or files of a process grow. Seconds can be given: ci/jobs/soak.sh 600
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m ci.make_env --platform cpu
exec .venv/bin/python -m ci.soak "$@"
