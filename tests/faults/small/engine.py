"""A small engine: ``python -m tests.faults.small.engine CONFIG_JSON PORT``.

It has the three processes of a vLLM server, an HTTP front end, a scheduler and a worker, and in
them the package's own collaborators, called as `epd_portable.vllm_plugin` calls them. What it does
not reproduce: models (the answer is the digest of the bytes that a model would read), chunked
steps, the KV cache and preemption. It starts in the time that it takes to import torch, or is
forked from a process that has.

If a part dies, the others follow, and requests that are under way fail with status 500.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import sitecustomize  # Of the folder `hooks`.
import torch  # noqa: F401 - the parts are forked from this process, so it is imported once
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from epd_portable.config.instance import InstanceConfig
from tests.faults.points import name_process
from tests.faults.small import schedulers, workers
from tests.faults.small.pictures import shown_in
from tests.faults.small.steps import Abort, Answer, Item, Question, Request

_LAST_WORDS_S = 0.1
_DEAD = "a process of the engine has died"


class Front:
    """The HTTP end of an instance."""

    def __init__(self, scheduler: Connection, parts: list[multiprocessing.Process]) -> None:
        self._scheduler = scheduler
        self._parts = parts
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._states: list[asyncio.Future[dict[str, int]]] = []
        self._number = 0
        self._dead = False

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "small"}]})),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/state", self._state, methods=["POST"]),
            ]
        )

    def watch(self) -> None:
        """Take in what the scheduler says, and notice the end of a part."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._scheduler.fileno(), self._take_in)
        for part in self._parts:
            loop.add_reader(part.sentinel, self._part_ended)

    def _take_in(self) -> None:
        try:
            while self._scheduler.poll(0):
                message = self._scheduler.recv()
                if isinstance(message, Answer):
                    waiting = self._waiting.get(message.request_id)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                else:
                    self._states.pop(0).set_result(message)
        except EOFError:
            self._part_ended()

    def _part_ended(self) -> None:
        if self._dead:
            return
        self._dead = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._scheduler.fileno())
        for part in self._parts:
            loop.remove_reader(part.sentinel)
            part.kill()
        for request_id, waiting in self._waiting.items():
            if not waiting.done():
                waiting.set_result(Answer(request_id, problem=_DEAD))
        loop.call_later(_LAST_WORDS_S, os._exit, 1)

    async def _health(self, request: HttpRequest) -> Response:
        return Response(status_code=503 if self._dead else 200)

    async def _state(self, request: HttpRequest) -> Response:
        found: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._states.append(found)
        if not self._tell(Question(reset="reset" in request.query_params)):
            return _problem(_DEAD)
        return JSONResponse(await found)

    def _tell(self, message: Request | Abort | Question) -> bool:
        """Send to the scheduler; returns whether it is there."""
        if self._dead:
            return False
        try:
            self._scheduler.send(message)
        except OSError:
            return False
        return True

    async def _chat(self, http: HttpRequest) -> Response:
        body = await http.json()
        self._number += 1
        request_id = f"{http.headers['x-request-id']}-{self._number}"
        request = Request(request_id, _items(body), body.get("ec_transfer_params"))
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answered
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            if not self._tell(request):
                return _problem(_DEAD)
            await asyncio.wait({answered, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                self._tell(Abort(request_id))
                return Response()
        finally:
            gone.cancel()
            del self._waiting[request_id]
        answer = answered.result()
        if answer.problem:
            return _problem(answer.problem)
        message = {"role": "assistant", "content": answer.text}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return JSONResponse({"choices": choices, "ec_transfer_params": answer.params})


def _problem(message: str) -> Response:
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return JSONResponse({"error": error}, status_code=500)


def _items(body: dict[str, object]) -> tuple[Item, ...]:
    (message,) = body["messages"]  # type: ignore[misc]
    shown = [
        (part["uuid"], shown_in(part["image_url"]["url"]))
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    return tuple(Item(name, each.num_tokens, each) for name, each in shown)


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _serve(front: Front, port: int) -> None:
    front.watch()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(("127.0.0.1", port))
        config = uvicorn.Config(front.app(), log_config=None, timeout_graceful_shutdown=1)
        await uvicorn.Server(config).serve(sockets=[listener])


def main(config_json: str, port: str) -> None:
    """Start the parts and serve."""
    config = InstanceConfig.model_validate_json(config_json)
    forking = multiprocessing.get_context("fork")
    step_end, worker_end = forking.Pipe()
    front_end, scheduler_end = forking.Pipe()
    # Each part has its own ends only, or it would not notice when the other is gone.
    worker = forking.Process(
        target=_part, args=(workers.serve, (step_end, front_end, scheduler_end), config, worker_end)
    )
    worker.start()
    worker_end.close()
    scheduler = forking.Process(
        target=_part, args=(schedulers.serve, (front_end,), config, scheduler_end, step_end)
    )
    scheduler.start()
    scheduler_end.close()
    step_end.close()
    parts = {"worker": worker, "scheduler": scheduler}
    for name, part in parts.items():
        assert part.pid is not None
        name_process(Path(os.environ["EPD_TEST_FAULTS"]), f"{config.instance}.{name}", part.pid)
    ready = front_end.recv()
    assert ready == "ready", ready
    asyncio.run(_serve(Front(front_end, list(parts.values())), int(port)))  # type: ignore[arg-type]
    for part in parts.values():
        part.terminate()


def _part(serve: object, others: tuple[Connection, ...], *args: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for connection in others:
        connection.close()
    try:
        serve(*args)  # type: ignore[operator]
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(0)


if __name__ == "__main__":
    sitecustomize.install()
    main(*sys.argv[1:])
