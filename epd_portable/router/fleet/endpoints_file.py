"""The instances as a file, for the endpoint picker of llm-d that chooses in front of the router."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from epd_portable.errors import ConfigError
from epd_portable.placement.instances import EndpointPool, Instance

logger = logging.getLogger(__name__)


class EndpointsFile:
    """Keeps a file with the instances that are up, in the format of llm-d's ``file-discovery``.

    Args:
        path: The file; it is replaced as a whole.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(self, path: str, instances: EndpointPool) -> None:
        self._path = Path(path)
        self._instances = instances
        self._listed: list[Instance] | None = None
        self._left_out: set[str] = set()
        try:
            self._write()
        except OSError as error:
            raise ConfigError(
                f"router.endpoints_file {path} cannot be written: {error}; name a file in a folder "
                "that is there and that the router may write to"
            ) from error
        instances.watch(self._changed)

    def _changed(self, _: Instance) -> None:
        try:
            self._write()
        except OSError as error:
            logger.error("router.endpoints_file %s has not been written: %s", self._path, error)

    def _write(self) -> None:
        listed = [each for each in self._instances.all if each.state == "up" and self._fits(each)]
        if listed == self._listed:
            return
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(yaml.safe_dump({"endpoints": list(map(_entry, listed))}, sort_keys=False))
        new.replace(self._path)
        self._listed = listed

    def _fits(self, instance: Instance) -> bool:
        """Return whether the format can name an instance; the log says so once if it cannot."""
        parts = urlsplit(instance.url)
        with contextlib.suppress(ValueError):
            ipaddress.IPv4Address(parts.hostname or "")
            if parts.scheme == "http":
                return True
        if instance.name not in self._left_out:
            self._left_out.add(instance.name)
            logger.warning(
                "router.endpoints_file leaves out %s at %s: it can name http:// and an IPv4 "
                "address only; set launch.host of that instance to one",
                *(instance.name, instance.url),
            )
        return False


def _entry(instance: Instance) -> dict[str, object]:
    parts = urlsplit(instance.url)
    return {
        "name": instance.name,
        "address": parts.hostname,
        "port": str(parts.port or 80),
        "labels": dict(instance.labels),
    }
