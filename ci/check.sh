#!/usr/bin/env bash
# Every static check, from the repository root: format, lint, types, import layers.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin

"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/mypy"
"$bin/lint-imports"
