"""The front's section of the topology file; ``docs/configuration.md`` describes its keys."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from epd_portable.config.choice import ChoiceSection
from epd_portable.config.quantities import Port, Seconds, Section, Size, url_problem
from epd_portable.media.addresses import Domains
from epd_portable.media.limits import MediaLimits

_MEDIA_LIMITS = MediaLimits()


def _check_network(network: str) -> str:
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        raise ValueError(
            f"{network!r} is no network ({error}); write for example 10.1.0.0/16"
        ) from None
    return network


def _check_domain(domain: str) -> str:
    Domains([domain])
    return domain


def _check_url(url: str) -> str:
    if problem := url_problem(url):
        raise ValueError(problem)
    return url


_Network = Annotated[str, AfterValidator(_check_network)]
MAX_ENCODERS = 2
"""Encoders tried for one item before the PD instance encodes it itself."""


class MediaUrls(Section):
    """Images, videos and audio clips that requests name by URL; the front fetches them."""

    allowed_domains: list[Annotated[str, AfterValidator(_check_domain)]] = Field(default=[])
    allowed_networks: list[_Network] = Field(default=[])
    max_bytes: Annotated[Size, Field(ge=1024)] = 32 << 20
    cache_bytes: Annotated[Size, Field(ge=0)] = 256 << 20


class MediaSection(Section):
    """What media may become when they are decoded, see `MediaLimits`, and where they come from."""

    max_items: Annotated[int, Field(ge=1)] = _MEDIA_LIMITS.max_items
    max_item_pixels: Annotated[int, Field(ge=1)] = _MEDIA_LIMITS.max_item_pixels
    max_request_pixels: Annotated[int, Field(ge=1)] = _MEDIA_LIMITS.max_request_pixels
    max_seconds: Seconds = _MEDIA_LIMITS.max_seconds
    max_memory_bytes: Annotated[Size, Field(ge=64 << 20)] | None = None
    urls: MediaUrls = MediaUrls()

    @property
    def limits(self) -> MediaLimits:
        """Those for whoever decodes them."""
        return MediaLimits(**self.model_dump(exclude={"urls"}))


class EncodeAdmission(Section):
    """Items in flight that are not encoded yet, for each usable encode instance, by weight."""

    max_items: Annotated[int, Field(ge=1)] | None = None


class AnswerAdmission(Section):
    """Requests in flight for each usable instance that answers, by weight."""

    max_requests: Annotated[int, Field(ge=1)] | None = None


class AdmissionSection(Section):
    """What may be in flight at the instances, and which requests wait; ``None`` is no limit."""

    max_requests: Annotated[int, Field(ge=1)] | None = None
    max_items: Annotated[int, Field(ge=1)] | None = None
    max_bytes: Annotated[Size, Field(ge=1024)] | None = None
    encode: EncodeAdmission = EncodeAdmission()
    answer: AnswerAdmission = AnswerAdmission()
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    max_wait_s: Seconds = 60.0
    heed_priority: bool = True


class TracingSection(Section):
    """Spans of OpenTelemetry, from the front and engines, to a collector of OTLP over HTTP."""

    endpoint: Annotated[str, AfterValidator(_check_url)] | None = None


class FrontSection(Section):
    """The public HTTP address and its limits."""

    host: str = "127.0.0.1"
    port: Port = 8000
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    api_keys_file: str | None = None
    hop_keys_file: str | None = None
    cors_origins: list[str] = Field(default=[])
    item_outcomes: bool = False
    max_body_bytes: Annotated[Size, Field(ge=1024)] = 64 << 20
    max_bodies_bytes: Annotated[Size, Field(ge=1024)] = 1 << 30
    media: MediaSection = MediaSection()
    encode_order: Literal["concurrent", "sequential_fallback", "sequential"] = "concurrent"
    partial_results: bool = False
    elastic_encode: bool = True
    switch_roles: bool = False
    choice: ChoiceSection | None = None
    access_log: Annotated[str, Field(min_length=1)] | None = None
    tracing: TracingSection = TracingSection()
    admission: AdmissionSection = AdmissionSection()
    drain_s: Seconds = 30.0

    @model_validator(mode="after")
    def _files_and_sizes_fit(self) -> FrontSection:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together: set both or neither")
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes of {self.max_bodies_bytes} is less than max_body_bytes of "
                f"{self.max_body_bytes}: one request must fit"
            )
        return self
