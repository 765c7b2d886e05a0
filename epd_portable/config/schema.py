"""The topology file: every key that a user may write, its default and its limits.

``load.py`` reads files into these models; nothing here opens a file or knows a device.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

from epd_portable.envs import EPD_MAX_QUEUED_BYTES, EPD_MAX_QUEUED_ITEMS
from epd_portable.media.limits import MediaLimits

_MEDIA_LIMITS = MediaLimits()

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

LAUNCHER_OWNED_ARGS = {
    "host": "write launch.host, the address of this machine that instances listen on",
    "port": "ports of instances are chosen by the launcher; the public one is router.port",
    "model": "write the model at the top of the file",
    "served_model_name": "write served_model_name at the top of the file",
    "tensor_parallel_size": "write tensor_parallel_size beside count in instances",
    "ec_transfer_config": "the launcher writes it; its settings are under transfer",
    "pipeline_parallel_size": "this version does not support pipeline parallelism",
    "prefill_context_parallel_size": "this version does not support it",
    "data_parallel_size": "raise count in instances instead",
    "config": "write the arguments into this file, where they are checked",
}
"""Engine arguments that the launcher writes itself or keeps out, and what to do instead.

vLLM takes any unambiguous beginning of a name for the name, so these are refused too.
"""

SHORT_ARGS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pcp": "prefill_context_parallel_size",
}
"""vLLM's one-dash names of such arguments; those of data parallelism all begin with ``dp``."""


