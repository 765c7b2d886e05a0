#!/usr/bin/env bash
# Job "npu-sim": the real torch_npu and vllm-ascend over a simulated Ascend runtime, never hardware.
#
#   npu-sim.sh [--or-skip] [--short]
#
# With --or-skip a machine that cannot have the environment (no gcc, no such wheels) skips it loudly;
# every other failure fails. --short leaves out what shows by another path what the rest shows.
set -euo pipefail
cd "$(dirname "$0")/../.."
unavailable=3 # EXIT_UNAVAILABLE of ci/make_env.py

or_skip=
options=(--require-device=npu --full)
for option in "$@"; do
    case $option in
    --or-skip) or_skip=yes ;;
    --short) options=(--require-device=npu) ;;
    *)
        echo "npu-sim.sh: unknown option $option; usage: npu-sim.sh [--or-skip] [--short]" >&2
        exit 2
        ;;
    esac
done

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

# A process for each part: what a lost peer leaves on a device's streams stays with its process. The
# cheapest first; all of them, so that one run tells everything, and what failed once more at the end.
# What needs no NPU is run by job "cpu".
export COLUMNS=240
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
part=0
failed=()
while read -r -a tests; do
    part=$((part + 1))
    .venv-npu-sim/bin/python -m pytest "${options[@]}" "${tests[@]}" </dev/null |
        tee "$folder/$part.log" || failed+=("$folder/$part.log")
done <<END
tests/npu_sim/runtime tests/npu_sim/operators
tests/npu_sim/platform tests/npu_sim/hooks tests/npu_sim/launch tests/npu_sim/bench
tests/contract -m needs_npu
tests/integration/transfer -m needs_npu
tests/npu_sim/transfer/test_ordering.py
tests/npu_sim/transfer/test_faults.py
tests/npu_sim/e2e
END
[ "${#failed[@]}" -eq 0 ] && exit
echo "${#failed[@]} of $part parts failed:"
for log in "${failed[@]}"; do
    grep -E '^(FAILED|ERROR) ' "$log" | cut -c1-300 || tail -n 5 "$log"
done
exit 1
