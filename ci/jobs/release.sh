#!/usr/bin/env bash
# Wheel and sdist of this checkout in dist/, and a try of the wheel in a folder and environment of its own.
# Usage: release.sh TAG URL. TAG is v and the version. URL, the address of the repository, goes into the metadata.
set -euo pipefail
cd "$(dirname "$0")/../.."
tag=$1 url=$2
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git checkout-index --all --prefix="$folder/source/"
printf '\n[project.urls]\nSource = "%s"\nDocumentation = "%s/tree/main/docs"\nChangelog = "%s/blob/main/CHANGELOG.md"\nIssues = "%s/issues"\n' \
    "$url" "$url" "$url" "$url" >>"$folder/source/pyproject.toml"
"$python" -m venv "$folder/build"
"$folder/build/bin/python" -m pip install --quiet build twine
rm -rf dist
"$folder/build/bin/python" -m build --outdir dist "$folder/source"
"$folder/build/bin/twine" check --strict dist/*
wheel=$(echo dist/*.whl)
[ "$(basename "$wheel" | cut -d- -f2)" = "${tag#v}" ] || { echo "release: tag $tag is not the version of $wheel" >&2; exit 1; }
"$python" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet "$wheel"
mkdir "$folder/away"
wheel_commands() {
    cd "$folder/away"
    "$folder/env/bin/epd-launch" --help
    "$folder/env/bin/epd-launch" plan --platform cpu --config configs/1e1pd.yaml
}
wheel_commands >"$folder/out" || { cat "$folder/out" >&2; exit 1; }
echo "release: $wheel works without the repository"
