#!/usr/bin/env bash
# Job "envoy": the router as an endpoint picker, with a real Envoy and stand-ins for instances, in an
# environment of its own. Needs no engine.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m ci.make_env --envoy
exec .venv-envoy/bin/python -m pytest -p no:cacheprovider tests/integration/envoy "$@"
