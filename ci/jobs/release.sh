#!/usr/bin/env bash
# Wheel and sdist of this checkout in dist/, and the demo from the wheel in a folder and environment of its own.
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
# An index shows the README without the repository: its links become addresses of the tag.
sed -i -E "s#\]\(([^):]+\.svg)\)#](${url}/raw/${tag}/\1)#g; s|\]\(([^):#][^):]*)\)|](${url}/blob/${tag}/\1)|g" "$folder/source/README.md"
"$python" -m venv "$folder/build"
"$folder/build/bin/python" -m pip install --quiet build twine
rm -rf dist
"$folder/build/bin/python" -m build --outdir dist "$folder/source"
"$folder/build/bin/twine" check --strict dist/*
wheel=$(echo dist/*.whl)
[ "$(basename "$wheel" | cut -d- -f2)" = "${tag#v}" ] || { echo "release: tag $tag is not the version of $wheel" >&2; exit 1; }
unzip -p "$wheel" '*/METADATA' >"$folder/metadata"
if grep -oE '\]\([^)]*\)' "$folder/metadata" | grep -vE '^\]\(https?://'; then
    echo "release: the description of $wheel has links that lead nowhere without the repository" >&2
    exit 1
fi
"$python" -m ci.make_env --wheel "$PWD/$wheel"
bin=$PWD/.venv-wheel/bin
mkdir "$folder/away"
(
    cd "$folder/away" &&
        "$bin/epd-launch" --help &&
        "$bin/epd-launch" plan --platform cpu --config configs/1e1pd.yaml &&
        "$bin/epd-bench" --help &&
        "$bin/python" -m epd_portable.demo.run
) >"$folder/out" || { cat "$folder/out" >&2; exit 1; }
grep '^equal:' "$folder/out"
rm -r .venv-wheel
echo "release: $wheel works without the repository"
