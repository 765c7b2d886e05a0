"""Parts that vLLM's scheduler lacks before 0.26, over one that behaves as 0.23's does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from epd_portable.vllm_plugin.oldest import completed


class Scheduler:
    """Knows nothing of EC connectors when a request ends."""

    def __init__(self, **kwargs: Any) -> None:
        self.requests: dict[str, Any] = {}
        self.finished: list[tuple[list[str], Any]] = []
        self.ec_connector = SimpleNamespace(
            request_finished=lambda request: (False, request.outcome)
        )
        self.answer: dict[str, Any] | None = None

    def schedule(self) -> str:
        return "a step"

    def finish_requests(self, request_ids: list[str], status: Any) -> None:
        self.finished.append((request_ids, status))
        for request_id in request_ids:
            self.requests.pop(request_id)

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        return self.answer

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        return {}


def request(name: str, outcome: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(
        request_id=name,
        client_index=2,
        outcome=outcome,
        trace_headers=None,
        get_finished_reason=lambda: None,
        take_events=lambda: None,
    )


@pytest.fixture
def scheduler() -> Any:
    return completed(Scheduler)()


def test_steps_are_scheduled_however_they_are_asked_for(scheduler: Any) -> None:
    assert scheduler.schedule() == scheduler.schedule(True) == "a step"


@pytest.mark.parametrize(
    ("kv", "outcome", "answer"),
    [
        (None, None, None),
        ({"block": 1}, None, {"block": 1}),
        (None, {"items": []}, {"ec_transfer_params": {"items": []}}),
        ({"block": 1}, {"items": []}, {"block": 1, "ec_transfer_params": {"items": []}}),
    ],
)
def test_connectors_final_params_go_into_the_response(
    scheduler: Any, kv: Any, outcome: Any, answer: Any
) -> None:
    scheduler.answer = kv
    assert scheduler._free_request(request("a", outcome), delay_free_blocks=True) == answer


def test_request_with_a_grammar_error_fails_once(scheduler: Any) -> None:
    scheduler.requests = {"a": request("a"), "b": request("b")}
    scheduler.grammar_compile_error_reqs.update({"a", "gone"})
    outputs = scheduler.update_from_output(None, None)
    assert [each.request_id for each in outputs[2].outputs] == ["a"]
    assert scheduler.finished == [(["a"], RequestStatus.FINISHED_ERROR)]
    assert scheduler.update_from_output(None, None) == {}
    assert list(scheduler.requests) == ["b"]
