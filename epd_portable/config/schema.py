"""The topology file: every key that a user may write, its default and its limits.

``docs/keys.md`` is generated from the docstrings of the keys. ``load.py`` reads files into these
models; nothing here opens a file or knows a device.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from epd_portable.config.front import FrontSection
from epd_portable.config.groups import EngineArgs, Environment, Instances
from epd_portable.config.instance import EncodePriority, PathName
from epd_portable.config.quantities import FrontUrl, Seconds, Section, Size
from epd_portable.config.roles import (
    DUTIES,
    ENCODES,
    ROLES,
    SENDS_KV,
    TAKES_ITEMS,
    Role,
    group_of,
)
from epd_portable.config.store import StoreSection

AUTO = "auto"
"""``launch.host``: the address that the default route of the machine leaves by."""


def _check_host(host: str) -> str:
    if host == AUTO:
        return host
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError(
            f"{host!r} is no IPv4 address; write one of this machine, or {AUTO}"
        ) from None
    if address.is_unspecified:
        raise ValueError(
            f"{host} is every address; write the one that others reach this machine by"
        )
    return host


def _one_or_more(given: object) -> object:
    return [given] if isinstance(given, str) else given


class TransferSection(Section):
    """Transfer of encoder outputs."""

    path: PathName = "auto"
    """`auto`: the first path of both ends, see [Transfer paths](configuration.md#transfer-paths).
    `shm`, `tcp`, `ipc`, `nixl`, `collective`: that path, or an error."""
    pool_bytes: Annotated[Size, Field(ge=4 << 10)] = 1 << 30
    """Receive pool of each instance that gets items, in `/dev/shm`, and again in device memory for
    `ipc` and `collective`. The largest item must fit. At least 4 KiB."""
    wait_timeout_s: Seconds = 30.0
    """Longest wait of a request for one item, then local encoding. After twice that time without
    progress of any item, the first waiting request ends with 503."""
    lease_s: Seconds = 10.0
    """Longest time from a grant to the end of its write. Renewed while the encoder works."""
    trusted_network: bool = False
    """Allow unencrypted KV, jobs, `nixl` and `collective` between hosts. Without it, `auto` omits
    these paths, and naming one is an error."""


class Launch(Section):
    """Start, supervision and end of processes."""

    host: Annotated[str, AfterValidator(_check_host)] = "127.0.0.1"
    """IPv4 address of this machine for jobs, HTTP, control and data, or `auto`: the address of the
    default route. Any but a loopback address needs `secret_file`."""
    join: Annotated[list[FrontUrl], BeforeValidator(_one_or_more)] = Field(default=[])
    """URL of a front on another machine, or a list. No front is started here: the encode and
    prefill engines of this file [join](hosts.md#engines-that-join) each address of each
    name."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]{0,62})$")] | None = None
    """Suffix of the names of engines that join, in place of `launch.host`: for several launchers on
    one host. Lower-case letters, digits, hyphens and dots."""
    first_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """First port of the instances, which take ports in the order of `epd-launch plan`. From
    1024; connections of Linux take none below 32768. None: free ports, other ones in each run."""
    startup_timeout_s: Seconds = 600.0
    """Longest time from the start of a process until it is healthy, then until engines are up at
    the fronts of `launch.join`."""
    stop_grace_s: Seconds = 15.0
    """Time from SIGTERM to SIGKILL at a stop. A second Ctrl-C ends it."""
    hung_after_s: Annotated[float, Field(ge=0)] = 120.0
    """A process that fails every probe for this time, at least three, is restarted. A probe waits a
    third of it. `0`: never."""


