#!/usr/bin/env bash
# Job "npu": the first hour on a machine with an Ascend 910B, in stages; no network is needed.
#
#   npu.sh [--rehearse] [--take FOLDER] [--call-s N] [--total-min N] [--stage NAME]...
#
# PYTHON names the interpreter. Rehearsed over the simulated Ascend runtime; not run on hardware.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m ci.first_hour npu "$@"
