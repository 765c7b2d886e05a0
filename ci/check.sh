#!/usr/bin/env bash
# Every static check, from the repository root: format, lint, types, import layers, documentation site.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin

"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/mypy"
"$bin/lint-imports"
NO_MKDOCS_2_WARNING=1 "$bin/mkdocs" build --quiet --strict
