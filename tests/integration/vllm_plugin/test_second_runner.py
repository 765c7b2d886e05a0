"""The hooks of vLLM's second model runner: as they are installed, and with our connector in them.

Its modules can be imported where Triton is missing, and its connector's part runs there; a whole
one runs in ``tests/npu_sim/e2e/test_second_runner.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd_portable.connector.producer import TransferOrder
from epd_portable.errors import EngineError
from epd_portable.runners.placer import WorkerOrders
from tests.npu_sim.hooks.classes import resolve
from tests.npu_sim.hooks.kinds import Attribute, Calls, Hook, Provides, Reaches

pytestmark = pytest.mark.needs_vllm

RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
ENCODE_RUNNER = "vllm.v1.worker.mm_encoder_model_runner:MMEncoderModelRunner"
HOOKING = "vllm.v1.worker.gpu.ec_connector:ActiveECConnector"
STATE = "vllm.v1.worker.gpu.model_states.default:DefaultModelState"
CACHE = "vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache"
OUTPUTS = "vllm.v1.outputs"


def reaches(caller: str, owner: str, ways: dict[str, tuple[str, ...]]) -> list[Hook]:
    return [
        Reaches(caller=caller, owner=owner, method=method, callee=callee)
        for method, callees in ways.items()
        for callee in callees
    ]


def attributes(caller: str, owner: str, names: tuple[str, ...]) -> list[Hook]:
    return [Attribute(caller=caller, owner=owner, attribute=name) for name in names]


ALWAYS: list[Hook] = [
    *reaches(
        "ec_connector.py: EncodeWorker, PDWorker",
        HOOKING,
        {
            "maybe_get_output": (
                "bind_connector_metadata",
                "start_load_caches",
                "save_caches",
                "get_finished",
                "clear_connector_metadata",
            ),
            # In steps without tokens as well.
            "no_forward": ("maybe_get_output",),
        },
    ),
    *reaches(
        "ec_connector.py: a PD instance's step",
        RUNNER,
        {"execute_model": ("maybe_get_output", "no_forward", "free_encoder_cache")},
    ),
    *attributes(
        "host.py: SecondRunnerHost",
        RUNNER,
        (
            "encoder_cache",
            "model_state",
            "ec_connector",
            "device",
            "lora_config",
            "kv_cache_config",
            "kv_caches",
            "model_memory_usage",
        ),
    ),
    *attributes("host.py: SecondRunnerHost", CACHE, ("mm_features", "encoder_outputs")),
    *attributes("compat.py: check_supported", "vllm.config:VllmConfig", ("use_v2_model_runner",)),
    Provides(
        caller="second.py: SecondRunnerMixin.load_model",
        owner=RUNNER,
        method="load_model",
        provider="GPUModelRunner",
    ),
    Calls(
        caller="second.py: SecondRunnerMixin.load_model",
        target=f"{STATE}.execute_mm_encoder",
        arguments=("self", "scheduled_encoder_inputs"),
    ),
    Calls(
        caller="second.py: SecondRunnerMixin.execute_model",
        target=f"{RUNNER}.execute_model",
        arguments=("self", "scheduler_output"),
    ),
    *(
        Calls(caller="encode_only.py: execute_model", target=target, arguments=arguments)
        for target, arguments in {
            f"{CACHE}.add_request": ("self", "req_id", "mm_features"),
            f"{CACHE}.remove_request": ("self", "req_id"),
            f"{CACHE}.free_encoder_cache": ("self", "mm_hash"),
            f"{HOOKING}.maybe_get_output": ("self", "scheduler_output"),
            f"{HOOKING}.no_forward": ("self", "scheduler_output"),
            f"{OUTPUTS}:make_empty_encoder_model_runner_output": ("scheduler_output",),
            f"{OUTPUTS}:ModelRunnerOutput.with_ec_conn_output": ("output", "report"),
        }.items()
    ),
    *attributes(
        "encode_only.py: execute_model",
        "vllm.v1.core.sched.output:SchedulerOutput",
        ("finished_req_ids", "free_encoder_mm_hashes", "scheduled_new_reqs"),
    ),
    *attributes(
        "encode_only.py: execute_model",
        "vllm.v1.core.sched.output:NewRequestData",
        ("req_id", "mm_features"),
    ),
]

BY_ITSELF: list[Hook] = reaches(
    "second.py: the encoder is traced", STATE, {"prepare_inputs_embeds": ("execute_mm_encoder",)}
)
ENCODE_ONLY: list[Hook] = [
    *reaches(
        "compat.py: encodes_only",
        ENCODE_RUNNER,
        {"execute_model": ("execute_mm_encoder", "maybe_get_output", "no_forward")},
    ),
    Calls(
        caller="second.py: SecondRunnerMixin.execute_model",
        target=f"{ENCODE_RUNNER}.execute_model",
        arguments=("self", "scheduler_output"),
    ),
]
STARTS_SAVES: list[Hook] = reaches(
    "ec_connector.py: EncodeWorker", HOOKING, {"maybe_get_output": ("start_save_caches",)}
)


def hooks() -> list[Hook]:
    """Return what is expected of the installed version."""
    from epd_portable.vllm_plugin import compat

    found = list(ALWAYS)
    if compat.version() >= compat.ENCODE_ONLY_RUNNER:
        found += BY_ITSELF + ENCODE_ONLY
    else:
        found += reaches(
            "second.py: the encoder is traced",
            STATE,
            {"get_mm_embeddings": ("execute_mm_encoder",)},
        )
        found += attributes("compat.py: encodes_only", RUNNER, ("is_encoder_only",))
    if compat.version() >= compat.STARTS_SAVES:
        found += STARTS_SAVES
    return found


def test_every_hook_is_there_as_our_code_uses_it() -> None:
    problems = {hook.title: hook.check() for hook in hooks()}
    assert {title: why for title, why in problems.items() if why is not None} == {}


class Host:
    """What the connector gives its work to, and a runner's step; notes who is called when."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.cache: dict[str, torch.Tensor] = {}
        self.progress = self

    def carry_out(self, orders: WorkerOrders, encoder_cache: dict[str, torch.Tensor]) -> None:
        assert encoder_cache is self.cache
        self.calls.append(("place", orders.computes))

    def submit(
        self, order: TransferOrder, output: torch.Tensor | None, *, restored: bool, missing: bool
    ) -> None:
        assert not restored
        assert not missing
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
    from vllm.v1.worker.gpu import ec_connector as theirs

    from epd_portable.vllm_plugin.ec_connector import EncodeWorker, PDWorker

    half: Any = EncodeWorker if encodes else PDWorker
    connector = half.__new__(half, None, None)
    connector._is_producer, connector._is_consumer = encodes, not encodes
    connector._connector_metadata = None
    connector._by_hooks = second
    connector._sender = connector._placer = host
    monkeypatch.setattr(theirs, "get_ec_transfer", lambda: connector)
    config: Any = None
    yield theirs.ActiveECConnector(config, host.cache)


