"""A small engine behind the front: ``python -m tests.faults.small.engine FRONT ARGUMENTS``.

`epd_portable.engine.core` with vLLM's ``EngineCoreProc``, its sockets, threads and loop, over a
small scheduler in this process and a small worker in another one: the package's own collaborators,
called as `epd_portable.vllm_plugin` calls them. Not reproduced: models (the response is the digest
of the bytes that a model would read), chunked steps, the KV cache and preemption.

The end of either process is the end of the engine, as with vLLM's workers in other processes.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from epd_portable.engine import core  # isort: skip

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine import core as vllm_core

from epd_portable import log
from epd_portable.config.instance import InstanceConfig
from epd_portable.wire.params import FIELD, to_params
from tests.faults.points import name_process
from tests.faults.small import schedulers, workers
from tests.faults.small.pictures import Shown
from tests.faults.small.steps import STATES, Answer, Item, Request

_TOKENS = {**{str(n): [29 + n] for n in range(10)}, **{c: [78 + n] for n, c in enumerate("abcdef")}}
_TOKENS[" "] = [234]
"""Tokens of the bundled model's tokenizer for the letters of responses."""
_END_TOKEN = 2
_PIXELS, _PATCH_VALUES = "pixel_values", 3 * 2 * 14 * 14
_REST_S = 0.003
"""Seconds between steps that compute nothing, while requests wait."""


class SmallCore:
    """The part of an engine below vLLM's ``EngineCoreProc``, in place of ``EngineCore``."""

    config: InstanceConfig
    steps: Connection
    worker: multiprocessing.process.BaseProcess

    def __init__(
        self,
        vllm_config: Any,
        executor_class: Any,
        log_stats: bool,
        executor_fail_callback: Any = None,
        *args: Any,
    ) -> None:
        self.vllm_config, self.log_stats = vllm_config, log_stats
        self.aborts_queue: queue.Queue[Any] = queue.Queue()
        self.batch_queue = None
        self.step_fn = self.step
        self._idle_state_callbacks: list[Any] = []
        self.small = schedulers.make(self.config, self.steps)
        self.scheduler = self
        self._clients: set[int] = set()
        self._second: deque[tuple[int, EngineCoreOutput]] = deque()
        for target, given in ((_watch, (self.worker, executor_fail_callback)), (_report, (self,))):
            threading.Thread(target=target, args=given, daemon=True).start()

    # -- of an engine ------------------------------------------------------------------------------

    def preprocess_add_request(self, request: Any) -> tuple[Request, int]:
        items = tuple(map(_item, request.mm_features or ()))
        extra = request.sampling_params.extra_args or {}
        return Request(request.request_id, items, extra.get(FIELD), request.client_index), 0

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        self._clients.add(request.client_index)
        self.small.add(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.small.abort(request_id)
        self._second = deque(each for each in self._second if each[1].request_id not in request_ids)

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:
        self._process_aborts_queue()
        outputs: dict[int, EngineCoreOutputs] = {}

        def put(client: int, output: EngineCoreOutput) -> None:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)

        while self._second:
            put(*self._second.popleft())
        clients = {each.request_id: each.client_index for each in self.small.requests.values()}
        for answer in self.small.step():
            first, *second = _outputs(answer)
            put(clients[answer.request_id], first)
            self._second += [(clients[answer.request_id], each) for each in second]
        news, self.small.news = self.small.news, []
        for each in news:
            for client in self._clients:
                put(client, EngineCoreOutput("", [], ec_transfer_params=to_params(each)))
        if not outputs:
            time.sleep(_REST_S)
        return outputs, True

    def post_step(self, model_executed: bool) -> None:
        """Do nothing: no work follows a step."""

    def shutdown(self) -> None:
        self.worker.terminate()
        self.worker.join()

    def reset_mm_cache(self) -> None:
        """Do nothing, without a cache of processed items."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def is_scheduler_paused(self) -> bool:
        return False

    # -- of vLLM's scheduler -----------------------------------------------------------------------

    def has_requests(self) -> bool:
        return self.small.busy or bool(self._second)

    def get_num_unfinished_requests(self) -> int:
        return len(self.small.requests)

    def finish_requests(self, request_ids: Any, status: Any) -> list[Request]:
        assert request_ids is None
        ended = list(self.small.requests.values())
        self.abort_requests([each.request_id for each in ended])
        return ended

    def get_kv_event_publisher_config(self) -> None:
        return None


class _EngineCoreProc(vllm_core.EngineCoreProc, SmallCore, vllm_core.EngineCore):
    """vLLM's sockets, threads and loop over a `SmallCore`."""

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        if request_type != _report:
            super()._handle_client_request(request_type, request)
            return
        reset, counted = request
        if reset:
            self.small.reset()
        self._process_engine_step()
        counted.put(self.small.counts())