def parse_size(value: Any) -> Any:
    """Turn ``"512MiB"`` into bytes; leave everything else to the type check.

    Raises:
        ValueError: The text is not a number with a binary unit.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{value!r} is not a size; write bytes or a unit, as in 512MiB or 1GiB")
    return int(float(match[1]) * UNITS[match[2]])


def _owned(name: str) -> str | None:
    """Return the name in `LAUNCHER_OWNED_ARGS` that an argument means, however it is written."""
    plain = re.split(r"[.=\s]", name.strip(" -").lower().replace("-", "_"), maxsplit=1)[0]
    if plain.startswith(("data_parallel_", "dp")):
        return "data_parallel_size"
    plain = SHORT_ARGS.get(plain, plain)
    return next((owned for owned in LAUNCHER_OWNED_ARGS if plain and owned.startswith(plain)), None)


def _check_engine_arg_name(name: str) -> str:
    if owned := _owned(name):
        raise ValueError(f"{name} cannot be set here: {LAUNCHER_OWNED_ARGS[owned]}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        wanted = re.sub(r"[^a-z0-9]+", "_", name.lower().strip("-"))
        raise ValueError(f"write {wanted}: names of engine arguments have underscores, no dashes")
    return name


def _check_network(network: str) -> str:
    if network not in ("loopback", "private"):
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise ValueError(
                f"{network!r} is no network ({error}); write for example 10.1.0.0/16, loopback or "
                "private"
            ) from None
    return network


def _check_host(host: str) -> str:
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError(f"{host!r} is no IPv4 address; write one of this machine") from None
    if address.is_unspecified:
        raise ValueError(
            f"{host} is every address; write the one that others reach this machine by"
        )
    return host


def _device(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Size = Annotated[int, BeforeValidator(parse_size)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Network = Annotated[str, AfterValidator(_check_network)]
EngineArgs = dict[Annotated[str, AfterValidator(_check_engine_arg_name)], JsonValue]
Device = Annotated[str, BeforeValidator(_device), Field(pattern=r"^[A-Za-z0-9_./:-]+$")]
Environment = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class InstanceGroup(_Section):
    """All instances of one role.

    Attributes:
        count: How many.
        tensor_parallel_size: Devices (on CPU: groups of cores) of each instance.
        engine_args: vLLM arguments of this role, laid over the common ones.
        env: Environment variables of this role.
        cores: CPU cores of the whole group, divided among its instances; only where instances
            are bound to cores. Left out, the launcher divides those that are allowed.
        devices: Device indices or UUIDs of the whole group, ``tensor_parallel_size`` for each
            instance in turn. Left out, the launcher gives every instance devices of its own; a
            list may name a device that another group has too.
        share: Percent of the compute of each of its devices that each instance may take, where
            the platform has a service for that and it runs; left out, all take turns.
    """

    count: Annotated[int, Field(ge=1, le=1024)] = 1
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    engine_args: EngineArgs = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)
    cores: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    devices: Annotated[list[Device], Field(min_length=1)] | None = None
    share: Annotated[int, Field(ge=1, le=100)] | None = None


class EncodeGroup(InstanceGroup):
    """All encode instances.

    Attributes:
        max_queued_items: Items that one instance has queued or in work; more are answered 429.
            The default is what an encoder of ten items a second works off within
            ``transfer.wait_timeout_s``: what waits longer is encoded elsewhere anyway.
        max_queued_bytes: The same for the bytes of their requests. The default holds eight of the
            largest bodies that the router passes on.
    """

    max_queued_items: Annotated[int, Field(ge=1)] = EPD_MAX_QUEUED_ITEMS.default
    max_queued_bytes: Annotated[Size, Field(ge=1024)] = EPD_MAX_QUEUED_BYTES.default


class PrefillDecodeGroup(InstanceGroup):
    """All prefill-decode instances.

    Attributes:
        encoder: Whether they hold the encoder, too, for items that nobody else encodes.
    """

    encoder: bool = True


class Instances(_Section):
    """The instances of the topology, by role."""

    encode: EncodeGroup = EncodeGroup()
    prefill_decode: PrefillDecodeGroup = PrefillDecodeGroup()

    @field_validator("encode")
    @classmethod
    def _encoders_are_not_split(cls, group: EncodeGroup) -> EncodeGroup:
        if group.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size of an encode instance must be 1, got "
                f"{group.tensor_parallel_size}: raise its count instead"
            )
        return group


class TransferSection(_Section):
    """How encoder outputs travel.

    Attributes:
        path: One transfer path for every pair, or ``auto`` for the best that both ends have.
        media: What prefill-decode instances get of an item: its ``media`` at the same time as the
            encoder (``concurrent``), or what the encoder says of it (``metadata``).
        pool_bytes: Receive pool of each prefill-decode instance; also the size of its pool in
            device memory, where a path writes there.
        preallocation: Whether an announced item gets room once its request is known (``sync``) or
            before it as well, as long as no request waits for room (``async``).
        wait_timeout_s: Longest wait of a request for one item.
        lease_s: Longest time from a grant to the end of its write.
        trusted_network: Items may leave the host by paths that do not encrypt.
    """

    path: Literal["auto", "shm", "tcp", "ipc", "collective"] = "auto"
    media: Literal["concurrent", "metadata"] = "concurrent"
    pool_bytes: Annotated[Size, Field(ge=4 << 10)] = 1 << 30
    preallocation: Literal["sync", "async"] = "sync"
    wait_timeout_s: Seconds = 30.0
    lease_s: Seconds = 10.0
    trusted_network: bool = False


MAX_ENCODERS = 2
"""Encoders tried for one item before the PD instance encodes it itself."""


class RouterSection(_Section):
    """The public HTTP address and its limits.

    Attributes:
        host: Address to listen on.
        port: Port to listen on.
        envoy: Start Envoy in front: it carries requests and answers, and is told where to.
        admin_port: Port of the same host for ``/epd/``, ``/metrics`` and ``/health``; by default
            they are on `port`.
        workers: Processes that serve on `port`.
        tls_cert_file: Certificate chain in PEM; with it the router speaks HTTPS.
        tls_key_file: Its private key in PEM.
        api_keys_file: File with one key of clients a line; asked for as bearer token. Read again
            when it changes.
        cors_origins: Origins of web pages that may ask; ``*`` is any.
        unknown_fields: What becomes of fields of a request body that no version of vLLM knows:
            ``pass`` them on, ``drop`` them, or ``refuse`` the request with the nearest known name.
        item_outcomes: Tell clients how each item of theirs was had (``ec_transfer_params`` in
            answers that are not streamed). Who sees it learns which pictures others have sent.
        max_body_bytes: Larger request bodies are refused with 413.
        max_bodies_bytes: Bytes of all request bodies that are held at a time; beyond them requests
            are refused with 503.
        body_timeout_s: Longest time in which a request's body must have come.
        send_timeout_s: A client that takes nothing of its answer for this long is given up.
        max_media_items: Requests with more images, videos and audio clips are refused with 400.
        max_item_pixels: Larger images, and videos of larger frames, are refused with 413.
        max_request_pixels: The same for all media of a request together: of an image its own
            pixels, of a video those of the frames that are sampled.
        max_video_frames: Videos with more frames in their file are refused with 413.
        max_media_seconds: Videos and audio clips that play longer are refused with 413.
        unknown_media: Whether files of which all that cannot be told are refused with 400.
        encode_timeout_s: Longest time one encode job may take, before another encoder is tried; by
            default what lets all tries end within ``transfer.wait_timeout_s``.
        elastic_encode: Let a prefill-decode instance encode items of its requests itself when that
            ends sooner than the encode instances would; not with ``transfer.media: metadata`` or
            ``encoder: false``.
        elastic_threshold: While such an instance computes for other requests, encode instances must
            need so many times longer.
        idle_timeout_s: Longest silence of a prefill-decode instance before a request is given up.
        drain_s: How long answers that have begun may go on when the router is stopped, and those
            of an instance when it is updated.
        forget_after_s: An instance that joined and is not healthy for this long is forgotten.
        instance_networks: Networks in which instances may be that join, as ``10.0.0.0/8``; by
            default this machine and private ones.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    envoy: bool = False
    admin_port: Port | None = None
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    api_keys_file: str | None = None
    cors_origins: list[str] = []
    unknown_fields: Literal["pass", "drop", "refuse"] = "pass"
    item_outcomes: bool = False
    max_body_bytes: Annotated[Size, Field(ge=1024)] = 64 << 20
    max_bodies_bytes: Annotated[Size, Field(ge=1024)] = 1 << 30
    body_timeout_s: Seconds = 60.0
    send_timeout_s: Seconds = 60.0
    max_media_items: Annotated[int, Field(ge=1)] = 64
    max_item_pixels: Annotated[int, Field(ge=1)] = _MEDIA_LIMITS.max_item_pixels
    max_request_pixels: Annotated[int, Field(ge=1)] = _MEDIA_LIMITS.max_request_pixels
    max_video_frames: Annotated[int, Field(ge=1)] = _MEDIA_LIMITS.max_video_frames
    max_media_seconds: Seconds = _MEDIA_LIMITS.max_media_seconds
    unknown_media: Literal["refuse", "pass"] = _MEDIA_LIMITS.unknown_media
    encode_timeout_s: Seconds | None = None
    elastic_encode: bool = True
    elastic_threshold: Annotated[float, Field(ge=1)] = 4.0
    idle_timeout_s: Seconds = 600.0
    drain_s: Seconds = 30.0
    forget_after_s: Seconds = 600.0
    instance_networks: list[Network] = ["loopback", "private"]

    @model_validator(mode="after")
    def _files_and_sizes_fit(self) -> RouterSection:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together: set both or neither")
        if self.envoy and self.workers > 1:
            raise ValueError(
                f"workers is {self.workers}, and envoy true: with Envoy one process decides, and "
                "Envoy has a thread for each core; leave one of the keys out"
            )
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes of {self.max_bodies_bytes} is less than max_body_bytes of "
                f"{self.max_body_bytes}: one request must fit"
            )
        return self

    def deadline_problem(self, wait_timeout_s: float) -> str:
        """Return why the deadlines of an item do not fit into each other; empty if they do.

        Args:
            wait_timeout_s: How long a PD instance waits for an item.
        """
        encode_s = self.encode_timeout_s
        if encode_s is not None and encode_s * MAX_ENCODERS > wait_timeout_s:
            return (
                f"router.encode_timeout_s of {encode_s:g} s leaves no time for another encoder: "
                f"{MAX_ENCODERS} of them are tried within transfer.wait_timeout_s of "
                f"{wait_timeout_s:g} s; set at most {wait_timeout_s / MAX_ENCODERS:g}, or leave "
                "it out"
            )
        if wait_timeout_s >= self.idle_timeout_s:
            return (
                f"transfer.wait_timeout_s of {wait_timeout_s:g} s is not less than "
                f"router.idle_timeout_s of {self.idle_timeout_s:g} s: requests would be given up "
                "while their items are waited for; raise the latter"
            )
        return ""


