#!/usr/bin/env bash
# Job "two-hosts": the section "Two hosts" of docs/deploy.md, from the page's own text, in two network
# namespaces of this machine, with two engines on the CPU; then kills and stops of either host under load. Needs root.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m ci.make_env
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo --preserve-env=PATH)
exec "${as_root[@]}" .venv/bin/python -m ci.two_hosts
