"""What fetches media, on sites that mean no good."""

from __future__ import annotations

import asyncio
import base64
import gzip
import ipaddress
import resource
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.routing import MediaUrls
from epd_portable.errors import RequestError
from epd_portable.placement.instances import EndpointPool
from epd_portable.router.contents import media_urls
from epd_portable.router.contents.body import Body, HeldBytes
from epd_portable.router.contents.media_urls import LinkedItems, MediaFetcher
from epd_portable.router.observability.metrics import Metrics
from tests.certificates import make_certificate
from tests.integration.front.web import Answer, Site, moved, never, once, plain
from tests.integration.router.stand_in import DEADLINE_S, until
from tests.unit.media.samples import STILLS

PNG = STILLS["png"]
WHERE = "messages[0].content[0].image_url"
HOST = "site.test"
"""At the address of the site, which stands for a public one."""
INSIDE = {
    "inside.test": ["10.0.0.1"],
    "mixed.test": ["127.0.0.1", "10.0.0.1"],
    "loopback6.test": ["::1"],
    "metadata.test": ["169.254.169.254"],
    "mapped.test": ["::ffff:10.0.0.1"],
    "translated.test": ["64:ff9b::a00:1"],
    "tunnel.test": ["2002:a00:1::"],
    "link.test": ["fe80::1%2"],
    "nobody.test": ["0.0.0.0"],
    "odd.test": ["not an address"],
}


