"""One line of JSON for each request that ended: its instances, how long it took, how it ended.

Nothing of what a request or its answer says is in it, nor keys, addresses of media or names of
items. ``model`` is what the client asked for, cut.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from epd_portable.log import access_log
from epd_portable.router.observability.record import ItemRecord, Leg, Listener, RequestRecord

_MAX_MODEL = 128


class AccessLog(Listener):
    """Writes the lines.

    Args:
        where: See `epd_portable.log.access_log`.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, where: str) -> None:
        self._logger = access_log(where)

    def ended(self, record: RequestRecord) -> None:
        """Write a line."""
        self._logger.info(msgspec.json.encode(line_of(record)).decode())

    async def close(self) -> None:
        """Close the file."""
        for handler in self._logger.handlers:
            handler.close()


def line_of(record: RequestRecord) -> dict[str, object]:
    """Return what is written of a request; what is empty, zero or false is left out.

    Times in milliseconds are since its headers had come.
    """

    def ms(at: float) -> float | None:
        return round((at - record.began_at) * 1000, 3) if at else None

    def times(leg: Leg) -> dict[str, float | None]:
        return {"began_ms": ms(leg.began_at), "ended_ms": ms(leg.ended_at)}

    def item(one: ItemRecord) -> dict[str, object]:
        return {
            "modality": one.modality,
            "pixels": one.pixels,
            "bytes": one.nbytes,
            "outcome": one.end or ("encoded" if one.brought else "open"),
            "jobs": [
                {"encoder": job.instance, **times(job), "end": job.end or "open"}
                for job in one.jobs
            ],
        }

    line: dict[str, object] = {
        "time": datetime.fromtimestamp(record.began_s, UTC).isoformat(),
        "request_id": record.id,
        "trace_id": record.traceparent[3:35],
        "client": record.client,
        "endpoint": record.endpoint,
        "model": record.model[:_MAX_MODEL],
        "stream": record.stream,
        "status": record.status,
        "gone": record.gone,
        "topology": record.topology if record.legs else "",
        "bytes_in": record.nbytes,
        "bytes_out": record.nbytes_out,
        "tokens": record.output_tokens,
        "events": record.events,
        "read_ms": ms(record.read_at),
        "admitted_ms": ms(record.admitted_at),
        "first_byte_ms": ms(record.first_at),
        "ended_ms": ms(record.ended_at),
        "instances": [
            {"stage": leg.stage, "name": leg.instance, **times(leg), "failed": leg.failed}
            for leg in record.legs
        ],
        "items": [*map(item, record.items)],
        "fallbacks": [
            {
                "at_ms": ms(step.at),
                "phase": step.phase,
                "failure": step.failure,
                "fallback": step.fallback,
            }
            for step in record.steps
        ],
    }
    return {name: value for name, value in line.items() if value}
