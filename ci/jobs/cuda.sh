#!/usr/bin/env bash
# Job "cuda": the first hour on a machine with an NVIDIA device, in stages; no network is needed.
#
#   cuda.sh [--rehearse] [--take FOLDER] [--call-s N] [--total-min N] [--stage NAME]...
#
# PYTHON names the interpreter. Rehearsed with real engines on the CPU; docs/devices.md says which
# stages have run on hardware.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ " $* " == *" --rehearse "* ]]; then
    PYTHON=${PYTHON:-.venv/bin/python}
fi
exec "${PYTHON:-python3}" -m ci.first_hour cuda "$@"