def step(metadata: Any, tokens: int) -> Any:
    return SimpleNamespace(
        ec_connector_metadata=metadata, finished_req_ids=set(), total_num_scheduled_tokens=tokens
    )


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_step_of_the_second_runner_does_what_mixins_do_beside_the_first(
    hooking: Any, host: Host, encodes: bool, second: bool, tokens: int
) -> None:
    from epd_portable.vllm_plugin import compat
    from epd_portable.vllm_plugin.ec_connector import StepMetadata

    order: Any = SimpleNamespace(mm_hash="kept")
    host.cache["kept"] = torch.ones(2, 3)
    metadata = StepMetadata(
        orders=[order] if encodes else [],
        step=4 if tokens else 0,
        rests=not tokens,
        receipts=WorkerOrders(computes=tokens > 0),
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
        assert report is None or not report.finished_sending


def test_a_step_of_a_profile_concerns_nobody(hooking: Any, host: Host) -> None:
    with hooking.maybe_get_output(step(None, 5)) as report:
        pass
    assert (report, host.calls) == (None, [])


def test_only_a_whole_runner_gets_a_step_without_language_model() -> None:
    from epd_portable.vllm_plugin import compat, worker
    from epd_portable.vllm_plugin.encode_only import EncodeOnlyMixin

    whole = resolve(RUNNER)
    made = whole.__new__(whole)
    made.is_encoder_only = False  # What `compat.encodes_only` asks before 0.29.
    assert EncodeOnlyMixin in worker._second_mixins(made, encodes=True)
    assert EncodeOnlyMixin not in worker._second_mixins(made, encodes=False)
    own = whole
    if compat.version() >= compat.ENCODE_ONLY_RUNNER:
        own = resolve(ENCODE_RUNNER)
    by_itself = own.__new__(own)
    by_itself.is_encoder_only = True
    assert EncodeOnlyMixin not in worker._second_mixins(by_itself, encodes=True)


class Encoding:
    """What `EncodeOnlyMixin` needs of a runner, with vLLM's own cache and caller of the hooks."""

    lora_config: Any = None

    def __init__(self, hooking: Any, host: Host) -> None:
        self.encoder_cache = resolve(CACHE)()
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
    from epd_portable.vllm_plugin.ec_connector import StepMetadata
    from epd_portable.vllm_plugin.encode_only import EncodeOnlyMixin

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


def test_adapters_of_an_encoder_are_refused() -> None:
    from epd_portable.vllm_plugin.encode_only import EncodeOnlyMixin

    runner: Any = type("Runner", (EncodeOnlyMixin,), {"lora_config": "some"})()
    with pytest.raises(EngineError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        runner.initialize_kv_cache("config")
    runner.lora_config = None
    runner.initialize_kv_cache("config")
    assert (runner.kv_cache_config, runner.kv_caches) == ("config", [])
    assert (runner.get_kv_cache_spec(), runner.capture_model()) == ({}, 0)
