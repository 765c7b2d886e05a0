#!/usr/bin/env bash
# Job "ray": the commands of docs/ray.md on a Ray of three nodes on this machine, in an environment of
# its own: nothing else needs Ray. Options are pytest's: ci/jobs/ray.sh -k serve
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m ci.make_env --ray
exec .venv-ray/bin/python -m pytest --full -v tests/e2e/test_ray.py "$@"
