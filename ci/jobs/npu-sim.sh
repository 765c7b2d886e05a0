#!/usr/bin/env bash
# Job "npu-sim": the real torch_npu and vllm-ascend over a simulated Ascend runtime, never hardware.
#
#   npu-sim.sh [--or-skip] [--short] [simulator|devices|contract|transfer|faults|engines]...
#
# With --or-skip a machine that cannot have the environment (no gcc, no such wheels) skips it loudly;
# every other failure fails. --short leaves out what shows by another path what the rest shows.
# Without a part all of them run, one after the other; calls with a part each may run side by side
# when the environment is there.
set -euo pipefail
cd "$(dirname "$0")/../.."
unavailable=3 # EXIT_UNAVAILABLE of ci/make_env.py

tests_of() { # What pytest is told for a part.
    case $1 in
    simulator) echo -p tests.conftest ci/ascend_sim/tests ;;
    devices)
        echo tests/npu_sim/platform tests/npu_sim/launch tests/npu_sim/bench tests/devices \
            tests/npu_sim/transfer/test_ordering.py tests/npu_sim/transfer/test_queued.py tests/npu_sim/transfer/test_computed.py
        ;;
    contract) echo tests/contract -m needs_npu ;;
    transfer) echo tests/integration/transfer -m needs_npu ;;
    faults) echo tests/npu_sim/transfer/test_faults.py ;;
    engines) echo tests/npu_sim/e2e ;;
    *) return 1 ;;
    esac
}

or_skip=
parts=()
options=(--require-device=npu --full)
for option in "$@"; do
    case $option in
    --or-skip) or_skip=yes ;;
    --short) options=(--require-device=npu) ;;
    *)
        if ! tests_of "$option" >/dev/null; then
            echo "npu-sim.sh: unknown option $option;" \
                "usage: npu-sim.sh [--or-skip] [--short] [simulator|devices|contract|transfer|faults|engines]..." >&2
            exit 2
        fi
        parts+=("$option")
        ;;
    esac
done
[ "${#parts[@]}" -gt 0 ] || parts=(simulator devices contract transfer faults engines)

exec 3>&1
status=0
problem=$("${PYTHON:-python3}" -m ci.make_env --platform npu-sim 2>&1 >&3) || status=$?
[ -z "$problem" ] || echo "$problem" >&2
if [ "$status" -eq "$unavailable" ] && [ -n "$or_skip" ]; then
    line=$(printf '%.0s#' {1..100})
    printf '%s\n# SKIPPED: the tests of the NPU side, over a simulated Ascend runtime, did NOT run.\n# %s\n%s\n' \
        "$line" "$problem" "$line" >&2
    exit 0
fi
[ "$status" -eq 0 ] || exit "$status"

# A process for each part: what a lost peer leaves on a device's streams stays with its process, and
# all but the first part lose some. The cheapest first; all of them, so that one run tells
# everything, and what failed once more at the end. What needs no NPU is run by job "cpu".
export COLUMNS=240
# What vLLM keeps of its models' classes is named alike in all its versions.
export VLLM_CACHE_ROOT=$PWD/.venv-npu-sim/vllm-cache
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
failed=()
for part in "${parts[@]}"; do
    read -r -a tests <<<"$(tests_of "$part")"
    .venv-npu-sim/bin/python -m pytest "${options[@]}" "${tests[@]}" </dev/null |
        tee -i "$folder/$part.log" || failed+=("$part")
done
[ "${#failed[@]}" -eq 0 ] && exit
echo "${#failed[@]} of ${#parts[@]} parts failed: ${failed[*]}"
for part in "${failed[@]}"; do
    log=$folder/$part.log
    grep -E '^(FAILED|ERROR) ' "$log" | cut -c1-300 || tail -n 5 "$log"
done
exit 1
