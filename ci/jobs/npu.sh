#!/usr/bin/env bash
# Job "npu": the first hour on a machine with an Ascend 910B, in stages; no network is needed.
#
#   npu.sh [--rehearse] [--take FOLDER] [--call-s N] [--total-min N] [--stage NAME]...
#
# PYTHON names the interpreter; a rehearsal makes an environment where it is not set. Not run on
# hardware; docs/devices.md says what was rehearsed.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ " $* " == *" --rehearse "* ]]; then
    export ASCEND_SIM_DEVICES=${ASCEND_SIM_DEVICES:-2} ASCEND_SIM_MEM_MB=${ASCEND_SIM_MEM_MB:-8192}
    if [ -z "${PYTHON:-}" ]; then
        python3 -m ci.make_env --platform npu-sim
        PYTHON=.venv-npu-sim/bin/python
    fi
fi
exec "${PYTHON:-python3}" -m ci.first_hour npu "$@"
