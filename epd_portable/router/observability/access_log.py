"""One line of JSON for each request that ended: its instances, how long it took, how it ended.

Nothing of what a request or its answer says is in it, nor keys, addresses of media or names of
items. ``model`` is what the client asked for, cut.
"""

from __future__ import annotations

import logging
import os
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from typing import Any

import msgspec

from epd_portable.errors import ConfigError
from epd_portable.router.observability.record import ItemRecord, Leg, Listener, RequestRecord

STDERR = "stderr"
"""Setting by which lines go to standard error."""
_MAX_MODEL = 128


class AccessLog(Listener):
    """Writes the lines.

    Args:
        where: `STDERR`, or the path of a file, which is opened again when it has been moved.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, where: str) -> None:
        self._handler: logging.StreamHandler[Any] = (
            logging.StreamHandler() if where == STDERR else _file(where)
        )
        # Of its own: the levels and handlers of others are not for these lines.
        self._logger = logging.Logger("epd_portable.access")
        self._logger.addHandler(self._handler)

    def ended(self, record: RequestRecord) -> None:
        """Write a line."""
        self._logger.info(msgspec.json.encode(line_of(record)).decode())

    async def close(self) -> None:
        """Close the file."""
        self._handler.close()


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
        "time": datetime.fromtimestamp(record.began_s, timezone.utc).isoformat(),
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


def _file(path: str) -> WatchedFileHandler:
    try:
        # For the router's user alone.
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        return WatchedFileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"router.access_log {path} cannot be written: {error}; name a file in a folder that "
            f"exists, or {STDERR}"
        ) from error
