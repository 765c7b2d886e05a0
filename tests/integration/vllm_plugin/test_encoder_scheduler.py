"""The encode instance's scheduler over vLLM's real one; no engine, and outputs without content.

A step computes, and the encoder cache holds, 1024 embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ECConnectorOutput, make_empty_encoder_model_runner_output
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from epd_portable.config.instance import InstanceConfig
from epd_portable.demo import MODEL_DIR
from epd_portable.launch.plan.engine import CONNECTOR, ROLE_ARGS, SCHEDULER_CLS
from epd_portable.vllm_plugin import encoder_scheduler
from epd_portable.vllm_plugin.reports import to_names
from epd_portable.vllm_plugin.scheduler import make_scheduler
from epd_portable.wire.params import to_params
from tests.keyring import secret, secret_file
from tests.unit.builders import encode_params

LIMIT = 1024


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    return config_on("cpu")


def config_on(platform: str, **instance: Any) -> Any:
    """Return the configuration of an encode instance there."""
    config = EngineArgs(
        model=str(MODEL_DIR),
        max_model_len=4096,
        max_num_batched_tokens=LIMIT,
        dtype="float32",
        enforce_eager=True,
        limit_mm_per_prompt={"video": 0},
        scheduler_cls=SCHEDULER_CLS,
        ec_transfer_config={
            **CONNECTOR,
            "ec_role": "ec_producer",
            "ec_connector_extra_config": InstanceConfig(
                instance="encode-0", platform=platform, secret_file=secret_file(), **instance
            ).model_dump(),
        },
        **ROLE_ARGS["encode"],
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 1
    return config


class Engine:
    """Steps a scheduler as vLLM's engine core does; nothing is computed."""

    def __init__(self, config: Any) -> None:
        # As the engine core does for a model without KV cache.
        config.scheduler_config.enable_chunked_prefill = False
        self.scheduler = make_scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=16,
            log_stats=False,
        )
        self.cache = self.scheduler.encoder_cache_manager
        self.sending: list[str] = []
        self.rests = False
        self.number = 0
        self.copies: Any = None
        self.preempted: list[str] = []
        self.ended: dict[str, str] = {}

    def arrive(
        self, request_id: str, *items: tuple[str, int], text: int = 2, to: str = "tcp://pd"
    ) -> None:
        """Add a request for one consumer: each item stands behind some tokens of text."""
        features, offset = [], text
        for mm_hash, size in items:
            place = PlaceholderRange(offset=offset, length=size)
            features.append(
                MultiModalFeatureSpec(
                    data=None, modality="image", identifier=mm_hash, mm_position=place
                )
            )
            offset += size + text
        transfers = {f"{mm_hash} to {request_id}": mm_hash for mm_hash, _ in items}
        params = to_params(encode_params(transfers, to, secret()))
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=[1] * offset,
                sampling_params=SamplingParams(
                    max_tokens=1, extra_args={"ec_transfer_params": params}
                ),
                pooling_params=None,
                mm_features=features,
            )
        )

    def step(
        self,
        *transferred: str,
        computed: int | None = None,
        lost: str = "",
        missing: str = "",
        room_bytes: int = 0,
    ) -> dict[str, list[str]]:
        """Run one step; return the items that each request has encoded in it.

        Args:
            transferred: Transfers whose end the worker reports with it.
            computed: The last step that is, as the worker reports with it.
            lost: Item of whose copy the worker reports with it that it could not be made.
            missing: Item of which it reports that it is not there.
            room_bytes: What it reports that the encoder cache may fill.
        """
        planned = self.scheduler.schedule()
        self.rests = planned.ec_connector_metadata.rests
        self.number = planned.ec_connector_metadata.step
        self.copies = planned.ec_connector_metadata.copies
        self.preempted += planned.ec_connector_metadata.preempted
        self.sending += [order.transfer_id for order in planned.ec_connector_metadata.orders]
        encoded = {
            request_id: [
                self.scheduler.requests[request_id].mm_features[index].identifier
                for index in indices
            ]
            for request_id, indices in planned.scheduled_encoder_inputs.items()
        }
        output = make_empty_encoder_model_runner_output(planned)
        if not planned.num_scheduled_tokens:
            # The empty output is one object for everybody.
            output = type(output)(req_ids=[], req_id_to_index={})
        output.ec_connector_output = ECConnectorOutput(
            finished_sending=set(transferred),
            finished_recving=to_names(
                {
                    "computed": () if computed is None else (str(computed),),
                    "space": (str(room_bytes),) if room_bytes else (),
                    "copy lost": (lost,) if lost else (),
                    "missing": (missing,) if missing else (),
                }
            ),
        )
        for outputs in self.scheduler.update_from_output(planned, output).values():
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self.ended[each.request_id] = str(each.finish_reason)
        return encoded

    def empty(self) -> bool:
        return (
            not self.scheduler.has_requests()
            and self.cache.num_freeable_slots == self.cache.cache_size
        )


