"""Messages between scheduler and workers about a step, as vLLM carries them.

vLLM's ``ECConnectorOutput`` has two sets of names in all versions (0.26 to 0.33).
``finished_sending`` holds the transfers that have ended. ``finished_recving`` is free, because the
scheduler knows of received items before the workers do: it holds all else, each name behind what is
reported of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from epd_portable.encode.producer import TransferOrder
from epd_portable.encode.two_levels import HostOrders
from epd_portable.items.placer import WorkerOrders

Kind = Literal["space", "computed", "copy lost", "missing", "encoded", "not encoded", "sample"]
"""Kinds of reports. Of an encode instance: the bytes that its encoder cache may fill, once; the
last step that its device has computed; and missing copies that its scheduler counts on, see
`TwoLevelCache.take_report`. Of a PD instance: items that were encoded in addition to those of a
step, or could not be; both where ranks differ, whose reports vLLM joins. And samples of encoder
outputs, see `OutputSampler`."""


def to_names(report: Mapping[Kind, Iterable[str]]) -> set[str]:
    """Return a report as ``finished_recving``."""
    return {f"{kind}: {name}" for kind, names in report.items() for name in names}


def from_names(names: Iterable[str] | None) -> dict[Kind, set[str]]:
    """Return the report that `to_names` wrote."""
    report: dict[Kind, set[str]] = defaultdict(set)
    for each in names or ():
        kind, _, name = each.partition(": ")
        report[kind].add(name)  # type: ignore[index]
    return report


@dataclass(frozen=True, kw_only=True)
class ItemMedia:
    """The media of a request's item that a step encodes, where workers have the item without.

    Attributes:
        request_id: Of a request that workers know from a step before.
        index: Of the item in the request.
        data: vLLM's ``MultiModalKwargsItem``.
    """

    request_id: str
    index: int
    data: Any

    def put(self, features: list[Any]) -> None:
        """Put it into the request's features that a model runner has."""
        features[self.index] = replace(features[self.index], data=self.data)


@dataclass
class StepMetadata(ECConnectorMetadata):
    """Message of the scheduler half to the worker half with each step.

    Attributes:
        orders: Transfers to others: on an encode instance their items got space in this step,
            elsewhere they are encoded.
        preempted: Encode instance: transfers that end unless their consumers have space.
        step: Encode instance on a device: the number of a step that computes, from 1; 0 otherwise.
        rests: Encode instance: there is nothing to do until a transfer has ended, or a step is
            computed.
        copies: Encode instance: what becomes of the copies in host memory.
        receipts: PD instance: items that have arrived, grants that were taken back.
        media: PD instance: media of items that the step encodes, which workers do not have.
        samples: PD instance: items of whose outputs a step with tokens reports a sample.
        encodes: PD instance: the step has no tokens, and workers encode an item next to steps.
    """

    orders: list[TransferOrder] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    step: int = 0
    rests: bool = False
    copies: HostOrders = field(default_factory=HostOrders)
    receipts: WorkerOrders = field(default_factory=WorkerOrders)
    media: list[ItemMedia] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    encodes: bool = False
