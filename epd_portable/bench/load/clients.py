"""The clients: send requests at their times and read the answers.

Bodies are written before the first is sent, and streams taken apart after the last has ended. How
much CPU time the clients took and how late they sent is part of every result: clients that are the
bottleneck show.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import itertools
import json
import mimetypes
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httptools
import uvloop

from epd_portable.bench.load.plan import LoadPicture, LoadRequest

TIMEOUT_S = 120.0
"""Longest time of a request; later it counts as failed."""
_SPIN_S = 0.002
"""Sleeps end so much early; the rest is waited for in turns of the event loop."""
_READ_BYTES = 1 << 16
_WORDS = ("red", "green", "blue", "circle", "square", "star", "above", "below", "left", "right")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadAnswer:
    """What became of a request; times in seconds.

    Attributes:
        late_s: How much later it was sent than it was due.
        ttft_s: From the sending to the first token; negative for none.
        tpot_s: For each token after it.
        itl_s: Times between two pieces of the answer.
        e2e_s: From the sending to the end.
        tokens: Of the answer, as the server counts them.
        problem: Why it does not count as answered; empty if it does.
    """

    late_s: float
    ttft_s: float
    tpot_s: float
    itl_s: tuple[float, ...]
    e2e_s: float
    tokens: int
    prompt_tokens: int
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What became of the requests of a turn.

    Attributes:
        answers: In the order of the requests.
        cpu_s: CPU time of the clients while they sent.
        wall_s: From the beginning to the last end.
    """

    answers: Sequence[LoadAnswer]
    cpu_s: float
    wall_s: float


def part_of(picture: LoadPicture) -> dict[str, object]:
    """Return a picture, or a video, as a part of a message: its file, or noise as JPEG.

    `random-mm` of ``vllm bench serve`` sends such noise; it has as many bytes as a photograph with
    much detail. A video is its frames as vLLM takes them, which needs no encoder of videos.
    """
    if not picture.size:
        name, _ = mimetypes.guess_type(picture.seed)
        content = [Path(picture.seed).read_bytes()]
    else:
        # With an engine's environment only, as the engines that read it.
        from PIL import Image

        name, content = "image/jpeg", []
        for number in range(max(1, picture.frames)):
            noise = random.Random(f"{picture.seed} {number}").randbytes(3 * picture.size**2)
            file = io.BytesIO()
            Image.frombytes("RGB", (picture.size,) * 2, noise).save(file, format="JPEG")
            content.append(file.getvalue())
    kind, name = ("video", "video/jpeg") if picture.frames else ("image", name or "image/jpeg")
    encoded = ",".join(base64.b64encode(each).decode("ascii") for each in content)
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{name};base64,{encoded}"}}


def body_of(request: LoadRequest, model: str, words_per_token: float) -> bytes:
    """Return a streamed chat request."""
    text = request.text
    if request.text_tokens:
        words = max(1, round(request.text_tokens * words_per_token))
        text = " ".join(random.Random(text).choices(_WORDS, k=words))
    content = [*map(part_of, request.pictures), {"type": "text", "text": text}]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": request.output_tokens,
        # Answers of one length, and every token with a text by which it is seen to arrive.
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body, separators=(",", ":")).encode()