@pytest.fixture
def engine(vllm_config: Any) -> Iterator[Engine]:
    made = Engine(vllm_config)
    assert made.cache.cache_size == made.scheduler.max_num_encoder_input_tokens == LIMIT
    yield made
    made.scheduler.shutdown()


def test_requests_are_encoded_whole_as_transfers_free_space(engine: Engine) -> None:
    engine.arrive("a", ("cat", 300), ("dog", 300))
    engine.arrive("b", ("emu", 300), ("fox", 300))
    engine.arrive("c", ("gnu", 10))
    assert engine.step() == {"a": ["cat", "dog"]}
    assert set(engine.ended) == {"a"}, "it is finished although nothing is transferred"
    assert engine.step() == {}
    assert engine.step("cat to a") == {}
    assert engine.step() == {"b": ["emu", "fox"]}
    assert engine.step() == {"c": ["gnu"]}, "more are no faster together, and b's would leave later"
    assert set(engine.ended) == {"a", "b", "c"}
    assert not engine.empty()
    engine.step(*(transfer for transfer in engine.sending if transfer != "cat to a"))
    assert engine.empty()


def test_items_stay_in_the_memory_that_the_worker_has_for_them(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "epd_portable")
    embedding = engine.scheduler.vllm_config.model_config.get_inputs_embeds_size() * 4
    engine.arrive("a", ("cat", 600))
    assert engine.step(room_bytes=4 * LIMIT * embedding) == {"a": ["cat"]}
    assert engine.cache.cache_size == 4 * LIMIT
    assert "4096 embeddings of" in caplog.text
    for name in ("dog", "emu", "fox"):
        engine.arrive(name, (name, 900))
        assert engine.step() == {name: [name]}, "no end of a transfer is waited for"
    engine.arrive("again", ("cat", 600))
    assert engine.step() == {}, "it is there after 2700 embeddings, which are more than vLLM keeps"
    assert engine.ended.keys() == {"a", "dog", "emu", "fox", "again"}
    engine.arrive("large", ("gnu", LIMIT + 1))
    assert engine.step() == {}
    assert "a step of this encode instance computes 1024" in caplog.text
    engine.step(*engine.sending, room_bytes=embedding)
    assert engine.cache.cache_size == 4 * LIMIT, "it never becomes smaller"
    assert engine.empty()


@pytest.mark.parametrize("name", ["cat", "7"])
def test_an_item_whose_copy_is_lost_is_encoded_again(name: str) -> None:
    engine = Engine(config_on("npu", host_cache_bytes=1 << 30))
    engine.arrive("a", (name, 600))
    assert engine.step() == {"a": [name]}
    engine.step(f"{name} to a", computed=1, lost=name)
    engine.arrive("again", (name, 600))
    assert engine.step() == {}, "it is in the first level"
    engine.arrive("b", ("dog", 600))
    engine.step(f"{name} to again", computed=2)
    assert engine.step() == {"b": ["dog"]}
    engine.arrive("c", (name, 600))
    engine.step("dog to b", computed=3)
    assert engine.step() == {"c": [name]}
    engine.step(f"{name} to c", computed=4)
    assert engine.ended.keys() == {"a", "again", "b", "c"}
    assert engine.empty()
    engine.scheduler.shutdown()


def test_item_is_encoded_at_next_request_after_failed_restore() -> None:
    engine = Engine(config_on("cpu", host_cache_bytes=1 << 30))
    for name in ("cat", "dog"):
        engine.arrive(name, (name, 600))
        assert engine.step() == {name: [name]}
        engine.step(f"{name} to {name}")
    engine.arrive("a", ("cat", 600))
    assert engine.step() == {}
    assert engine.copies.restored == ["cat"]
    engine.arrive("b", ("cat", 600))
    assert engine.step(missing="cat") == {}
    assert engine.cache.num_freeable_slots == engine.cache.cache_size, "nothing is there"
    engine.arrive("c", ("cat", 600))
    assert engine.step("cat to a", "cat to b") == {"c": ["cat"]}
    assert engine.copies.dropped == engine.copies.kept == ["cat"]
    engine.step("cat to c")
    assert engine.ended.keys() == {"cat", "dog", "a", "b", "c"}
    assert engine.empty()
    engine.scheduler.shutdown()


def test_idle_engine_rests_and_reads_ended_transfers_later(engine: Engine) -> None:
    engine.arrive("a", ("cat", 600))
    assert engine.step() == {"a": ["cat"]}
    engine.step()
    assert not engine.rests, "nobody waits"
    assert not engine.scheduler.has_requests(), "it would step every millisecond"
    assert engine.cache.holders("cat") == {"cat to a"}
    engine.arrive("b", ("dog", 600))
    assert engine.step("cat to a") == {}
    assert engine.rests, "b waits for room"
    assert engine.step() == {"b": ["dog"]}
    assert not engine.rests
    engine.step("dog to b")
    assert engine.empty()