class Restart(_Section):
    """What happens when a process dies while the topology serves.

    Attributes:
        first_delay_s: Pause before the first restart; it doubles with every further death.
        max_delay_s: Longest pause.
        healthy_after_s: Healthy for this long, an instance has its earlier deaths forgiven.
    """

    first_delay_s: Seconds = 1.0
    max_delay_s: Seconds = 30.0
    healthy_after_s: Seconds = 60.0


class Launch(_Section):
    """How the launcher starts, watches and stops processes.

    Attributes:
        host: IPv4 address of this machine on which instances listen: HTTP, control and data. Off
            the loopback it needs ``secret_file``.
        startup_timeout_s: Every process must be healthy within this time of its start.
        stop_grace_s: Time between asking processes to end and killing them.
        probe_interval_s: Time between two probes of a process that serves.
        hung_after_s: A process that misses all its probes for this long, and at least three, is
            ended and started again. Each may take a third of this time. 0 probes none.
        restart: Back-off of restarts.
        log_max_bytes: A log that is larger is cut, and its content kept as an older part.
        log_files: Files kept of each log: itself and its older parts.
        warm_up: Send every instance its first requests, and an item over every pair, before it gets
            those of clients.
    """

    host: Annotated[str, AfterValidator(_check_host)] = "127.0.0.1"
    warm_up: bool = True
    startup_timeout_s: Seconds = 600.0
    stop_grace_s: Seconds = 15.0
    probe_interval_s: Seconds = 5.0
    hung_after_s: Annotated[float, Field(ge=0)] = 120.0
    restart: Restart = Restart()
    log_max_bytes: Annotated[Size, Field(ge=64 << 10)] = 100 << 20
    log_files: Annotated[int, Field(ge=1, le=100)] = 3


