#!/usr/bin/env bash
# Job "perf": a topology under an open load beside tuned replicas of plain vLLM; its first table is to
# compare with that of benchmarks/results/load-tuned.json. A quarter of an hour, and of any use only
# where nothing else runs. What is given besides goes to epd-bench load.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m ci.make_env --platform cpu
# Sizes of a small Qwen2.5-VL, without weights: a load as of a real model, responses without meaning.
models=$(mktemp -d)
trap 'rm -r "$models"' EXIT
"${PYTHON:-python3}" -m ci.true_shapes "$models" cpu
.venv/bin/epd-bench load \
    --side ours=configs/1e1pd.yaml --side replicas:2,tuned \
    --model "$models/cpu" --set engine_args.load_format=dummy --set engine_args.kv_cache_memory_bytes=268435456 \
    --point rate=6,share=0.1,text=100,output=60 --point rate=2,share=0.3,images=4 \
    --seconds 20 "$@"
