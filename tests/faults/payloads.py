"""Every payload carries its digest and is compared with it before it is used; the trace says so."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

WITH_DIGESTS = {"EPD_PAYLOAD_DIGEST": "1"}
"""What encode instances need, to send a digest with every item."""


class Payloads:
    """What the PD workers of a run have placed, and compared with its digest before.

    A worker that meets other bytes than were sent ends its engine, the request is sent once more
    and answered rightly: no answer tells.

    Args:
        trace_dir: Of the run.
    """

    def __init__(self, trace_dir: Path) -> None:
        self._trace_dir = trace_dir
        self._read_bytes: Counter[Path] = Counter()
        self._seen: dict[str, Counter[tuple[int, str]]] = {
            name: Counter() for name in ("item.placed", "item.checked", "item.corrupt")
        }

    def check(self) -> int:
        """Check everything up to now; returns how many items were placed.

        Raises:
            AssertionError: One was placed without being compared, or held other bytes.
        """
        for path in self._trace_dir.glob("prefill_decode-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read_bytes[path])
                lines = file.readlines()
                self._read_bytes[path] = file.tell()
            for event in map(json.loads, lines):
                if event["event"] in self._seen:
                    self._seen[event["event"]][event["pid"], event["mm_hash"]] += 1
        placed, checked, corrupt = self._seen.values()
        assert not corrupt, f"other bytes than were sent: {sorted(corrupt)}"
        assert placed <= checked, f"used without a digest: {sorted(placed - checked)}"
        return placed.total()