class Topology(_Section):
    """A whole topology file, with the overlay of one platform already laid over it.

    Attributes:
        model: Hugging Face id, folder, or ``demo`` for the bundled model.
        secret_file: File with the secret of the deployment; with it instances can join the router.
            Without it the launcher makes a secret for the run, with which none can.
        served_model_name: Name that clients use; by default the id, or the folder's last part.
        instances: Engine instances by role.
        transfer: How encoder outputs travel.
        router: Public HTTP address.
        launch: Start, restart and stop.
        engine_args: vLLM arguments of every instance.
        env: Environment variables of every instance.
    """

    model: Annotated[str, Field(min_length=1)]
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    secret_file: Annotated[str, Field(min_length=1)] | None = None
    instances: Instances = Instances()
    transfer: Annotated[TransferSection, Field(validate_default=True)] = TransferSection()
    router: RouterSection = RouterSection()
    launch: Launch = Launch()
    engine_args: EngineArgs = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)

    @model_validator(mode="after")
    def _deadlines_fit_into_each_other(self) -> Topology:
        if problem := self.router.deadline_problem(self.transfer.wait_timeout_s):
            raise ValueError(problem)
        return self

    @field_validator("transfer")
    @classmethod
    def _media_go_where_an_encoder_is(
        cls, transfer: TransferSection, info: ValidationInfo
    ) -> TransferSection:
        instances: Instances | None = info.data.get("instances")
        if instances is None or instances.prefill_decode.encoder or transfer.media == "metadata":
            return transfer
        raise ValueError(
            f"media is {transfer.media}, and instances.prefill_decode.encoder is false: media are "
            "of no use there; set transfer.media to metadata"
        )