class World:
    """A site, names, and what fetches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.site = Site()
        self.names: dict[str, list[str]] = {HOST: ["127.0.0.1"], **INSIDE}
        self.looked_up: list[str] = []
        self.held = HeldBytes(128 << 20)
        self.metrics = Metrics(EndpointPool())
        self.fetchers: list[MediaFetcher] = []

    def resolve(self, host: str, port: int) -> list[str]:
        self.looked_up.append(host)
        if host not in self.names:
            raise OSError("unknown")
        return self.names[host]

    def fetcher(self, *, timeout_s: float = DEADLINE_S, **settings: Any) -> MediaFetcher:
        self._monkeypatch.setattr(media_urls, "TIMEOUT_S", timeout_s)
        options = {
            "allowed_domains": [f"*:{self.site.port}"],
            "allowed_networks": ["127.0.0.0/8"],
            **settings,
        }
        self.fetchers.append(
            MediaFetcher(
                MediaUrls.model_validate(options),
                partial(Body, self.held, 64 << 20),
                self.metrics,
                resolve=self.resolve,
            )
        )
        return self.fetchers[-1]

    def url(self, path: str = "/a.png", host: str = HOST, scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.site.port}{path}"


async def get(fetcher: MediaFetcher, *urls: str) -> list[bytes]:
    """Do as the router does for one request."""

    def find(linked: LinkedItems) -> list[Any]:
        return [linked.find_media(url.encode(), WHERE) for url in urls]

    with fetcher.of_request() as linked:
        found = find(linked)
        if linked.wanted:
            await linked.fetch()
            found = find(linked)
        return [base64.b64decode(text) for text in found]


async def refusal(fetcher: MediaFetcher, url: str) -> RequestError:
    with pytest.raises(RequestError) as refused:
        await get(fetcher, url)
    assert str(refused.value).startswith(WHERE)
    return refused.value


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    world = World(monkeypatch)
    await world.site.start()
    yield world
    for fetcher in world.fetchers:
        await fetcher.close()
    await world.site.stop()
    assert world.held.count == 0


def endless(head: str, piece: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode())
        while True:
            writer.write(piece)
            await writer.drain()

    return answer


def slowly(data: bytes, step: int = 1, pause_s: float = 0.05) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for place in range(0, len(data), step):
            writer.write(data[place : place + step])
            await writer.drain()
            await asyncio.sleep(pause_s)

    return answer


OK = "HTTP/1.1 200 OK\r\n"
CODED = OK + "transfer-encoding: chunked\r\n\r\n"
HOSTILE_ANSWERS: dict[str, tuple[bytes | Answer, int, str]] = {
    "endless": (endless(OK + "\r\n", b"x" * 65536), 413, "max_bytes"),
    "endless-chunks": (endless(CODED, b"2000\r\n" + b"x" * 8192 + b"\r\n"), 413, "max_bytes"),
    "announced": (OK.encode() + b"content-length: 99999999\r\n\r\n", 413, "has 99999999 bytes"),
    "tiny-chunks": (endless(CODED, b"1\r\nx\r\n" * 2000), 502, "too small pieces"),
    "bomb": (plain(gzip.compress(bytes(9 << 20)), "content-encoding: gzip"), 502, "compressed"),
    "deflate": (plain(PNG, "content-encoding: identity, deflate"), 502, "compressed"),
    "empty": (plain(b""), 400, "sent nothing"),
    "cut": (OK.encode() + b"content-length: 5000\r\n\r\n" + PNG, 502, "broke off"),
    "cut-chunk": (CODED.encode() + b"50\r\n" + PNG[:20], 502, "broke off"),
    "two-lengths": (plain(PNG, "content-length: 6"), 502, "no HTTP"),
    "length-and-chunks": (plain(PNG, "transfer-encoding: chunked"), 502, "no HTTP"),
    "odd-length": (OK.encode() + b"content-length: 0x50\r\n\r\n" + PNG, 502, "no HTTP"),
    "coding": (OK.encode() + b"transfer-encoding: gzip, chunked\r\n\r\n", 502, "compressed"),
    "two-codings": (
        plain(PNG, "content-encoding: identity", "content-encoding: gzip"),
        502,
        "compressed",
    ),
    "no-http": (b"220 mail.inside ESMTP\r\n", 502, "no HTTP"),
    "redis": (b"-ERR unknown command 'GET'\r\n", 502, "no HTTP"),
    "nothing": (b"", 502, "broke off"),
    "endless-header": (endless(OK + "x: ", b"x" * 4096), 502, "no HTTP"),
    "endless-headers": (endless(OK, b"x-header: 1\r\n" * 200), 502, "no HTTP"),
    "equal-headers": (OK.encode() + b"x:y\r\n" * 20_000 + b"\r\n" + PNG, 502, "no HTTP"),
    "endless-hints": (endless("", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100), 502, "no HTTP"),
    "endless-trailer": (endless(CODED + "1\r\nx\r\n0\r\nx: ", b"x" * 65536), 502, "no HTTP"),
    "endless-extension": (endless(CODED + "1\r\nx\r\n1;", b"x" * 65536), 502, "no HTTP"),
    "switches": (
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        502,
        "broke off",
    ),
    "no-content": (b"HTTP/1.1 204 No Content\r\n\r\n", 502, "answered 204"),
    "partial": (plain(PNG, status="206 Partial Content"), 502, "answered 206"),
    "not-modified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", 502, "answered 304"),
    "choices": (plain(b"", "location: /ok", status="300 Multiple Choices"), 502, "answered 300"),
    "forbidden": (plain(b"secret", status="403 Forbidden"), 400, "answered 403"),
    "missing": (plain(b"", status="404 Not Found"), 400, "answered 404"),
    "too-many": (plain(b"", status="429 Too Many Requests"), 502, "answered 429"),
    "broken": (plain(b"secret", status="500 Internal Server Error"), 502, "answered 500"),
    # Redirects; "{port}" is the site's.
    "to-itself": (moved("/to-itself"), 400, "round in a circle"),
    "to-and-fro": (moved("http://site.test:{port}/fro"), 400, "round in a circle"),
    "fro": (moved("/to-and-fro"), 400, "round in a circle"),
    "one": (moved("/two"), 400, "more than 3 redirects"),
    "to-file": (moved("file:///etc/passwd"), 400, "no http or https URL"),
    "to-metadata": (moved("http://169.254.169.254/latest"), 400, "where nothing is fetched"),
    "to-inside": (moved("http://inside.test:{port}/ok"), 400, "not public"),
    "to-unknown": (moved("http://unknown.test:{port}/ok"), 502, "not known"),
    "to-backslash": (moved("\\\\127.0.0.1\\a"), 400, "no URL"),
    "to-latin": (b"HTTP/1.1 302 Found\r\nlocation: /\xe4\r\n\r\n", 400, "no URL"),
    "to-nowhere": (plain(b"", status="302 Found"), 502, "without a place"),
    "to-two": (plain(b"", "location: /ok", "location: /b", status="302 Found"), 400, "no URL"),
    "to-long": (moved("/" + "a" * 5000), 400, "no URL"),
}


async def test_a_hostile_answer_is_refused(world: World) -> None:
    for page, (answer, _, _) in HOSTILE_ANSWERS.items():
        if isinstance(answer, bytes):
            answer = answer.replace(b"{port}", str(world.site.port).encode())
        world.site.pages[f"/{page}"] = answer
    chain = {"/two": moved("/three"), "/three": moved("/four"), "/four": moved("/ok")}
    world.site.pages |= {"/ok": plain(PNG), **chain}
    fetcher = world.fetcher(max_bytes=1 << 20)
    for name, (_, status, words) in HOSTILE_ANSWERS.items():
        refused = await refusal(fetcher, world.url(f"/{name}"))
        assert (words in str(refused), refused.status) == (True, status), (name, refused)
        # Nothing of what is there, and no address of a network.
        for secret in ("secret", "IHDR", "10.0.0", "ESMTP"):
            assert secret not in str(refused), name


async def test_a_name_that_leads_inside_is_not_connected_to(world: World) -> None:
    fetcher = world.fetcher()
    for host, addresses in INSIDE.items():
        refused = await refusal(fetcher, world.url(host=host))
        assert "not public" in str(refused), host
        assert not any(address in str(refused) for address in addresses)
        assert (refused.status, refused.code) == (400, "media_url_refused")
    assert not world.site.heads


async def test_an_address_inside_is_not_connected_to_even_if_it_is_listed(world: World) -> None:
    hosts = ("127.0.0.1", "[::1]", "10.0.0.1", "[::ffff:10.0.0.1]", "169.254.169.254", "0.0.0.0")
    listed = [f"{host}:{world.site.port}" for host in hosts]
    fetcher = world.fetcher(allowed_domains=listed, allowed_networks=[])
    for host in hosts:
        address = host.strip("[]")
        world.names |= {address: [address], str(ipaddress.ip_address(address)): [address]}
        assert "not public" in str(await refusal(fetcher, world.url(host=host))), host
    assert not world.site.heads


async def test_a_name_is_looked_up_once_and_what_was_checked_is_connected_to(world: World) -> None:
    world.site.pages["/a.png"] = plain(PNG)
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    lookups = []

    def rebinding(host: str, port: int) -> list[str]:
        lookups.append(host)
        return next(answers)

    world.resolve = rebinding  # type: ignore[method-assign]
    fetcher = world.fetcher(cache_bytes=0)
    assert await get(fetcher, world.url()) == [PNG]
    assert lookups == [HOST]
    assert "not public" in str(await refusal(fetcher, world.url()))
    assert len(world.site.heads) == 1


async def test_an_address_that_nobody_answers_at_is_followed_by_the_next(world: World) -> None:
    world.site.pages["/a.png"] = plain(PNG)
    world.names[HOST] = ["127.0.0.9", "127.0.0.1"]
    assert await get(world.fetcher(), world.url()) == [PNG]
    world.names[HOST] = ["127.0.0.9"]
    refused = await refusal(world.fetcher(), world.url())
    assert (refused.status, refused.code) == (502, "media_url_failed")


async def test_who_is_slow_is_given_up(world: World) -> None:
    def then_waits(answer: Answer) -> Answer:
        async def page(writer: asyncio.StreamWriter) -> None:
            await answer(writer)
            await asyncio.sleep(60)

        return page

    slow = {
        "/trickles": slowly(plain(PNG), 1),
        "/head": slowly(OK.encode(), 1),
        "/body": slowly(plain(bytes(10_000)), 100),
        "/nothing": slowly(b""),
    }
    world.site.pages |= {path: then_waits(answer) for path, answer in slow.items()}
    fetcher = world.fetcher(timeout_s=1.0)
    for refused in await asyncio.gather(*(refusal(fetcher, world.url(path)) for path in slow)):
        assert (refused.status, refused.code) == (504, "media_url_timeout")
        assert "within 1 s" in str(refused)
    await until(lambda: world.site.closed_early == len(slow))


FAILING = {
    name: HOSTILE_ANSWERS[name][0] for name in ("cut", "cut-chunk", "nothing", "no-http", "broken")
}


@pytest.mark.parametrize("name", FAILING)
async def test_a_server_that_fails_is_asked_once_more(
    world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answers = iter([FAILING[name], plain(PNG), *[FAILING[name]] * 2])

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(next(answers))

    world.site.pages["/a.png"] = answer
    fetcher = world.fetcher(cache_bytes=0)
    assert await get(fetcher, world.url()) == [PNG]
    assert len(world.site.heads) == 2
    assert "asked for once more" in caplog.text
    assert (await refusal(fetcher, world.url())).status == 502
    assert len(world.site.heads) == 4


async def test_a_router_without_files_says_so_once_for_each_file(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    fetcher = world.fetcher()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), hard))
        try:
            for page in ("/a", "/b"):
                assert (await refusal(fetcher, world.url(page))).status == 502
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2
    assert all("Too many open files" in each for each in said)


@pytest.mark.parametrize("name", ["missing", "too-many", "empty", "bomb", "announced"])
async def test_who_does_not_fail_is_not_asked_once_more(world: World, name: str) -> None:
    world.site.pages["/a.png"] = HOSTILE_ANSWERS[name][0]
    await refusal(world.fetcher(max_bytes=1 << 20), world.url())
    assert len(world.site.heads) == 1


async def test_both_tries_share_one_time(world: World) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        if len(world.site.heads) == 1:
            writer.write(plain(b"", status="503 Service Unavailable"))
        else:
            await asyncio.sleep(60)

    world.site.pages["/a.png"] = answer
    refused = await refusal(world.fetcher(timeout_s=1.0), world.url())
    assert (refused.status, refused.code) == (504, "media_url_timeout")
    await until(lambda: world.site.closed_early == 1)
    assert len(world.site.heads) == 2


SIZES = [1, 2, 3, 4, 65_535, 65_536, 65_537, 300_000, 1_600_001]


@pytest.mark.parametrize("framing", ["length", "chunks", "end"])
async def test_what_comes_is_what_was_sent(world: World, framing: str) -> None:
    fetcher = world.fetcher()
    for size in SIZES:
        data = bytes(index * 7 % 251 for index in range(size))
        step = max(size // 7, 1)
        pieces = [data[place : place + step] for place in range(0, size, step)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"
        head = OK.encode()
        world.site.pages[f"/{size}"] = {
            "length": head + b"content-length: %d\r\n\r\n" % size + data + b"HTTP/1.1 200 OK\r\n",
            "chunks": head + b"transfer-encoding: chunked\r\n\r\n" + chunks,
            "end": b"HTTP/1.0 200 OK\r\n\r\n" + data,
        }[framing]
    got = await get(fetcher, *[world.url(f"/{size}") for size in SIZES])
    assert [len(data) for data in got] == SIZES
    for data in got:
        assert data == bytes(index * 7 % 251 for index in range(len(data)))


async def test_redirects_are_followed_within_what_is_allowed(world: World) -> None:
    world.names["cdn.test"] = ["127.0.0.1"]
    world.site.pages = {
        "/a.png": moved("b?x=1"),
        "/b?x=1": moved(f"//cdn.test:{world.site.port}/c", "307 Temporary Redirect"),
        "/c": plain(PNG),
    }
    assert await get(world.fetcher(), world.url()) == [PNG]
    hosts = [head.split(b"\r\n")[1] for head in world.site.heads]
    port = world.site.port
    expected = [f"host: {HOST}:{port}", f"host: {HOST}:{port}", f"host: cdn.test:{port}"]
    assert [host.decode() for host in hosts] == expected


async def test_nothing_of_the_router_is_told_to_a_site(world: World) -> None:
    world.site.pages["/a.png"] = plain(PNG, "set-cookie: a=b")
    fetcher = world.fetcher(cache_bytes=0)
    await get(fetcher, world.url())
    await get(fetcher, world.url())
    assert len(world.site.heads) == 2
    for head in world.site.heads:
        names = {line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:] if line}
        assert names == {b"host", b"accept", b"accept-encoding", b"user-agent", b"connection"}
        assert b"identity" in head


async def test_a_url_that_many_ask_for_is_fetched_once(world: World) -> None:
    go_on = asyncio.Event()
    world.site.pages["/a.png"] = once(go_on, plain(PNG))
    fetcher = world.fetcher()
    asked = [asyncio.create_task(get(fetcher, world.url(), world.url())) for _ in range(50)]
    await until(lambda: bool(world.site.heads))
    go_on.set()
    assert await asyncio.gather(*asked) == [[PNG] * 2] * 50
    assert await get(fetcher, world.url("/a.png#other")) == [PNG]
    assert len(world.site.heads) == 1
    text = world.metrics.exposition().decode()
    assert 'epd_router_media_urls_total{source="fetch"} 1.0' in text
    assert 'epd_router_media_urls_total{source="joined"} 49.0' in text


async def test_what_comes_while_a_request_is_read_is_put_in_when_it_is_read_again(
    world: World,
) -> None:
    world.site.pages["/a.png"] = plain(PNG)
    fetcher = world.fetcher()
    await get(fetcher, world.url())
    with fetcher.of_request() as linked:
        assert linked.find_media(world.url().encode(), WHERE) is None
        await asyncio.sleep(0)
        assert linked.find_media(world.url().encode(), WHERE) is not None
        assert linked.wanted
        assert await linked.fetch() == len(base64.b64encode(PNG))
        assert linked.nbytes == 0


async def test_what_one_gives_up_is_fetched_for_the_others(world: World) -> None:
    world.site.pages["/a.png"] = slowly(plain(PNG), 50, 0.05)
    fetcher = world.fetcher()
    first, second = (asyncio.create_task(get(fetcher, world.url())) for _ in range(2))
    await until(lambda: bool(world.site.heads))
    first.cancel()
    assert await second == [PNG]
    assert first.cancelled()


async def test_what_all_give_up_is_not_fetched_to_its_end(world: World) -> None:
    world.site.pages["/a.png"] = slowly(plain(PNG), 1, 0.5)
    fetcher = world.fetcher()
    with fetcher.of_request() as one, fetcher.of_request() as other:
        for each in (one, other):
            assert each.find_media(world.url().encode(), WHERE) is None
        await until(lambda: bool(world.site.heads))
        world.site.pages["/a.png"] = plain(PNG)
    # Who comes in this moment does not join what ends.
    assert await get(fetcher, world.url()) == [PNG]
    await until(lambda: world.site.closed_early == 1)
    cancelled = 'epd_router_media_fetches_total{result="cancelled"} 1.0'
    assert cancelled in world.metrics.exposition().decode()


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        ("x: y", True),
        ("cache-control: public, max-age=60", True),
        ("cache-control: max-age=0", False),
        ("cache-control: no-store", False),
        ("Cache-Control: Private, max-age=60", False),
        ("cache-control: no-cache", False),
        ("cache-control: nonsense", True),
    ],
)
async def test_a_site_can_ask_not_to_be_kept(world: World, header: str, kept: bool) -> None:
    world.site.pages["/a.png"] = plain(PNG, header)
    fetcher = world.fetcher()
    for _ in range(3):
        await get(fetcher, world.url())
    assert len(world.site.heads) == (1 if kept else 3)


async def test_a_file_is_kept_for_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.site.pages = dict.fromkeys(("/a.png", "/b.png"), plain(PNG))
    fetcher = world.fetcher()
    for _ in range(2):
        await get(fetcher, world.url("/a.png"))
    monkeypatch.setattr(media_urls, "CACHE_S", 0.0)
    for _ in range(2):
        await get(fetcher, world.url("/b.png"))
    assert world.site.paths == ["/a.png", "/b.png", "/b.png"]


async def test_the_file_longest_not_asked_for_makes_room(world: World) -> None:
    size = 30_000
    world.site.pages = {f"/{number}": plain(bytes(size)) for number in range(4)}
    fetcher = world.fetcher(cache_bytes=2 * (size * 4 // 3 + 1000))
    for path in ("/0", "/1", "/0", "/2", "/0", "/1"):
        await get(fetcher, world.url(path))
    assert world.site.paths == ["/0", "/1", "/2", "/1"]


@pytest.mark.parametrize(("hosts", "most"), [([HOST], 3), ([HOST, "other.test"], 4)])
async def test_so_many_are_fetched_at_a_time(
    world: World, hosts: list[str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_urls, "MAX_FETCHES", 4)
    monkeypatch.setattr(media_urls, "MAX_FETCHES_OF_HOST", 3)

    async def when_all_turns_are_taken(writer: asyncio.StreamWriter) -> None:
        await until(lambda: world.site.most_open >= most)
        await asyncio.sleep(0.05)
        writer.write(plain(PNG))

    world.names["other.test"] = ["127.0.0.1"]
    world.site.pages = {f"/{number}": when_all_turns_are_taken for number in range(12)}
    fetcher = world.fetcher()
    await get(fetcher, *[world.url(path, host) for path in world.site.pages for host in hosts])
    assert world.site.most_open == most


async def test_who_waits_too_long_for_a_turn_is_told_to_come_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_urls, "MAX_FETCHES_OF_HOST", 1)
    paths = [f"/{number}" for number in range(4)]
    world.site.pages = {**dict.fromkeys(paths, never), "/a.png": plain(PNG)}
    fetcher = world.fetcher(timeout_s=0.3)
    told = await asyncio.gather(*(refusal(fetcher, world.url(path)) for path in paths))
    assert {each.status for each in told} == {503, 504}
    busy = next(each for each in told if each.status == 503)
    assert (busy.code, busy.retry_after_s) == ("too_many_fetches", 2)
    assert await get(fetcher, world.url()) == [PNG]


async def test_what_is_on_its_way_counts_as_memory(world: World) -> None:
    world.site.pages = {"/a.png": plain(bytes(1 << 20))}
    fetcher = world.fetcher()
    world.held.count += (128 << 20) - (1 << 18)
    refused = await refusal(fetcher, world.url())
    assert (refused.status, refused.code) == (503, "too_many_bytes")
    world.held.count -= (128 << 20) - (1 << 18)


async def test_names_that_are_looked_up_for_long_hold_no_other_name_up(world: World) -> None:
    world.site.pages = dict.fromkeys(("/a.png", "/b.png"), plain(PNG))
    answered, resolve = threading.Event(), world.resolve
    slow = [f"n{number}.slow.test" for number in range(12)]

    def look_up(host: str, port: int) -> list[str]:
        found = resolve(host, port)
        if host in slow:
            answered.wait(30)
        return found

    world.resolve = look_up  # type: ignore[method-assign]
    world.names |= {name: ["127.0.0.1"] for name in slow}
    fetcher = world.fetcher()
    waiting = [asyncio.create_task(get(fetcher, world.url(host=name))) for name in slow]
    try:
        await until(lambda: len(world.looked_up) == media_urls.LOOKUPS_OF_DOMAIN)
        assert await get(fetcher, world.url()) == [PNG]
        # Who gives up leaves the thread where it is: nobody else of the domain has it yet.
        for task in waiting[:8]:
            task.cancel()
        await asyncio.gather(*waiting[:8], return_exceptions=True)
        assert await get(fetcher, world.url("/b.png")) == [PNG]
        assert sum(name in slow for name in world.looked_up) == media_urls.LOOKUPS_OF_DOMAIN
    finally:
        answered.set()
    assert await asyncio.gather(*waiting[8:]) == [[PNG]] * 4


async def test_https_asks_for_the_names_certificate(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.site.stop()
    cert, key = make_certificate(tmp_path, names=f"DNS:{HOST}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    asked: list[str | None] = []
    context.sni_callback = lambda socket, name, _: asked.append(name)
    world.site.tls = context
    await world.site.start()
    world.site.pages["/a.png"] = plain(PNG)
    world.names["other.test"] = ["127.0.0.1"]

    refused = await refusal(world.fetcher(), world.url(scheme="https"))
    assert (refused.status, refused.code) == (502, "media_url_failed")

    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    trusting = world.fetcher()
    assert await get(trusting, world.url(scheme="https")) == [PNG]
    assert (await refusal(trusting, world.url(scheme="https", host="other.test"))).status == 502
    assert asked == [HOST, HOST, "other.test"]
    assert len(world.site.heads) == 1


async def test_what_a_client_signs_its_urls_with_is_not_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    refused = [
        await refusal(world.fetcher(), url)
        for url in (
            world.url("/a.png?signature=secret"),
            "https://user:secret@site.test/a.png",
            "https://site.test:x/a.png?signature=secret",
            "https://elsewhere.test:1/a.png?signature=secret",
        )
    ]
    for each in refused:
        assert "secret" not in str(each)
    assert "secret" not in caplog.text


async def test_a_fetcher_that_is_closed_leaves_nobody_waiting(world: World) -> None:
    world.site.pages["/a.png"] = slowly(plain(PNG), 1, 0.5)
    fetcher = world.fetcher()
    asked = asyncio.create_task(get(fetcher, world.url()))
    await until(lambda: bool(world.site.heads))
    await fetcher.close()
    with pytest.raises(RequestError, match="stopping"):
        await asyncio.wait_for(asked, DEADLINE_S)
