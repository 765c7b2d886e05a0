"""The scheduler of a prefill+decode instance over vLLM's real one; no engine computes.

Items without media are never chosen to be encoded here, and requests that wait for their items are
out of the engine's way.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from epd_portable.platforms.traits import TRAITS
from epd_portable.vllm_plugin import compat, executor
from epd_portable.vllm_plugin.reports import to_names
from epd_portable.vllm_plugin.requests import take_params
from epd_portable.wire.params import ExpectedTransfer, PrefillParams, to_params
from tests.kit.engine import pool_bytes
from tests.kit.side import Side

TEXT, ITEM = 20, 16
WAIT_S = 5.0


class Engine:
    """Steps the scheduler of a `Side` as vLLM's engine core does; every token is a 1."""

    def __init__(self, *, pool: int = 0, **sizes: Any) -> None:
        self.side = Side(
            items={"item": ITEM},
            cache=4096,
            pool=pool,
            tokens=8192,
            encoder_tokens=4096,
            block=16,
            prefix_caching=False,
            stats=True,
            wait_timeout_s=WAIT_S,
            **sizes,
        )
        self.scheduler = self.side.scheduler
        self.encoded: list[tuple[str, int]] = []
        """Requests and their items that steps encoded."""
        self.encoded_beside: list[str] = []
        self.ended: dict[str, str] = {}
        self.counts: list[tuple[int, int]] = []
        """Requests that are computed and that wait, as API servers were told."""
        self.outputs: list[Any] = []
        """Outputs that API servers got, in their order."""
        self.servers: list[list[int]] = []
        """Servers that were notified."""

    def arrive(
        self,
        request_id: str,
        *,
        pixels: bool,
        transfer: bool = False,
        text: int = TEXT,
        items: int = 1,
        kv: Any = False,
        resumable: bool = False,
        server: int = 0,
    ) -> None:
        """Add a request of ``text`` tokens of text, items and text.

        Its KV may be elsewhere, or a client may have sent a value of another type in that place;
        and it may be a part of a session.
        """
        fields = {"image_grid_thw": torch.tensor([[1, 8, 8]])}
        if pixels:
            fields["pixel_values"] = torch.zeros(1, 64, 8)
        elements = {
            key: MultiModalFieldConfig.batched(
                "image", keep_on_cpu=key == "image_grid_thw"
            ).build_elems(key, value)[0]
            for key, value in fields.items()
        }
        name = f"item of {request_id}"
        expected = ExpectedTransfer(transfer_id=f"to {request_id}", item_uuid=name, media=pixels)
        elsewhere = {"do_remote_prefill": True} if kv is True else kv
        extra: dict[str, Any] = {"kv_transfer_params": elsewhere} if kv else {}
        if transfer:
            extra["ec_transfer_params"] = to_params(PrefillParams(transfers=(expected,)))
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=[1] * (text + items * ITEM + TEXT),
                sampling_params=SamplingParams(max_tokens=1, extra_args=extra or None),
                pooling_params=None,
                resumable=resumable,
                client_index=server,
                mm_features=[
                    MultiModalFeatureSpec(
                        data=MultiModalKwargsItem(elements),
                        modality="image",
                        identifier=f"{name}{index or ''}",
                        mm_position=PlaceholderRange(offset=text + index * ITEM, length=ITEM),
                    )
                    for index in range(items)
                ],
            )
        )

    def step(self) -> dict[str, int]:
        """Run one step; return the number of tokens that each request computed."""
        self.side.engine.take_in()
        planned = self.scheduler.schedule()
        for request_id, indices in planned.scheduled_encoder_inputs.items():
            self.encoded += [(request_id, index) for index in indices]
        beside = {each.mm_hash for each in planned.ec_connector_metadata.receipts.encodings}
        self.encoded_beside += sorted(beside)
        computed: dict[str, int] = dict(planned.num_scheduled_tokens)
        requests = list(computed)
        output = ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request_id: index for index, request_id in enumerate(requests)},
            sampled_token_ids=[
                [1]
                if self.scheduler.requests[each].num_computed_tokens
                >= self.scheduler.requests[each].num_prompt_tokens
                else []
                for each in requests
            ],
            ec_connector_output=ECConnectorOutput(finished_recving=to_names({"encoded": beside})),
        )
        told = self.scheduler.update_from_output(planned, output)
        if servers := sorted(each for each in told if told[each].scheduler_stats is not None):
            self.servers.append(servers)
        for outputs in told.values():
            if (stats := outputs.scheduler_stats) is not None:
                skipped = getattr(stats, "num_skipped_waiting_reqs", 0)
                self.counts.append((stats.num_running_reqs, stats.num_waiting_reqs + skipped))
            self.outputs += outputs.outputs
            for each in outputs.outputs:
                if each.finish_reason is not None:
                    self.ended[each.request_id] = str(each.finish_reason)
        return computed

    def steps(self, count: int) -> list[dict[str, int]]:
        """Run so many steps; return what was computed by those that computed something."""
        return [computed for computed in (self.step() for _ in range(count)) if computed]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.side.engine.close()