def read_stream(
    pieces: Sequence[tuple[float, bytes]], *, output_tokens: int
) -> tuple[list[float], dict[str, int], str]:
    """Read a streamed answer, of which `pieces` came when.

    Returns:
        When pieces of text came, the usage that the server says, and what is wrong, or empty: an
        answer of another length than was asked for is other work.
    """
    times: list[float] = []
    usage: dict[str, int] = {}
    problem = "the answer ended without [DONE]"
    for now_s, data in _events(pieces):
        if data == b"[DONE]":
            problem = ""
            break
        try:
            event = json.loads(data)
            error = event.get("error")
            has_text = any(choice["delta"].get("content") for choice in event.get("choices", ()))
        except (ValueError, TypeError, LookupError, AttributeError) as wrong:
            problem = f"an event is not what it should be ({wrong!r}): {data[:200]!r}"
            break
        if error is not None:
            problem = f"the answer broke off: {error}"
            break
        if has_text:
            times.append(now_s)
        usage = event.get("usage") or usage
    tokens = usage.get("completion_tokens", 0)
    if not problem and tokens != output_tokens:
        problem = f"{tokens} tokens in place of {output_tokens}"
    if not problem and not times:
        problem = "the answer has no text"
    return times, usage, problem


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of each event, and when its last byte came."""
    rest = b""
    for now_s, piece in pieces:
        *whole, rest = (rest + piece.replace(b"\r\n", b"\n")).split(b"\n\n")
        for line in b"\n".join(whole).split(b"\n"):
            if line.startswith(b"data: "):
                yield now_s, line.removeprefix(b"data: ")


class _Exchange:
    """One request, and its response as it comes."""

    def __init__(self, request: LoadRequest, body: bytes, url: str) -> None:
        self.request = request
        self._address = urlsplit(url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._address.netloc}\r\n"
        head += "content-type: application/json\r\nconnection: close\r\n"
        self._message = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[tuple[float, bytes]] = []
        self._ended = False
        self._problem = ""

    def on_body(self, body: bytes) -> None:
        """Note when bytes came; called by the parser."""
        self._pieces.append((time.monotonic(), body))

    def on_message_complete(self) -> None:
        """Note the end; called by the parser."""
        self._ended = True

    async def run(self, due_s: float) -> None:
        """Send the request now, and read the response."""
        self._due_s, self._sent_s = due_s, time.monotonic()
        try:
            await asyncio.wait_for(self._run(), TIMEOUT_S)
        except TimeoutError:
            self._problem = f"no end in {TIMEOUT_S:g} s"
        except (OSError, httptools.HttpParserError) as error:
            self._problem = f"{self._address.netloc}: {error!r}"
        self._end_s = time.monotonic()

    async def _run(self) -> None:
        host, port = self._address.hostname, self._address.port or 80
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(self._message)
            while not self._ended and (data := await reader.read(_READ_BYTES)):
                self._parser.feed_data(data)
        finally:
            writer.close()

    def answer(self) -> LoadAnswer:
        """Return what became of it."""
        times, usage, problem = read_stream(self._pieces, output_tokens=self.request.output_tokens)
        if (status := self._parser.get_status_code()) != 200:
            said = b"".join(piece for _, piece in self._pieces)[:300]
            problem = f"status {status}: {said.decode(errors='replace')}"
        tokens = usage.get("completion_tokens", 0)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return LoadAnswer(
            late_s=self._sent_s - self._due_s,
            ttft_s=times[0] - self._sent_s if times else -1.0,
            tpot_s=sum(gaps) / max(tokens - 1, 1),
            itl_s=tuple(gaps),
            e2e_s=self._end_s - self._sent_s,
            tokens=tokens,
            prompt_tokens=usage.get("prompt_tokens", 0),
            problem=self._problem or problem,
        )


class LoadClients:
    """Send requests once, in the order of their times, to each base address in turn.

    Args:
        model: Name of the model there.
        words_per_token: By which the lengths of texts are chosen.
        clients: So many send, each its next request when it has its answer, whatever the times;
            0 sends every request at its time.
    """

    def __init__(
        self,
        requests: Sequence[LoadRequest],
        urls: Sequence[str],
        model: str,
        *,
        words_per_token: float,
        clients: int,
    ) -> None:
        self._clients = clients
        self._exchanges = [
            _Exchange(request, body_of(request, model, words_per_token), url)
            for request, url in zip(requests, itertools.cycle(urls), strict=False)
        ]

    def send(self) -> Answers:
        """Send all requests, and return when the last has its answer."""
        gc.freeze()
        gc.disable()
        try:
            cpu_s, begin_s = time.thread_time(), time.monotonic()
            uvloop.run(self._send_all() if self._clients else self._send_in_time(begin_s))
            cpu_s, wall_s = time.thread_time() - cpu_s, time.monotonic() - begin_s
        finally:
            gc.enable()
            gc.unfreeze()
        answers = [each.answer() for each in self._exchanges]
        return Answers(answers=answers, cpu_s=cpu_s, wall_s=wall_s)

    async def _send_all(self) -> None:
        left = iter(self._exchanges)

        async def ask_on() -> None:
            for exchange in left:
                await exchange.run(time.monotonic())

        await asyncio.gather(*(ask_on() for _ in range(self._clients)))

    async def _send_in_time(self, begin_s: float) -> None:
        tasks = []
        for exchange in self._exchanges:
            due_s = begin_s + exchange.request.at_s
            # Timers of an event loop are not exact enough.
            if (wait_s := due_s - time.monotonic() - _SPIN_S) > 0:
                await asyncio.sleep(wait_s)
            while time.monotonic() < due_s:
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(exchange.run(due_s)))
        await asyncio.gather(*tasks)
