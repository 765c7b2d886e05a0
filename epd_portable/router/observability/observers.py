"""Listeners to requests besides the metrics, as the settings say."""

from __future__ import annotations

import os

from epd_portable.errors import ConfigError
from epd_portable.router.observability.access_log import AccessLog
from epd_portable.router.observability.record import Listener
from epd_portable.router.settings import RouterSettings

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of OpenTelemetry that name a collector."""


def observers(settings: RouterSettings) -> list[Listener]:
    """Return them, tracing first: others show its names.

    Raises:
        ConfigError: A file cannot be written, or a package is missing.
    """
    found: list[Listener] = []
    endpoint = settings.tracing.endpoint
    named = next((name for name in _ENDPOINTS if os.environ.get(name)), "")
    # Switched off, OpenTelemetry has no names of spans to send.
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if (endpoint or named) and not off:
        try:
            from epd_portable.router.observability.tracing import Tracing, provider
        except ImportError as error:
            asked = "router.tracing.endpoint" if endpoint else f"the variable {named}"
            raise ConfigError(
                f"{asked} asks for spans, and OpenTelemetry is not installed ({error}): install "
                "epd-portable[otel], or leave it out"
            ) from error
        found.append(Tracing(provider(endpoint)))
    if settings.access_log:
        found.append(AccessLog(settings.access_log))
    return found