def test_outputs_are_preempted_after_a_tenth_of_the_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(encoder_scheduler, "time", SimpleNamespace(monotonic=lambda: now_s))
    engine.arrive("a", ("cat", 600))
    engine.arrive("b", ("dog", 400))
    assert [*engine.step(), *engine.step()] == ["a", "b"]
    engine.arrive("c", ("emu", 300))
    for now_s in (1000.0, 1002.9, 1003.0, 1003.1):
        assert engine.step() == {}
        assert engine.preempted == (["dog to b"] if now_s >= 1003.0 else [])
    engine.step("dog to b")
    assert engine.step() == {"c": ["emu"]}


def test_repeated_transfer_is_sent_when_its_end_is_reported(engine: Engine) -> None:
    engine.arrive("a", ("cat", 600))
    engine.step()
    engine.arrive("a", ("cat", 600))
    assert engine.step() == {} and engine.sending == ["cat to a"]
    engine.step("cat to a")
    engine.step()
    assert engine.sending == ["cat to a", "cat to a"]


def test_consumer_without_transfers_leaves_the_others_share(engine: Engine) -> None:
    for number in range(5):
        engine.arrive(f"a{number}", (f"orphan-{number}", 200), to="tcp://a")
    engine.arrive("b0", ("cat", 200), to="tcp://b")
    assert [*engine.step(), *engine.step(), *engine.step()] == ["a0", "a1", "b0"]
    engine.arrive("b1", ("dog", 200), to="tcp://b")
    assert engine.step() == {"b1": ["dog"]}, "although others came before it"
    engine.arrive("b2", ("emu", 200), to="tcp://b")
    assert engine.step("cat to b0", "dog to b1") == {}
    assert engine.step() == {"b2": ["emu"]}
    engine.step("emu to b2", "orphan-0 to a0", "orphan-1 to a1")
    assert [*engine.step(), *engine.step()] == ["a2", "a3"]
    engine.step("orphan-2 to a2", "orphan-3 to a3")
    assert engine.step() == {"a4": ["orphan-4"]}
    engine.step("orphan-4 to a4")
    assert engine.empty()


def test_the_prompt_of_one_item_may_be_longer_than_a_step(engine: Engine) -> None:
    engine.arrive("a", ("film", 600), text=500)
    engine.arrive("b", ("cat", 300), to="tcp://b")
    assert engine.step() == {"a": ["film"]}
    assert not engine.ended
    assert engine.step() == {"b": ["cat"]}, "beside the rest of a's prompt"
    assert engine.ended.keys() == {"a", "b"}
    engine.step("film to a", "cat to b")
    assert engine.empty()


def test_item_larger_than_a_step_fails_its_own_request_only(engine: Engine) -> None:
    engine.arrive("a", ("cat", LIMIT + 1))
    engine.arrive("b", ("dog", 10))
    assert engine.step() == {"b": ["dog"]}
    assert "error" in engine.ended["a"].lower()
    engine.step("dog to b")
    assert engine.empty()


def test_requests_aborted_while_they_wait_or_go_on_leave_nothing(engine: Engine) -> None:
    engine.arrive("a", ("film", 600), text=500)
    engine.arrive("b", ("cat", 600))
    engine.arrive("c", ("dog", 600))
    engine.step()
    engine.scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    assert engine.step("film to a") == {}
    assert engine.step() == {"c": ["dog"]}
    engine.step("dog to c")
    assert engine.empty()


@pytest.fixture
def on_device() -> Iterator[Engine]:
    """An engine whose steps are computed later than they are queued."""
    made = Engine(config_on("npu"))
    yield made
    made.scheduler.shutdown()


def test_device_requests_end_when_their_step_is_computed(on_device: Engine) -> None:
    engine = on_device
    engine.arrive("a", ("cat", 600))
    assert engine.step() == {"a": ["cat"]}
    assert (engine.number, engine.ended) == (1, {})
    engine.arrive("b", ("dog", 400))
    assert engine.step() == {"b": ["dog"]}, "it is queued while the other is computed"
    assert (engine.number, engine.ended) == (2, {})
    assert engine.step("cat to a", computed=1) == {}
    assert set(engine.ended) == {"a"}
    assert (engine.number, engine.rests) == (0, True)
    engine.step("dog to b")
    assert set(engine.ended) == {"a"}, "it is transferred, but its step is not known to be computed"
    assert engine.scheduler.has_requests(), "nobody would hear of the end"
    engine.step(computed=2)
    assert set(engine.ended) == {"a", "b"}
    engine.step()
    assert not engine.rests
    assert engine.empty()


def test_response_of_a_computed_step_leaves_at_once(on_device: Engine) -> None:
    on_device.arrive("a", ("cat", 100))
    on_device.step(computed=1)
    assert set(on_device.ended) == {"a"}
    on_device.arrive("b", ("dog", 100))
    on_device.step(computed=2)
    on_device.step(computed=1)
    connector = on_device.scheduler.ec_connector
    assert connector.computed_step == 2, "steps that are reported have no order"
