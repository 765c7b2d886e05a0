"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from epd_portable.config.choice import with_file
from epd_portable.config.groups import Labels, Weight
from epd_portable.config.problems import in_one_line
from epd_portable.config.removed import REMOVED, removed
from epd_portable.config.roles import DUTIES, Duty, role_named
from epd_portable.config.roles import Role as Role
from epd_portable.config.routing import MAX_ENCODERS, RouterSection
from epd_portable.config.store import StoreSection
from epd_portable.errors import ConfigError
from epd_portable.placement.assignment import BUSY_THRESHOLD
from epd_portable.placement.profiles.policy import Policy
from epd_portable.placement.replies import BODY_TIMEOUT_S

HttpUrl = Annotated[str, Field(pattern=r"^https?://[^/\s?#@\\]+$")]


class InstanceSettings(BaseModel):
    """One instance behind the router.

    Attributes:
        name: Unique; appears in logs, metrics, answers and paths of addresses.
        role: What it serves; short names of roles are taken too.
        url: ``http://host:port`` of its OpenAI server, without a path.
        control: ZMQ address of its control channel; for all but ``encode``. Encode instances are
            given this address too, so it must be reachable from where they run.
        weight: How much it does of what others of its role do.
        labels: What its operator says of it, for ``router.choice``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")
    role: Role
    url: HttpUrl
    control: str = Field(default="", pattern=r"^(tcp://\S+:\d+|ipc://\S+)?$")
    weight: Weight = 1.0
    labels: Labels = Field(default_factory=dict)

    @field_validator("role", mode="before")
    @classmethod
    def _other_names(cls, name: object) -> object:
        return (isinstance(name, str) and role_named(name)) or name

    @model_validator(mode="after")
    def _control_belongs_to_all_but_encoders(self) -> InstanceSettings:
        if self.role != "encode" and not self.control:
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
        model: Served name of the model; goes to instances where a client names none.
        instances: Those that are there from the beginning; without registration at least one
            that answers.
        secret_file: File with the secret of the deployment or of the launcher's run, from which the
            keys of the control channels come; without one the router does not start.
        registration: Whether holders of the secret may register instances while the router runs.
            The launcher allows it for a secret that the topology file names, and not for the one
            that it makes for a run.
        store: Is asked for items before encoders are chosen; ``None`` for none.
        warm_up: Send every instance its first requests, and an item over every pair of instances,
            before clients' requests.
        media: ``concurrent``: PD instances get the media, at the same time as encoders.
            ``metadata``: they get what encoders say of the items in place of their media.
        local_encode: Whether PD instances hold the encoder, so that media are of use to them.
        wait_timeout_s: How long a PD instance waits for an item; afterwards no further encoder is
            tried for it.
        body_timeout_s: Longest time in which a request's body must have come.
        send_timeout_s: A client that takes nothing of its answer for this long is given up.
        encode_timeout_s: Longest time of one encode job before another encoder is tried, if less
            than what lets all tries end within ``wait_timeout_s``.
        elastic_threshold: While a PD instance computes for other requests, encode instances must
            need so many times longer until it encodes by itself.
        forget_after_s: An instance that joined and is not healthy for this long is forgotten.
        nack_grace_s: After a failed PD request, how long its reason is waited for on the control
            channel.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

    port: int = Field(ge=0, le=65535)
    model: str = Field(min_length=1)
    instances: tuple[InstanceSettings, ...]
    secret_file: str = ""
    registration: bool = True
    store: StoreSection | None = None
    warm_up: bool = False
    media: Literal["concurrent", "metadata"] = "concurrent"
    local_encode: bool = True
    wait_timeout_s: float = Field(default=30.0, gt=0)
    body_timeout_s: float = Field(default=BODY_TIMEOUT_S, gt=0)
    send_timeout_s: float = Field(default=60.0, gt=0)
    encode_timeout_s: float | None = Field(default=None, gt=0)
    elastic_threshold: float = Field(default=BUSY_THRESHOLD, ge=1)
    forget_after_s: float = Field(default=600.0, gt=0)
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
        prefills = self.hop_keys_file is not None and bool(self.of_duty("prefill"))
        if not self.of_duty("answer") and not self.registration and not prefills:
            raise ValueError(
                "no instance answers requests (roles decode, prefill-decode and "
                "encode-prefill-decode do): the router needs at least one, or registration, by "
                "which instances can come later"
            )
        return self

    @model_validator(mode="after")
    def _deadlines_fit_into_each_other(self) -> RouterSettings:
        if problem := self.deadline_problem(self.wait_timeout_s):
            raise ValueError(problem)
        return self

    def of_duty(self, duty: Duty) -> tuple[InstanceSettings, ...]:
        """Return the instances that do one thing, in the order given."""
        return tuple(each for each in self.instances if DUTIES[each.role] == duty)

    def as_json(self) -> str:
        """Return what `load_settings` reads; without a store nothing is said of it.

        Nor of ``join``: where that is set there is no router.
        """
        return self.model_dump_json(exclude={"join"} if self.store else {"join", "store"})

    @property
    def encode_job_s(self) -> float:
        """Longest time of one encode job: short enough for another encoder afterwards."""
        longest_s = self.wait_timeout_s / MAX_ENCODERS
        return min(self.encode_timeout_s or longest_s, longest_s)


def policy_of(settings: RouterSettings) -> Policy | None:
    """Return how instances are chosen, if the settings say it.

    Raises:
        ConfigError: It cannot be read, or lists what is wrong with it.
    """
    if settings.choice is None:
        return None
    return Policy(with_file(settings.choice))


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
        keys = [".".join(map(str, ("router", *each["loc"]))) for each in error.errors()]
        remedies = [f"{key} {removed(key)}" for key in keys if key in REMOVED]
        problems = "; ".join([in_one_line(error), *remedies])
        raise ConfigError(f"router settings from {source}: {problems}") from error
