#!/usr/bin/env bash
# Job "clients": clients that people use, in versions and an environment of their own, ask a
# topology of real engines. Options are pytest's: ci/jobs/clients.sh -k litellm
set -euo pipefail
cd "$(dirname "$0")/../.."
make env PLATFORM=cpu
"${PYTHON:-python3}" -m ci.make_env --clients
exec .venv/bin/python -m tests.clients .venv-clients/bin/python "$@"