@pytest.fixture
def engine_beside() -> Iterator[Engine]:
    """Yield an engine of one rank on a CPU: an item encoded in a step is there after that step."""
    made = Engine(beside=True)
    yield made
    made.side.engine.close()


@pytest.fixture
def takes_bare_items() -> None:
    if compat.version() < compat.HAS_METADATA:
        pytest.skip("this vLLM takes no item without its media")


def test_empty_step_is_not_sent_when_drafts_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(MultiprocExecutor, "execute_model", lambda _, step, **__: sent.append(step))
    monkeypatch.setattr(MultiprocExecutor, "shutdown", lambda _: None)
    engine = Engine(lookahead=1, second=True)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    engine.arrive("r", pixels=True, transfer=True)
    assert engine.step(), "the text before the item"
    empty = engine.scheduler.schedule()
    assert not empty.num_scheduled_tokens
    workers: Any = executor.EPDExecutor.__new__(executor.EPDExecutor)
    assert workers.execute_model(empty).req_ids == []
    assert sent == []
    engine.side.engine.close()


def test_tokens_of_others_come_between_items_encoded_here(engine: Engine) -> None:
    most = TRAITS["cpu"].encode_together_embeds // ITEM
    engine.arrive("many", pixels=True, items=2 * most + 1)
    engine.arrive("other", pixels=True)
    first = engine.step()
    assert first == {"many": TEXT + most * ITEM, "other": TEXT + ITEM + TEXT}
    assert engine.encoded == [*(("many", each) for each in range(most)), ("other", 0)]
    assert engine.step() == {"many": most * ITEM}
    assert engine.step() == {"many": ITEM + TEXT}
    assert engine.ended == {"many": "length", "other": "length"}


def test_item_of_remote_prefill_is_encoded_when_step_needs_it(engine_beside: Engine) -> None:
    engine = engine_beside
    # No KV connector is there to bring it.
    engine.arrive("r", pixels=True, kv=True)
    engine.steps(3)
    assert (engine.encoded, engine.encoded_beside) == ([("r", 0)], [])
    assert engine.ended == {"r": "length"}


@pytest.mark.parametrize("kv", ["x", 1, ["x"]])
def test_kv_parameters_of_a_wrong_type_end_no_engine(engine_beside: Engine, kv: Any) -> None:
    """Such parameters come from ``vllm_xargs`` in vLLM before 0.32."""
    engine = engine_beside
    engine.arrive("r", pixels=True, kv=kv)
    engine.steps(3)
    assert engine.encoded_beside == ["item of r"]
    assert engine.ended == {"r": "length"}


@pytest.mark.usefixtures("takes_bare_items")
def test_request_without_media_and_transfer_fails_alone(engine: Engine) -> None:
    engine.arrive("bare", pixels=False)
    engine.arrive("behind", pixels=True)
    assert engine.step() == {"behind": TEXT + ITEM + TEXT}
    assert engine.encoded == [("behind", 0)]
    assert engine.ended == {"bare": "error", "behind": "length"}
    assert not engine.scheduler.has_unfinished_requests()


def test_front_has_reason_before_end_of_request_beyond_pool() -> None:
    engine = Engine(pool=1)
    engine.arrive("r", pixels=True, transfer=True)
    engine.step()
    engine.side.engine.close()
    assert engine.ended == {"r": "error"}
    news, end = engine.outputs
    assert (news.request_id, end.request_id) == ("", "r")
    reason = take_params(news)["refused"]["r"]
    most = pool_bytes(engine.side.sizes)
    assert reason.endswith(f"and {most} bytes: send a smaller image, or raise transfer.pool_bytes")


@pytest.mark.parametrize("items", [1, 0], ids=["media first", "text first"])
def test_media_in_parts_are_refused_for_their_request_only(engine: Engine, items: int) -> None:
    engine.arrive("session", pixels=True, resumable=True, items=items)
    engine.arrive("other", pixels=True)
    engine.step()
    if not items:
        engine.step()
        assert "session" in engine.scheduler.requests, "it waits for its next part"
    engine.arrive("session", pixels=True, resumable=True)
    engine.arrive("another", pixels=True)
    for _ in range(3):
        engine.step()
    assert engine.ended == {"session": "error", "other": "length", "another": "length"}
    assert not engine.scheduler.has_unfinished_requests()


