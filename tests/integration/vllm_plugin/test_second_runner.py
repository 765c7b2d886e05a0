"""The hooks of vLLM's second model runner: as they are installed, and with our connector in them.

Its modules can be imported where Triton is missing, and its connector's part runs there; a whole
one runs in ``tests/npu_sim/e2e/test_second_runner.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd_portable.encode.background import StepEncoder
from epd_portable.encode.host_copies import HostCopies
from epd_portable.encode.producer import TransferOrder
from epd_portable.encode.two_levels import HostOrders
from epd_portable.errors import EngineError
from epd_portable.items.output_sample import OutputSampler
from epd_portable.items.placer import EncodeOrder, WorkerOrders
from epd_portable.platforms import registry
from epd_portable.platforms.traits import TRAITS
from epd_portable.transfer.copies import DeviceCopies
from epd_portable.vllm_plugin import compat, worker
from epd_portable.vllm_plugin.ec_connector import EncodeWorker, PDWorker, WorkerConnector
from epd_portable.vllm_plugin.encode_only import EncodeOnlyMixin
from epd_portable.vllm_plugin.reports import StepMetadata

RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
ENCODE_RUNNER = "vllm.v1.worker.mm_encoder_model_runner:MMEncoderModelRunner"
CACHE = "vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache"


class Host:
    """Host of the connector, with a runner's step; records calls in their order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.cache: dict[str, torch.Tensor] = {}
        self.progress = self
        self.missing = False

    def not_encoded(self, mm_hash: str) -> None:
        self.calls.append(("not encoded", mm_hash))

    def carry_out(self, orders: WorkerOrders, encoder_cache: dict[str, torch.Tensor]) -> None:
        assert encoder_cache is self.cache
        self.calls.append(("place", orders.computes))

    def submit(
        self, order: TransferOrder, output: torch.Tensor | None, *, restored: bool, missing: bool
    ) -> None:
        assert missing or not restored
        self.missing = missing
        self.calls.append(("submit", order, output))

    def output_ready(self, mm_hash: str, output: torch.Tensor) -> None:
        assert output is self.cache[mm_hash]
        self.calls.append(("ready", mm_hash))

    def step_queued(self, step: int) -> None:
        self.calls.append(("queued", step))

    def take_computed(self) -> int | None:
        return 3

    def take_ended(self) -> set[str]:
        self.calls.append("ended")
        return {"transfer"}

    def rest(self, timeout_s: float) -> None:
        self.calls.append("rest")


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture(params=[True, False], ids=["second", "first"])
def second(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[True, False], ids=["encode", "prefill_decode"])
def encodes(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def hooking(
    host: Host, encodes: bool, second: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """vLLM's own caller of the hooks, with our connector."""
    if compat.version() < compat.SECOND_RUNNER:
        pytest.skip("this vLLM's second runner calls no hooks")
    from vllm.v1.worker.gpu import ec_connector as theirs

    half: Any = EncodeWorker if encodes else PDWorker
    connector = half.__new__(half, None, None)
    connector._is_producer, connector._is_consumer = encodes, not encodes
    connector._connector_metadata = None
    connector._by_hooks = second
    connector._placer = host
    if encodes:
        connector._sender = host
    else:
        connector._rank, connector._sampler = 0, OutputSampler(0)
        connector.encoder = StepEncoder(lambda item: torch.full((1, 3), 7.0))
    connector._missing, connector._unreported = set(), set()
    connector._config = SimpleNamespace(can_encode=True)
    monkeypatch.setattr(theirs, "get_ec_transfer", lambda: connector)
    config: Any = None
    yield theirs.ActiveECConnector(config, host.cache)


def step(metadata: Any, tokens: int) -> Any:
    return SimpleNamespace(
        ec_connector_metadata=metadata, finished_req_ids=set(), total_num_scheduled_tokens=tokens
    )


@pytest.mark.parametrize("tokens", [0, 5])
def test_second_runner_step_equals_the_first_with_mixins(
    hooking: Any, host: Host, encodes: bool, second: bool, tokens: int
) -> None:
    order: Any = SimpleNamespace(mm_hash="kept")
    host.cache["kept"] = torch.ones(2, 3)
    metadata = StepMetadata(
        orders=[order] if encodes else [],
        step=4 if tokens else 0,
        rests=not tokens,
        receipts=WorkerOrders(
            encodings=[EncodeOrder(mm_hash="other", modality="image", media=None)],
            computes=tokens > 0,
        ),
    )
    scheduled = step(metadata, tokens)
    if tokens:
        with hooking.maybe_get_output(scheduled) as report:
            host.calls.append("model")
            if encodes:
                host.cache["new"] = torch.zeros(2, 3)
    else:
        report = hooking.no_forward(scheduled).ec_connector_output
    model = ["model"] if tokens else []
    saved = [("ready", "new")] if encodes and tokens else []
    if not second:
        assert host.calls == [*model, *saved], "the mixins of the first do the rest"
        assert report is None or report.is_empty()
    elif encodes:
        submitted: list[Any] = [("submit", order, host.cache["kept"])]
        if not tokens:
            submitted.append("rest")
        queued = [("queued", 4)] if tokens else []
        if compat.version() < compat.STARTS_SAVES:
            submitted, queued = [], []  # `OrderingSecondRunnerMixin` does.
        assert host.calls == [*submitted, *model, *saved, *queued, "ended"]
        assert report.finished_sending == {"transfer"}
        assert report.finished_recving == {"computed: 3"}
    else:
        assert host.calls == [("place", tokens > 0), *model]
        assert not report.finished_sending
        assert report.finished_recving == {"encoded: other"}
        assert host.cache["other"].tolist() == [[7.0] * 3]


def test_encoder_without_memory_leaves_items_to_consumers(
    hooking: Any, host: Host, encodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerConnector, "trace", lambda *_, **__: None)
    connector = hooking.ec_connector
    error = nullcontext() if encodes else pytest.raises(torch.OutOfMemoryError)
    with error, connector.encoding(["cat"]):
        raise torch.OutOfMemoryError
    if not encodes:
        return
    assert host.calls == [("not encoded", "cat")]
    order: Any = SimpleNamespace(mm_hash="cat")
    for missing in (True, False):
        connector.begin_step(StepMetadata(orders=[order]), host.cache)
        assert host.missing == missing
        _, report = connector._take_ended()
        assert report == ({"computed: 3", "missing: cat"} if missing else {"computed: 3"})
        host.cache["cat"] = torch.ones(2, 3)
        connector.save_caches(host.cache, "cat")


@pytest.mark.parametrize("encodes", [True])
def test_failed_restore_is_missing_until_reported_or_encoded(hooking: Any, host: Host) -> None:
    connector = hooking.ec_connector
    connector._copies = HostCopies(DeviceCopies(registry.get("cpu"), 0))
    order: Any = SimpleNamespace(mm_hash="cat")

    def is_missing(**copies: list[str]) -> bool:
        connector.begin_step(StepMetadata(orders=[order], copies=HostOrders(**copies)), host.cache)
        return host.missing

    assert is_missing(restored=["cat"])
    assert connector._take_ended()[1] == {"computed: 3", "missing: cat"}
    assert is_missing()
    assert not is_missing(dropped=["cat"])
    assert is_missing(restored=["cat"], dropped=["cat"]), "it does not know yet"
    host.cache["cat"] = torch.ones(2, 3)
    connector.save_caches(host.cache, "cat")
    assert not is_missing()
    connector._copies.close()


@pytest.mark.parametrize("encodes", [False])
def test_an_instance_without_encoder_encodes_nothing(hooking: Any) -> None:
    hooking.ec_connector._config = SimpleNamespace(can_encode=False, instance="pd-0")
    with pytest.raises(EngineError, match="cat"), hooking.ec_connector.encoding(["cat"]):
        raise AssertionError


def test_a_step_of_a_profile_concerns_nobody(hooking: Any, host: Host) -> None:
    with hooking.maybe_get_output(step(None, 5)) as report:
        pass
    assert (report, host.calls) == (None, [])


def test_only_a_whole_runner_gets_a_step_without_language_model() -> None:
    whole = resolve_name(RUNNER)
    made = whole.__new__(whole)
    made.is_encoder_only = False  # What `compat.encodes_only` asks before 0.29.
    assert EncodeOnlyMixin in worker._second_mixins(made, encodes=True)
    assert EncodeOnlyMixin not in worker._second_mixins(made, encodes=False)
    own = whole
    if compat.version() >= compat.ENCODE_ONLY_RUNNER:
        own = resolve_name(ENCODE_RUNNER)
    by_itself = own.__new__(own)
    by_itself.is_encoder_only = True
    assert EncodeOnlyMixin not in worker._second_mixins(by_itself, encodes=True)


class Moment:
    """Part of a device's event that the host uses."""

    def __init__(self, calls: list[str]) -> None:
        self.record = lambda: calls.append("record")
        self.synchronize = lambda: calls.append("wait")


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_step_without_tokens_does_not_wait_for_the_encoder(tokens: int) -> None:
    """An encode instance would look at no request while its tower runs."""
    if compat.version() < compat.ENCODE_ONLY_RUNNER:
        pytest.skip("this vLLM has no runner without language model")
    own = resolve_name(ENCODE_RUNNER)
    if not hasattr(own, "input_tensor_semaphore"):
        pytest.skip("this vLLM's encode runner does not wait")
    calls: list[str] = []

    class Prepared(Exception):
        pass

    def prepare_inputs(*args: Any, **kwargs: Any) -> None:
        calls.append("inputs")
        raise Prepared

    mixins = worker._second_mixins(own.__new__(own), encodes=True)
    nothing = lambda *args, **kwargs: None  # noqa: E731 - many names
    steps = "update_pp_decode_requests finish_requests free_states add_requests update_requests"
    runner: Any = object.__new__(
        type("Runner", (*mixins, own), dict.fromkeys(steps.split(), nothing))
    )
    runner.block_tables = SimpleNamespace(apply_staged_writes=nothing)
    runner._input_events, runner._input_event_idx = [Moment(calls)], 0
    runner.gather_batch_req_state = lambda *args: (SimpleNamespace(num_tokens=5, num_reqs=1), None)
    runner.prepare_inputs = prepare_inputs
    runner._no_forward = lambda output: "nothing"
    scheduled = SimpleNamespace(total_num_scheduled_tokens=tokens, ec_connector_metadata=None)
    if tokens:
        with pytest.raises(Prepared):
            runner.execute_model(scheduled)
        assert calls == ["wait", "inputs", "record"]
    else:
        assert runner.execute_model(scheduled) == "nothing"
        assert calls == []


class Encoding:
    """Part of a runner that `EncodeOnlyMixin` needs, with vLLM's cache and caller of the hooks."""

    lora_config: Any = None

    def __init__(self, hooking: Any, host: Host) -> None:
        self.encoder_cache = resolve_name(CACHE)()
        self.encoder_cache.encoder_outputs = host.cache
        self.ec_connector = hooking
        self.model_state = SimpleNamespace(execute_mm_encoder=self._encode)

    def _encode(self, inputs: dict[str, list[int]]) -> None:
        for request_id, input_ids in inputs.items():
            for input_id in input_ids:
                name = self.encoder_cache.mm_features[request_id][input_id]
                self.encoder_cache.encoder_outputs[name] = torch.zeros(2, 3)


@pytest.mark.parametrize("encodes", [True], indirect=True, ids=["encode"])
@pytest.mark.parametrize("second", [True], indirect=True, ids=["second"])
def test_a_step_without_language_model_encodes_what_it_was_told(
    hooking: Any, host: Host, encodes: bool, second: bool
) -> None:
    runner: Any = type("Runner", (EncodeOnlyMixin, Encoding), {})(hooking, host)

    def run(tokens: int, new: list[Any], freed: list[str], finished: set[str]) -> Any:
        return runner.execute_model(
            SimpleNamespace(
                ec_connector_metadata=StepMetadata(),
                finished_req_ids=finished,
                free_encoder_mm_hashes=freed,
                scheduled_new_reqs=new,
                total_num_scheduled_tokens=tokens,
                num_scheduled_tokens={"a": tokens} if tokens else {},
                scheduled_encoder_inputs={"a": [1]} if tokens else {},
            )
        )

    output = run(5, [SimpleNamespace(req_id="a", mm_features=["x", "y"])], [], set())
    assert list(host.cache) == ["y"]
    assert ("ready", "y") in host.calls
    assert (output.req_ids, output.sampled_token_ids) == (["a"], [[]])
    assert output.ec_connector_output.finished_sending == {"transfer"}
    output = run(0, [], ["y"], {"a"})
    assert (host.cache, runner.encoder_cache.mm_features) == ({}, {})
    assert output.ec_connector_output.finished_sending == {"transfer"}
    assert output.req_ids == []


class WorkerOfPlatform:
    """A platform's worker, which chooses the runner `chosen`."""

    chosen: Any
    rank = 0
    vllm_config = SimpleNamespace(use_v2_model_runner=True)

    def init_device(self) -> None:
        self.model_runner = self.chosen.__new__(self.chosen)
        self.model_runner.device = torch.device("cpu")


@pytest.fixture
def started(hooking: Any, host: Host, monkeypatch: pytest.MonkeyPatch) -> Callable[[type], Any]:
    """Return what makes the model runner of an instance whose platform chooses a class."""
    path = f"{worker.__name__}.EPDWorkerOfPlatform"
    base = f"{__name__}:{WorkerOfPlatform.__name__}"
    traits = replace(TRAITS["npu"], worker_cls=path, worker_base=base)
    monkeypatch.setattr(worker, "TRAITS", {"npu": traits})
    monkeypatch.setattr(worker, "get_ec_transfer", lambda: hooking.ec_connector)
    monkeypatch.setattr(type(hooking.ec_connector), "open_worker", lambda *_: 0)
    monkeypatch.setattr(type(hooking.ec_connector), "trace", lambda *_, **__: None)

    def start(chosen: type) -> Any:
        monkeypatch.setattr(WorkerOfPlatform, "chosen", chosen, raising=False)
        monkeypatch.delattr(worker, "EPDWorkerOfPlatform", raising=False)
        made = worker.EPDWorkerOfPlatform()
        made.init_device()
        runner = made.model_runner
        runner.lora_config = None
        runner.encoder_cache = resolve_name(CACHE)()
        runner.encoder_cache.encoder_outputs = host.cache
        runner.ec_connector = hooking
        runner.model_state = SimpleNamespace(
            execute_mm_encoder=lambda inputs: host.cache.update(y=torch.zeros(2, 3))
        )
        return runner

    return start


def of_platform(name: str, base: type) -> type:
    """Return a platform's runner, named as vllm-ascend names its own; its buffers want KV."""

    def initialize_kv_cache(self: Any, kv_cache_config: Any) -> None:
        raise IndexError("block tables of no KV cache")

    whole = resolve_name(RUNNER)
    body = {"initialize_kv_cache": initialize_kv_cache}
    bases = (whole,) if base is whole else (base, type("NPUModelRunner", (whole,), body))
    return type(name, bases, body if base is whole else {})


@pytest.mark.parametrize("encodes", [True], indirect=True, ids=["encode"])
@pytest.mark.parametrize("second", [True], indirect=True, ids=["second"])
@pytest.mark.parametrize("name", ["NPUModelRunner", "NPUEncoderModelRunner"])
def test_platforms_runner_encodes_without_kv_cache(
    started: Callable[[type], Any], host: Host, encodes: bool, second: bool, name: str
) -> None:
    base = resolve_name(RUNNER)
    if "Encoder" in name:
        if compat.version() < compat.ENCODE_ONLY_RUNNER:
            pytest.skip("this vLLM has no runner without language model")
        base = resolve_name(ENCODE_RUNNER)
    runner = started(of_platform(name, base))
    runner.initialize_kv_cache("none")
    output = runner.execute_model(
        SimpleNamespace(
            ec_connector_metadata=StepMetadata(),
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
            scheduled_new_reqs=[],
            total_num_scheduled_tokens=5,
            num_scheduled_tokens={"a": 5},
            scheduled_encoder_inputs={},
        )
    )
    assert ("ready", "y") in host.calls
    assert output.ec_connector_output.finished_sending == {"transfer"}


@pytest.mark.parametrize("encodes", [True], indirect=True, ids=["encode"])
@pytest.mark.parametrize("second", [True], indirect=True, ids=["second"])
def test_runner_of_unknown_kind_is_refused(
    started: Callable[[type], Any], encodes: bool, second: bool
) -> None:
    unknown = type("NPUEncoderModelRunner", (), {"device": None})
    with pytest.raises(EngineError, match=r"NPUEncoderModelRunner.*VLLM_USE_V2_MODEL_RUNNER=0"):
        started(unknown)


def test_adapters_of_an_encoder_are_refused() -> None:
    runner: Any = type("Runner", (EncodeOnlyMixin,), {"lora_config": "some"})()
    with pytest.raises(EngineError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        runner.initialize_kv_cache("config")
    runner.lora_config = None
    runner.initialize_kv_cache("config")
    assert (runner.kv_cache_config, runner.kv_caches) == ("config", [])
    assert (runner.get_kv_cache_spec(), runner.capture_model()) == ({}, 0)
