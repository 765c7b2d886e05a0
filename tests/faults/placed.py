"""Number of items that the workers of a run have placed, by the trace."""

from __future__ import annotations

from pathlib import Path


def count_placed(trace_dir: Path) -> int:
    """Return how many were placed up to now; ``trace_dir`` is the run's."""
    return sum(
        path.read_bytes().count(b'"event": "item.placed"')
        for path in trace_dir.glob("prefill_decode-*.jsonl")
    )
