#!/usr/bin/env bash
# Job "cuda": the first hour on a machine with an NVIDIA device, in stages; no network is needed.
#
#   cuda.sh [--rehearse] [--take FOLDER] [--call-s N] [--total-min N] [--stage NAME]...
#
# PYTHON names the interpreter; a rehearsal makes an environment where it is not set. Rehearsed with
# real engines on the CPU; docs/devices.md says which stages have run on hardware.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ " $* " == *" --rehearse "* && -z ${PYTHON:-} ]]; then
    python3 -m ci.make_env --platform cpu
    PYTHON=.venv/bin/python
fi
exec "${PYTHON:-python3}" -m ci.first_hour cuda "$@"
