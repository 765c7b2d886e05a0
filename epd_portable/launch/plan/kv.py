"""vLLM's KV connector between prefill and decode instances: which one, and its settings. Pure.

NIXL's is released with vLLM, Mooncake's with vllm-ascend. Both return ``kv_transfer_params`` at the
prefill instance, which the decode instance takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import JsonValue

from epd_portable.config.groups import InstanceGroup
from epd_portable.config.roles import ROLES, SENDS_KV, TAKES_KV, Role
from epd_portable.config.schema import Topology
from epd_portable.errors import ConfigError
from epd_portable.platforms.traits import PlatformTraits
from epd_portable.transfer.curve import is_off_host


@dataclass(frozen=True, kw_only=True, slots=True)
class KVConnector:
    """A KV connector of vLLM.

    Attributes:
        cls: vLLM's name of it.
        module: Must be importable where instances run.
        port_each_rank: Whether each rank listens on a port of its own, in a row; otherwise the
            instance on one.
    """

    name: str
    cls: str
    module: str
    install: str
    port_each_rank: bool

    def ports(self, ranks: int, free_port: Callable[[], int]) -> dict[str, int]:
        """Return the ports of an instance, the first of a row as ``kv``."""
        row = [free_port()]
        while len(row) < (ranks if self.port_each_rank else 1):
            port = free_port()
            row = [*row, port] if port == row[-1] + 1 else [port]
        return {f"kv{index or ''}": port for index, port in enumerate(row)}

    def arguments(self, topology: Topology, role: Role, port: int) -> dict[str, JsonValue]:
        """Return vLLM's arguments; blocks that cannot be read are computed again at decode."""
        config: dict[str, JsonValue] = {
            "kv_connector": self.cls,
            "kv_role": "kv_producer" if role in SENDS_KV else "kv_consumer",
            "kv_load_failure_policy": "recompute",
        }
        if self.port_each_rank:
            decode = topology.instances.decode.tensor_parallel_size
            # Instances on other hosts are not known here.
            sends = next((group.tensor_parallel_size for group in _senders(topology)), decode)
            config["kv_port"] = port
            config["kv_connector_extra_config"] = {
                "prefill": {"dp_size": 1, "tp_size": sends},
                "decode": {"dp_size": 1, "tp_size": decode},
            }
        return {"kv_transfer_config": config}

    def env(self, host: str, port: int) -> dict[str, str]:
        """Return the variables that it reads; others reach the instance at ``host``."""
        if self.port_each_rank:
            return {"VLLM_HOST_IP": host}
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}


KV_CONNECTORS = {
    "nixl": KVConnector(
        name="nixl",
        cls="NixlConnector",
        module="nixl",
        install="pip install epd-portable[kv]",
        port_each_rank=False,
    ),
    "mooncake": KVConnector(
        name="mooncake",
        cls="MooncakeConnectorV1",
        module="mooncake",
        install="pip install mooncake-transfer-engine-npu",
        port_each_rank=True,
    ),
}


def kv_connector(topology: Topology, traits: PlatformTraits) -> KVConnector | None:
    """Return the platform's connector, or ``None`` where prefill and decode are not split.

    Raises:
        ConfigError: Its instances, or their network, do not suit it.
    """
    if not any(topology.instances.of(role).count for role in SENDS_KV | TAKES_KV):
        return None
    connector = KV_CONNECTORS[traits.kv_connector]
    # Read rank by rank.
    ranks = [group.tensor_parallel_size for group in _senders(topology)]
    wanted = topology.instances.decode.tensor_parallel_size
    fit = len(set(ranks)) <= 1 and all(each >= wanted for each in ranks)
    if connector.port_each_rank and not fit:
        found = " and ".join(map(str, ranks))
        raise ConfigError(
            f"instances: tensor_parallel_size of those that prefill is {found}, and of decode "
            f"{wanted}: {connector.cls} needs one and the same of all that prefill, as large as "
            "that of decode or larger"
        )
    host = topology.launch.host
    if is_off_host(host) and not topology.transfer.trusted_network:
        raise ConfigError(
            f"launch.host {host} is not the loopback address, and {connector.cls} neither encrypts "
            "nor authenticates readers: set transfer.trusted_network if that network is private"
        )
    return connector


def _senders(topology: Topology) -> list[InstanceGroup]:
    groups = (topology.instances.of(role) for role in ROLES if role in SENDS_KV)
    return [group for group in groups if group.count]