def test_request_waiting_for_its_first_token_is_not_queued(engine: Engine) -> None:
    for number in range(3):
        engine.arrive(f"r{number}", pixels=True, transfer=True, text=0)
    assert engine.step() == {}
    scheduler = engine.scheduler
    assert len(scheduler.waiting) == 0
    assert scheduler.has_requests()
    assert scheduler.get_request_counts() == (0, 3)
    asked = []
    judge = scheduler.ec_connector.requests.may_schedule
    scheduler.ec_connector.requests.may_schedule = lambda *a, **k: asked.append(a) or judge(*a, **k)
    for _ in range(5):
        engine.step()
    assert {request_id for request_id, *_ in asked} <= {"r0"}, "only the first is asked again"
    engine.side.clock.now += WAIT_S + 1.0
    computed = engine.steps(4)
    assert next(iter(computed[0])) == "r0"
    assert len(engine.encoded) == 3
    assert not scheduler.has_requests() or scheduler.has_finished_requests()


def test_api_servers_hear_nothing_of_steps_that_only_wait(engine: Engine) -> None:
    engine.arrive("begun", pixels=True, transfer=True)
    assert engine.step() == {"begun": TEXT}
    assert engine.counts == [(1, 0)]
    assert [engine.step(), engine.step(), engine.counts] == [{}, {}, [(1, 0), (0, 1)]]
    engine.arrive("asleep", pixels=True, transfer=True, text=0)
    assert [engine.step(), engine.step(), engine.counts[2:]] == [{}, {}, [(0, 2)]]


def test_api_servers_are_notified_of_busy_and_idle_engine(engine: Engine) -> None:
    for name, server in (("q", 0), ("r", 2), ("s", 0), ("t", 1)):
        engine.arrive(name, pixels=True, transfer=True, server=server)
        assert engine.step() == {name: TEXT}
    assert [engine.step(), engine.step()] == [{}, {}]
    # The first one is told the statistics of every step by vLLM.
    assert engine.servers == [[0], [0, 2], [0], [0, 1], [0, 1, 2]]
    assert engine.counts[-3:] == [(0, 4)] * 3


class Turns:
    """vLLM's engine loop itself around an `Engine`: what it does in a turn, in its order."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        class Core(EngineCoreProc):
            def __init__(self) -> None:
                self.scheduler = engine.scheduler
                self.input_queue: Any = queue.Queue()
                self.output_queue: Any = queue.Queue()
                self.aborts_queue: Any = queue.Queue()
                self.engines_running, self.batch_queue = False, None
                self.process_input_queue_block = False
                self._idle_state_callbacks: list[Any] = []
                self.step_fn = turns._step

            def is_running(self) -> bool:
                return True

            def post_step(self, model_executed: bool) -> None:
                pass

            def _handle_client_request(self, *request: Any) -> None:
                turns.events.append("new request")

        turns, sleep = self, time.sleep
        self._engine = engine
        self.events: list[str] = []
        self.computed: dict[str, int] = {}
        receiver = engine.scheduler.ec_connector.shell
        rest = receiver.rest
        monkeypatch.setattr(
            receiver, "rest", lambda timeout_s: (self.events.append("rest"), rest(timeout_s))
        )
        monkeypatch.setattr(time, "sleep", lambda s: (self.events.append("sleep"), sleep(s)))
        self.core = Core()

    def _step(self) -> tuple[dict[int, Any], bool]:
        if not self._engine.scheduler.has_requests():
            return {}, False
        self.events.append("step")
        self.computed = self._engine.step()
        return {}, bool(self.computed)

    def turn(self) -> list[str]:
        """Take a turn; return what happened in it, from a step to the next one's begin."""
        self.events.clear()
        self.core._process_engine_step()
        self.core.input_queue.put(("ADD", None))
        self.core._process_input_queue()
        return list(self.events)


@pytest.mark.parametrize("text", [0, TEXT], ids=["asleep", "running"])
def test_engine_of_waiting_requests_rests_once_a_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, text: int
) -> None:
    engine.arrive("r", pixels=True, transfer=True, text=text)
    turns = Turns(engine, monkeypatch)
    if text:
        assert turns.turn() == ["step", "new request"], "it computes the text"
    for _ in range(5):
        # On a busy machine the turn may be as old as vLLM's sleep is long before that begins.
        first, *between, last = turns.turn()
        assert (first, sorted(between), last) == ("step", ["rest", "sleep"], "new request")
