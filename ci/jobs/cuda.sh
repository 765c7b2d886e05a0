#!/usr/bin/env bash
# Job "cuda": the first hour on a machine with an NVIDIA device, in stages; no network is needed.
#
#   cuda.sh [--wheels FOLDER] [--out FOLDER] [--minutes N] [--stage NAME]...
#
# Every figure goes into figures.json of the folder of results; called again it goes on where it
# ended. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m ci.first_hour "$@"
