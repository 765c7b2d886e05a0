"""The front's section of the topology file; ``docs/keys.md`` is generated from its docstrings."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from epd_portable.config.choice import ChoiceSection
from epd_portable.config.quantities import Port, Seconds, Section, Size, url_problem
from epd_portable.media.addresses import Domains
from epd_portable.media.limits import FRAMES_PER_S


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
    """Hosts of [media by URL](front.md#media-by-url). Empty: `http(s)` URLs get 400."""
    allowed_networks: list[_Network] = Field(default=[])
    """Networks, as `10.1.0.0/16`, in which such hosts may be although they are not public."""
    max_bytes: Annotated[Size, Field(ge=1024)] = 32 << 20
    """Largest file. Larger ones get 413."""
    cache_bytes: Annotated[Size, Field(ge=0)] = 256 << 20
    """Cache of fetched files, each for at most 300 s, or less by its `Cache-Control`. `0`: none."""


class MediaSection(Section):
    """Limits of media that are decoded, and their sources."""

    max_items: Annotated[int, Field(ge=1)] = 64
    """Most images, videos and audio clips of one request. More get 400."""
    max_item_pixels: Annotated[int, Field(ge=1)] = 64 << 20
    """Most pixels of one image or video frame. Larger ones get 400, see [Limits of
    media](front.md#limits-of-media)."""
    max_request_pixels: Annotated[int, Field(ge=1)] = 256 << 20
    """Most pixels of all media of a request, of videos those of the sampled frames."""
    max_seconds: Seconds = 600.0
    """Longest video or audio clip. A video may have 60 frames for each of these seconds."""
    max_memory_bytes: Annotated[Size, Field(ge=64 << 20)] | None = None
    """Memory (`RLIMIT_DATA`) that an API server may take after its start. A file that needs more
    gets 400. At least 64 MiB."""
    urls: MediaUrls = MediaUrls()

    @property
    def max_video_frames(self) -> int:
        """Frames in one video's file: those before one that is taken are decoded, too."""
        return int(self.max_seconds * FRAMES_PER_S)


class EncodeAdmission(Section):
    """Items in flight that are not encoded yet, for each usable encode instance, by weight."""

    max_items: Annotated[int, Field(ge=1)] | None = None
    """Most items in flight and not encoded yet, for each usable encode engine."""


class DecodeAdmission(Section):
    """Requests in flight for each usable instance that decodes, by weight."""

    max_requests: Annotated[int, Field(ge=1)] | None = None
    """Most requests in flight, for each usable engine that generates."""


class AdmissionSection(Section):
    """Limits of requests in flight and waiting; ``None`` is no limit."""

    max_requests: Annotated[int, Field(ge=1)] | None = None
    """Most requests in flight. Further ones wait, see [Admission](front.md#admission)."""
    max_items: Annotated[int, Field(ge=1)] | None = None
    """Most items of requests in flight. An item repeated within a request counts once."""
    max_bytes: Annotated[Size, Field(ge=1024)] | None = None
    """Most bytes of the bodies of requests in flight. At least 1 KiB."""
    encode: EncodeAdmission = EncodeAdmission()
    decode: DecodeAdmission = DecodeAdmission()
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """Most waiting requests. Further ones get 429 with `Retry-After`. `0`: no request waits."""
    max_wait_s: Seconds = 60.0
    """Longest wait of a request, then 429."""
    use_priority: bool = True
    """Order waiting requests by the priority that they request."""


class TracingSection(Section):
    """Spans of OpenTelemetry, from the front and engines, to a collector of OTLP over HTTP."""

    endpoint: Annotated[str, AfterValidator(_check_url)] | None = None
    """OpenTelemetry collector (OTLP over HTTP) for [spans](observability.md#spans), as
    `http://127.0.0.1:4318`. Needs `epd-portable[otel]`."""


class FrontSection(Section):
    """The public HTTP address and its limits."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8000
    """Port to listen on."""
    tls_cert_file: str | None = None
    """Certificate chain (PEM), read again when it changes. With it the front serves HTTPS."""
    tls_key_file: str | None = None
    """Private key (PEM) of the certificate."""
    api_keys_file: str | None = None
    """File of mode 600, one API key of at least 16 characters a line, read again when it changes.
    Clients send `Authorization: Bearer KEY` or `x-api-key`. `/health`, `/ping`, `/metrics` and
    `OPTIONS` need none."""
    gateway_keys_file: str | None = None
    """Keys of [trusted gateways](choice.md#behind-another-picker), which may name the engines of a
    request. They send `x-epd-gateway-key`."""
    cors_origins: list[str] = Field(default=[])
    """Origins of web pages that may send requests, as `https://chat.example.com`, or `*`. JSON
    needs `content-type: application/json`, else 400. Forms of other origins get 403."""
    item_outcomes: bool = False
    """Return the source of each item (`ec_transfer_params`) in responses that are not streamed,
    before vLLM 0.26 in `kv_transfer_params`. Clients can learn whether others sent the same
    image."""
    max_body_bytes: Annotated[Size, Field(ge=1024)] = 64 << 20
    """Largest request body. Larger ones get 413. At least 1 KiB."""
    max_bodies_bytes: Annotated[Size, Field(ge=1024)] = 1 << 30
    """Bytes of request bodies in memory. Beyond them 503."""
    media: MediaSection = MediaSection()
    encode_order: Literal["concurrent", "sequential_fallback", "sequential"] = "concurrent"
    """`concurrent`: all encode jobs of a request at once. `sequential`: one after the other.
    `sequential_fallback`: at once, but retries one after the other."""
    partial_results: bool = False
    """Serve a request without the items that no engine can encode, instead of 503: [Partial
    results](front.md#partial-results)."""
    elastic_encode: bool = True
    """Let a prefill+decode engine encode items of its requests when that ends sooner: [Elastic
    encoding](scheduling.md#elastic-encoding)."""
    choice: ChoiceSection | None = None
    """[Choice of engines](choice.md) in the format of llm-d's `EndpointPickerConfig`, or `{file:
    …}`. None: items by consistent hashing with bounded loads, requests by least load."""
    access_log: Annotated[str, Field(min_length=1)] | None = None
    """`stderr` or a file: one JSON line for each request, without prompts, URLs and keys
    ([fields](observability.md#the-access-line))."""
    tracing: TracingSection = TracingSection()
    admission: AdmissionSection = AdmissionSection()
    drain_s: Seconds = 30.0
    """Longest time for open requests when the front [stops](configuration.md#stopping)."""

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
