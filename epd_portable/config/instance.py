"""Settings that the launcher passes to the connector of an engine instance.

It travels as vLLM's ``ec_connector_extra_config``, so it holds plain JSON values only.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epd_portable.config.problems import in_one_line
from epd_portable.config.store import StoreSection
from epd_portable.errors import ConfigError

PlatformName = Literal["cuda", "npu", "cpu"]
"""Platforms, described by `epd_portable.platforms.traits`."""
PLATFORMS: tuple[PlatformName, ...] = get_args(PlatformName)

PathName = Literal["auto", "ipc", "shm", "nixl", "collective", "tcp"]
"""``auto``, or a transfer path, described by `epd_portable.transfer.registry`."""
AUTO = "auto"
PATH_NAMES: tuple[str, ...] = get_args(PathName)[1:]

EncodePriority = Literal["tokens", "balanced", "images"]
"""Preference of an engine that encodes and generates, see `Topology.encode_priority`."""

_OF_FEW = (
    *("store", "host_cache_bytes", "max_queued_items", "max_queued_bytes"),
    *("encode_priority", "overlaps"),
)


class InstanceConfig(BaseModel):
    """An instance as its connector sees it.

    Attributes:
        instance: Name, for example ``encode-0`` or ``prefill_decode-0``.
        device_index: First device of the instance among those visible to it.
        control_address: ZMQ address of the PD instance's control channel; empty on encode.
        data_address: ZMQ address where a PD instance receives bytes by ``tcp``; empty on encode.
        pool: Name of the PD instance's receive pool in ``/dev/shm``; empty on encode.
        path: Transfer path requested, or ``auto``.
        wait_timeout_s: Longest wait of a request for one item.
        lease_s: Longest time from a grant to the end of its write.
        host: Address of this machine on which a PD instance listens.
        secret_file: File with the secret of the deployment or of the launcher's run; without one
            the instance does not start.
        trusted_network: Items may leave the host unencrypted, by paths that cannot encrypt.
        can_encode: Whether the PD instance holds the vision tower and may encode locally.
        encode_priority: What the PD instance prefers while it encodes between or next to its steps.
        overlaps: Encoding is a duty of its role: on a device it encodes next to its steps.
        host_cache_bytes: Of an encode instance: host memory for copies of encoder outputs.
        max_queued_items: Media items that it has queued or in work for others.
        store: Where encoder outputs are kept beyond instances; ``None`` for nowhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance: str = Field(min_length=1)
    platform: PlatformName
    device_index: int = Field(default=0, ge=0)
    control_address: str = ""
    data_address: str = ""
    pool: str = ""
    pool_bytes: int = Field(default=0, ge=0)
    path: str = AUTO
    wait_timeout_s: float = Field(default=30.0, gt=0)
    lease_s: float = Field(default=10.0, gt=0)
    host: str = "127.0.0.1"
    secret_file: str = ""
    trusted_network: bool = False
    can_encode: bool = True
    encode_priority: EncodePriority = "balanced"
    overlaps: bool = False
    host_cache_bytes: int = Field(default=0, ge=0)
    max_queued_items: int = Field(default=256, ge=1)
    max_queued_bytes: int = Field(default=512 << 20, ge=1)
    store: StoreSection | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values that `parse` reads, without defaults that few instances need."""
        fields = type(self).model_fields
        return self.model_dump(
            exclude={name for name in _OF_FEW if getattr(self, name) == fields[name].default}
        )

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> InstanceConfig:
        """Read the dictionary that the engine hands over.

        Raises:
            ConfigError: Names every wrong or missing key.
        """
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise ConfigError(f"ec_connector_extra_config: {in_one_line(error)}") from error
