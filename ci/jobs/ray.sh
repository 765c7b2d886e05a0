#!/usr/bin/env bash
# Job "ray": the application of Ray Serve on a Ray of three nodes on this machine, in an environment of
# its own: no other job needs Ray. Options are pytest's.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m ci.make_env --ray
exec .venv-ray/bin/python -m pytest --full -v tests/e2e/test_ray.py "$@"
