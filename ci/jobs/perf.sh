#!/usr/bin/env bash
# Job "perf": a topology under an open load beside replicas of plain vLLM, stock and tuned, and its
# ratios against the recorded ones; a quarter of an hour. Of any use only where nothing else runs.
# What is given besides goes to epd-bench load.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m ci.make_env --platform cpu
exec .venv/bin/epd-bench load \
    --side ours=configs/1e1pd.yaml --side replicas:2 --side replicas:2,tuned --model shape \
    --text 100 --output 60 --share 0.1 --rate 6 --point rate=2,share=0.3,pictures=4 \
    --seconds 20 --rounds 3 --guard docs/measurements/2026-11-load/load.json --worse 2 "$@"
