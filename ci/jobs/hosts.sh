#!/usr/bin/env bash
# Job "hosts": "Two hosts" of docs/remote-encoder.md and "Prefill on another host" of docs/hosts.md, from their own text, for two fronts
# and two shared engines in four network namespaces of this machine; then kills, stops and a cut network under load. Needs root,
# and 16 GB.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m ci.make_env
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo --preserve-env=PATH)
"${as_root[@]}" .venv/bin/python -m ci.hosts
exec "${as_root[@]}" .venv/bin/python -m ci.hosts prefill