class Topology(Section):
    """A whole topology file, with the overlay of one platform already laid over it."""

    model: Annotated[str, Field(min_length=1)]
    """Hugging Face id, folder of a checkpoint, or `demo` for the bundled model."""
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    """Model name for clients. None: the model's id, or the last part of its folder."""
    secret_file: Annotated[str, Field(min_length=1)] | None = None
    """File with the [secret](configuration.md#secrets) of a deployment, read at the start. None: a
    secret for the run, and no engine of another machine can join."""
    encode_priority: EncodePriority = "balanced"
    """Priority at an engine that generates tokens and encodes: `tokens`, `balanced` or `images`,
    see [Encode priority](scheduling.md#encode-priority)."""
    instances: Instances = Instances()
    transfer: TransferSection = TransferSection()
    front: FrontSection = FrontSection()
    launch: Launch = Launch()
    store: StoreSection | None = None
    """[Store](store.md) of encoder outputs, with the keys below. Needs `epd-portable[store]`."""
    engine_args: EngineArgs = Field(default_factory=dict)
    """vLLM arguments of all instances, see [Engine arguments](configuration.md#engine-arguments).
    """
    env: Environment = Field(default_factory=dict)
    """[Environment variables](configuration.md#environment-of-instances) of all instances."""

    def gets_items(self, role: Role) -> bool:
        """Return whether instances of a role get items from others: those here, or who joins."""
        if role not in TAKES_ITEMS or role not in ENCODES or self.secret_file is not None:
            return role in TAKES_ITEMS
        return sum(self.instances.counts[each] for each in ENCODES) > 1

    def engine_args_of(self, role: Role) -> dict[str, JsonValue]:
        """Return the engine arguments that the file sets for instances of a role."""
        return {**self.engine_args, **self.instances.of(role).engine_args}

    @property
    def encodes_apart(self) -> bool:
        """Return whether encode instances have a platform or an environment of their own."""
        group = self.instances.encode
        named = group.platform is not None or group.environment is not None
        return named and group.count > 0 and not self.launch.join

    @model_validator(mode="after")
    def _roles_go_together(self) -> Topology:
        counts = self.instances.counts
        if self.launch.join:
            return self._check_to_join(", ".join(self.launch.join))
        prefill = sum(counts[role] for role in SENDS_KV)
        problem = ""
        none_encodes = not (self.instances.prefill_decode.encoder or counts["encode"])
        if none_encodes and self.secret_file is None:
            problem = (
                "prefill_decode.encoder is false, and no encode instance is here: raise "
                "encode.count, or set secret_file, by which encode engines of other machines join"
            )
        elif counts["encode"] and self.engine_args.get("enable_tower_connector_lora"):
            problem = (
                "engine_args.enable_tower_connector_lora: adapters of encoders cannot be loaded "
                "by encode instances, which hold no language model; remove it, and adapters "
                "change the language model alone, or leave encode out"
            )
        elif counts["encode"] and not any(counts[role] for role in TAKES_ITEMS):
            problem = (
                "no instance takes the items that encode instances encode: name prefill or "
                "prefill_decode, leave encode out, or set launch.join"
            )
        elif not any(counts[role] for role in ROLES if DUTIES[role] == "decode"):
            problem = (
                "no instance generates: name decode, prefill_decode or "
                "encode_prefill_decode, with a count of 1 or more"
            )
        elif prefill and not counts["decode"]:
            problem = (
                "prefill and encode_prefill instances compute for decode instances, and there are "
                "none: name decode, or prefill_decode or encode_prefill_decode in their place"
            )
        elif counts["decode"] and not prefill and self.secret_file is None:
            problem = (
                "no instance prefills for the decode instances: name prefill or encode_prefill, "
                "prefill_decode in place of decode, or set secret_file, by which prefill engines "
                "of other machines join"
            )
        if problem:
            raise ValueError(f"instances: {problem}")
        return self

    def _check_to_join(self, front: str) -> Topology:
        """Check a topology whose instances join fronts on other machines."""
        if self.secret_file is None:
            raise ValueError(f"launch.join {front}: set secret_file, a copy of that front's")
        counts = self.instances.counts
        if others := [
            group_of(role) for role in ROLES if DUTIES[role] == "decode" and counts[role]
        ]:
            raise ValueError(
                f"instances: {', '.join(others)} cannot join a front on another machine, only "
                "encode, prefill and encode_prefill can: start them with their front, or set "
                "their count to 0"
            )
        if not any(counts.values()):
            raise ValueError("instances: there is none to join launch.join; raise encode.count")
        return self
