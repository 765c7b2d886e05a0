"""What the router is told when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from epd_portable.config.problems import in_one_line
from epd_portable.config.schema import MAX_ENCODERS, RouterSection
from epd_portable.errors import ConfigError

Role = Literal["encode", "prefill-decode"]
HttpUrl = Annotated[str, Field(pattern=r"^https?://[^/\s?#@\\]+$")]


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


class RouterSettings(RouterSection):
    """Everything the router needs to know.

    The keys of the topology file's ``router`` section, and what the launcher adds.

    Attributes:
        port: Port to listen on; 0 takes a free one.
        model: Served name of the model; goes to instances where a client names none.
        instances: Those that are there from the beginning; without registration at least one of
            role ``prefill-decode``.
        secret_file: File with the secret of the deployment or of the launcher's run, from which the
            keys of the control channels come; without one the router does not start.
        registration: Whether who holds the secret may register instances while the router runs.
            The launcher allows it for a secret that the topology file names, and not for the one
            that it makes for a run.
        warm_up: Send every instance its first requests, and an item over every pair of instances,
            before clients' requests.
        media: ``concurrent``: PD instances get the media, at the same time as encoders.
            ``metadata``: they get what encoders say of the items in place of their media.
        local_encode: Whether PD instances hold the encoder, so that media are of use to them.
        wait_timeout_s: How long a PD instance waits for an item; afterwards no further encoder is
            tried for it.
        connect_timeout_s: Longest time of connecting to an instance.
        nack_grace_s: After a failed PD request, how long its reason is waited for on the control
            channel.
        probe_interval_s: Time between two health probes of one instance.
        probe_timeout_s: Longest time of one probe.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    port: int = Field(ge=0, le=65535)
    model: str = Field(min_length=1)
    instances: tuple[InstanceSettings, ...]
    secret_file: str = ""
    registration: bool = True
    warm_up: bool = False
    media: Literal["concurrent", "metadata"] = "concurrent"
    local_encode: bool = True
    wait_timeout_s: float = Field(default=30.0, gt=0)
    connect_timeout_s: float = Field(default=2.0, gt=0)
    nack_grace_s: float = Field(default=1.0, ge=0)
    probe_interval_s: float = Field(default=1.0, gt=0)
    probe_timeout_s: float = Field(default=5.0, gt=0)

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

    @model_validator(mode="after")
    def _deadlines_fit_into_each_other(self) -> RouterSettings:
        if problem := self.deadline_problem(self.wait_timeout_s):
            raise ValueError(problem)
        return self

    def of_role(self, role: Role) -> tuple[InstanceSettings, ...]:
        """Return the instances of one role, in the order given."""
        return tuple(instance for instance in self.instances if instance.role == role)

    @property
    def encode_job_s(self) -> float:
        """Longest time of one encode job: short enough for another encoder afterwards."""
        return self.encode_timeout_s or self.wait_timeout_s / MAX_ENCODERS


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
