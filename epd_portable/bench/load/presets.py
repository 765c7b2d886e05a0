"""Named sets of the options of ``epd-bench load``: benchmarks that others describe, to repeat.

An option on the command line takes the place of the preset's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # 100 to 1,000 prompts of VisionArena-Chat at once, an encoder and a language model of 3 billion
    # parameters on one device, beside one vLLM there.
    "vision-arena": {
        "side_texts": ["ours=configs/1e1pd-one-device.yaml", "vllm=replicas:1"],
        "point_texts": ["file=vision-arena.jsonl,prompts=100/200/500/1000,output=128"],
    },
    # Pictures of 640 pixels before short and long texts, one encoder and three others beside four
    # replicas, which data parallelism of four is.
    "random-mm": {
        "side_texts": ["ours=configs/1e3pd.yaml", "replicas:4"],
        "point_texts": [
            "rate=4/8/12/16/20/24,share=1,pictures=1,size=640,text=400,output=150",
            "pictures=4",
            "text=2000,pictures=1",
            "pictures=4",
        ],
        "ttft_ms": 20000.0,
        "tpot_ms": 100.0,
    },
    # Encode, prefill and decode apart beside prefill and decode, on as many devices: at most 1.2
    # times the latency, less memory on decode instances, more requests where all have pictures.
    "stages": {
        "side_texts": ["epd=configs/1e1p1d.yaml", "pd=configs/1p1d.yaml,instances.prefill.count=2"],
        "point_texts": ["rate=1/2/4,share=1,pictures=1,output=64", "pictures=4"],
    },
}
