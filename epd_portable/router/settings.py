"""What the router is told when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from epd_portable.config.problems import in_one_line
from epd_portable.errors import ConfigError
from epd_portable.media.limits import MediaLimits

Role = Literal["encode", "prefill-decode"]
HttpUrl = Annotated[str, Field(pattern=r"^https?://[^/\s]+$")]

MEBIBYTE = 1 << 20
_MEDIA_LIMITS = MediaLimits()


class InstanceSettings(BaseModel):
    """One instance behind the router.

    Attributes:
        name: Unique; appears in logs, metrics, answers and paths of addresses.
        role: What it serves.
        url: ``http://host:port`` of its OpenAI server, without a path.
        control: ZMQ address of its control channel; for ``prefill-decode`` only. Encode instances
            are told this address too, so it must be reachable from where they run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")
    role: Role
    url: HttpUrl
    control: str = Field(default="", pattern=r"^(tcp://\S+:\d+|ipc://\S+)?$")

    @model_validator(mode="after")
    def _control_belongs_to_pd(self) -> InstanceSettings:
        if self.role == "prefill-decode" and not self.control:
            raise ValueError(
                f"instance {self.name!r} has no control address: name the ZMQ address of its "
                "control channel, for example tcp://127.0.0.1:5600"
            )
        if self.role == "encode" and self.control:
            raise ValueError(
                f"instance {self.name!r}: an encode instance has no control channel; remove "
                f"control={self.control!r}"
            )
        return self


class RouterSettings(BaseModel):
    """Everything the router needs to know.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        model: Served name of the model; requests for another are refused.
        instances: Those that are there from the beginning; without registration at least one of
            role ``prefill-decode``.
        secret_file: File with the secret of the deployment or of the launcher's run, from which the
            keys of the control channels come; without one the router does not start.
        registration: Whether who holds the secret may register instances while the router runs.
            The launcher allows it for a secret that the topology file names, and not for the one
            that it makes for a run.
        warm_up: Send every instance its first requests, and an item over every pair of instances,
            before clients' requests.
        forget_after_s: A registered instance that is not healthy for this long is forgotten.
        media: ``concurrent``: PD instances get the media, at the same time as encoders.
            ``metadata``: they get what encoders say of the items in place of their media.
        local_encode: Whether PD instances hold the encoder, so that media are of use to them.
        encode_timeout_s: Longest time of one encode job.
        wait_timeout_s: How long a PD instance waits for an item; afterwards no further encoder is
            tried for it.
        connect_timeout_s: Longest time of connecting to an instance.
        idle_timeout_s: Longest silence of a PD instance: before the first byte of an answer, and
            between two pieces of it.
        nack_grace_s: After a failed PD request, how long its reason is waited for on the control
            channel.
        probe_interval_s: Time between two health probes of one instance.
        probe_timeout_s: Longest time of one probe.
        max_body_bytes: Largest request body.
        max_media_items: Most images, videos and audio clips in one request.
        max_item_pixels: See `MediaLimits`; so are the next four.
        max_request_pixels: The same.
        max_video_frames: The same.
        max_media_seconds: The same.
        unknown_media: The same.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(ge=0, le=65535)
    model: str = Field(min_length=1)
    instances: tuple[InstanceSettings, ...]
    secret_file: str = ""
    registration: bool = True
    warm_up: bool = False
    forget_after_s: float = Field(default=600.0, gt=0)
    media: Literal["concurrent", "metadata"] = "concurrent"
    local_encode: bool = True
    encode_timeout_s: float = Field(default=30.0, gt=0)
    wait_timeout_s: float = Field(default=30.0, gt=0)
    connect_timeout_s: float = Field(default=2.0, gt=0)
    idle_timeout_s: float = Field(default=600.0, gt=0)
    nack_grace_s: float = Field(default=1.0, ge=0)
    probe_interval_s: float = Field(default=1.0, gt=0)
    probe_timeout_s: float = Field(default=5.0, gt=0)
    max_body_bytes: int = Field(default=64 * MEBIBYTE, gt=0)
    max_media_items: int = Field(default=64, gt=0)
    max_item_pixels: int = Field(default=_MEDIA_LIMITS.max_item_pixels, gt=0)
    max_request_pixels: int = Field(default=_MEDIA_LIMITS.max_request_pixels, gt=0)
    max_video_frames: int = Field(default=_MEDIA_LIMITS.max_video_frames, gt=0)
    max_media_seconds: float = Field(default=_MEDIA_LIMITS.max_media_seconds, gt=0)
    unknown_media: Literal["refuse", "pass"] = _MEDIA_LIMITS.unknown_media

    @model_validator(mode="after")
    def _instances_fit_together(self) -> RouterSettings:
        names = [instance.name for instance in self.instances]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"instance names {twice} occur more than once: give each its own")
        if not self.of_role("prefill-decode") and not self.registration:
            raise ValueError(
                "no instance has role 'prefill-decode': the router needs at least one, or "
                "registration, by which instances can come later"
            )
        return self

    def of_role(self, role: Role) -> tuple[InstanceSettings, ...]:
        """Return the instances of one role, in the order given."""
        return tuple(instance for instance in self.instances if instance.role == role)


def load_settings(text: str) -> RouterSettings:
    """Read settings from JSON, or from the file that ``@path`` names.

    Raises:
        ConfigError: Names every wrong or missing key, or the unreadable file.
    """
    source = "--settings"
    if text.startswith("@"):
        source = text[1:]
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"router settings {source!r} cannot be read: {error}") from error
    try:
        return RouterSettings.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"router settings from {source}: {in_one_line(error)}") from error