def _item(feature: Any) -> Item:
    """Return an item of a request, from its pixels if there are any."""
    num_tokens, shown = feature.mm_position.get_num_embeds(), None
    if feature.data is not None and _PIXELS in feature.data:
        patches = feature.data[_PIXELS].data[:4].reshape(4, 3, _PATCH_VALUES // 3)[:, :, 0]
        values = bytes(patches.flatten().tolist())  # Engines normalize: here are the image's own.
        shown = Shown.read(values, num_tokens)
    return Item(feature.identifier, num_tokens, shown)


def _outputs(answer: Answer) -> list[EngineCoreOutput]:
    """Return the outputs of a response: its first token, and in the next step all others."""
    request_id, params = answer.request_id, answer.params
    if answer.problem:
        return [EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)]
    tokens = [token for letter in (answer.text or "") for token in _TOKENS[letter]]
    end = EngineCoreOutput(
        request_id, [], finish_reason=FinishReason.STOP, ec_transfer_params=params
    )
    if answer.text is None:  # Of an encode job.
        return [end]
    tokens.append(_END_TOKEN)
    if len(tokens) == 1:
        end.new_token_ids = tokens
        return [end]
    end.new_token_ids = tokens[1:]
    return [EngineCoreOutput(request_id, tokens[:1]), end]


def _watch(worker: multiprocessing.process.BaseProcess, failed: Any) -> None:
    """Report the end of the worker, as vLLM's executor does."""
    worker.join()
    failed()


def _report(engine: Any) -> None:
    """Answer queries of tests: ``reset`` or ``-``, for the counts as JSON."""
    path = Path(os.environ[STATES], engine.config.instance)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                counted: queue.Queue[dict[str, int]] = queue.Queue()
                engine.input_queue.put((_report, (connection.recv(16) == b"reset", counted)))
                connection.sendall(json.dumps(counted.get()).encode())


def main() -> None:
    """Start the worker, and run the engine."""
    given = json.loads(sys.argv[sys.argv.index("--ec-transfer-config") + 1])
    config = InstanceConfig.parse(given["ec_connector_extra_config"])
    forking = multiprocessing.get_context("fork")
    steps, end = forking.Pipe()
    # Each process has its own end only, so that it sees the end of the other one.
    worker = forking.Process(target=_work, args=(steps, config, end))
    worker.start()
    end.close()
    folder = Path(os.environ["EPD_TEST_FAULTS"])
    assert worker.pid is not None
    name_process(folder, f"{config.instance}.worker", worker.pid)
    name_process(folder, f"{config.instance}.scheduler", os.getpid())
    log.configure()
    # The identity of the model that is played, by which entries of a store are named.
    core.agreement.stored_as = lambda vllm_config: workers.fingerprint()
    SmallCore.config, SmallCore.steps, SmallCore.worker = config, steps, worker
    vllm_core.EngineCoreProc = _EngineCoreProc
    core.main()


def _work(steps: Connection, *given: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    steps.close()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        workers.serve(*given)


if __name__ == "__main__":
    main()
