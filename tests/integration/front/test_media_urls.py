"""Media by URL at the front: fetches from hostile sites."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import resource
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from epd_portable.config.front import MediaUrls
from epd_portable.errors import RequestError
from epd_portable.front import media_urls
from epd_portable.front.media_urls import UrlFetcher
from epd_portable.front.metrics import FrontMetrics
from epd_portable.placement.instances import EndpointPool
from tests.certificates import make_certificate
from tests.integration.front.web import Answer, Site, moved, never, once, plain
from tests.unit.media.samples import STILLS
from tests.waiting import DEADLINE_S, until_async

PNG = STILLS["png"]
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
        self.metrics = FrontMetrics(EndpointPool())
        self.fetchers: list[UrlFetcher] = []

    def resolve(self, host: str, port: int) -> list[str]:
        self.looked_up.append(host)
        if host not in self.names:
            raise OSError("unknown")
        return self.names[host]

    def fetcher(
        self, *, timeout_s: float = DEADLINE_S, most_bytes: int = 128 << 20, **settings: Any
    ) -> UrlFetcher:
        self._monkeypatch.setattr(media_urls, "TIMEOUT_S", timeout_s)
        options = {
            "allowed_domains": [f"*:{self.site.port}"],
            "allowed_networks": ["127.0.0.0/8"],
            **settings,
        }
        self.fetchers.append(
            UrlFetcher(
                MediaUrls.model_validate(options), most_bytes, self.metrics, resolve=self.resolve
            )
        )
        return self.fetchers[-1]

    def url(self, path: str = "/a.png", host: str = HOST, scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.site.port}{path}"


async def get(fetcher: UrlFetcher, *urls: str) -> list[bytes]:
    """Fetch the files of one request."""
    return await asyncio.gather(*map(fetcher.fetch, urls))


async def refusal(fetcher: UrlFetcher, url: str) -> RequestError:
    with pytest.raises(RequestError) as refused:
        await get(fetcher, url)
    return refused.value


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    world = World(monkeypatch)
    await world.site.start()
    yield world
    for fetcher in world.fetchers:
        await fetcher.close()
    await world.site.stop()


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
    "tiny-chunks": (endless(CODED, b"1\r\nx\r\n" * 2000), 413, "it is longer"),
    "bomb": (plain(gzip.compress(bytes(9 << 20)), "content-encoding: gzip"), 502, "compressed it"),
    "deflate": (plain(PNG, "content-encoding: identity, deflate"), 502, "compressed it"),
    "empty": (plain(b""), 400, "sent nothing"),
    "cut": (OK.encode() + b"content-length: 5000\r\n\r\n" + PNG, 502, "disconnected"),
    "cut-chunk": (CODED.encode() + b"50\r\n" + PNG[:20], 502, "disconnected"),
    "two-lengths": (plain(PNG, "content-length: 6"), 502, "invalid HTTP"),
    "length-and-chunks": (plain(PNG, "transfer-encoding: chunked"), 502, "invalid HTTP"),
    "odd-length": (OK.encode() + b"content-length: 0x50\r\n\r\n" + PNG, 502, "invalid HTTP"),
    "coding": (OK.encode() + b"transfer-encoding: gzip, chunked\r\n\r\n", 502, "invalid HTTP"),
    "two-codings": (
        plain(PNG, "content-encoding: identity", "content-encoding: gzip"),
        502,
        "compressed it",
    ),
    "no-http": (b"220 mail.inside ESMTP\r\n", 502, "invalid HTTP"),
    "redis": (b"-ERR unknown command 'GET'\r\n", 502, "invalid HTTP"),
    "nothing": (b"", 502, "disconnected"),
    "endless-header": (endless(OK + "x: ", b"x" * 4096), 502, "invalid HTTP"),
    "endless-headers": (endless(OK, b"x-header: 1\r\n" * 200), 502, "invalid HTTP"),
    "equal-headers": (OK.encode() + b"x:y\r\n" * 20_000 + b"\r\n" + PNG, 502, "invalid HTTP"),
    "endless-trailer": (endless(CODED + "1\r\nx\r\n0\r\nx: ", b"x" * 65536), 502, "invalid HTTP"),
    "switches": (
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        502,
        "responded 101",
    ),
    "no-content": (b"HTTP/1.1 204 No Content\r\n\r\n", 502, "responded 204"),
    "partial": (plain(PNG, status="206 Partial Content"), 502, "responded 206"),
    "not-modified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", 502, "responded 304"),
    "choices": (plain(b"", "location: /ok", status="300 Multiple Choices"), 502, "responded 300"),
    "forbidden": (plain(b"secret", status="403 Forbidden"), 400, "responded 403"),
    "missing": (plain(b"", status="404 Not Found"), 400, "responded 404"),
    "too-many": (plain(b"", status="429 Too Many Requests"), 502, "responded 429"),
    "broken": (plain(b"secret", status="500 Internal Server Error"), 502, "responded 500"),
    # Redirects; "{port}" is the site's.
    "to-itself": (moved("/to-itself"), 400, "more than 3 redirects"),
    "to-and-fro": (moved("http://site.test:{port}/fro"), 400, "more than 3 redirects"),
    "fro": (moved("/to-and-fro"), 400, "more than 3 redirects"),
    "one": (moved("/two"), 400, "more than 3 redirects"),
    "to-file": (moved("file:///etc/passwd"), 400, "no http or https URL"),
    "to-metadata": (moved("http://169.254.169.254/latest"), 400, "not among"),
    "to-inside": (moved("http://inside.test:{port}/ok"), 400, "not public"),
    "to-unknown": (moved("http://unknown.test:{port}/ok"), 502, "unknown"),
    "to-backslash": (moved("\\\\127.0.0.1\\a"), 400, "no URL"),
    "to-latin": (b"HTTP/1.1 302 Found\r\nlocation: /\xe4\r\n\r\n", 400, "no URL"),
    "to-nowhere": (plain(b"", status="302 Found"), 502, "with 0 locations"),
    "to-two": (
        plain(b"", "location: /ok", "location: /b", status="302 Found"),
        502,
        "with 2 locations",
    ),
    "to-long": (moved("/" + "a" * 5000), 400, "no URL"),
}


async def test_hostile_response_is_refused(world: World) -> None:
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


async def test_name_of_an_internal_address_is_not_connected_to(world: World) -> None:
    fetcher = world.fetcher()
    for host, addresses in INSIDE.items():
        refused = await refusal(fetcher, world.url(host=host))
        assert "not public" in str(refused), host
        assert not any(address in str(refused) for address in addresses)
        assert (refused.status, refused.code) == (400, "media_url_refused")
    assert not world.site.heads


async def test_internal_address_is_not_connected_to_when_listed(world: World) -> None:
    hosts = ("127.0.0.1", "[::1]", "10.0.0.1", "[::ffff:10.0.0.1]", "169.254.169.254", "0.0.0.0")
    listed = [f"{host}:{world.site.port}" for host in hosts]
    fetcher = world.fetcher(allowed_domains=listed, allowed_networks=[])
    for host in hosts:
        address = host.strip("[]")
        world.names |= {address: [address], str(ipaddress.ip_address(address)): [address]}
        assert "not public" in str(await refusal(fetcher, world.url(host=host))), host
    assert not world.site.heads


async def test_name_is_looked_up_once_and_its_address_pinned(world: World) -> None:
    world.site.pages["/a.png"] = plain(PNG)
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    lookups = []

    def rebinding(host: str, port: int) -> list[str]:
        lookups.append(host)
        return next(answers)

    world.resolve = rebinding
    fetcher = world.fetcher(cache_bytes=0)
    assert await get(fetcher, world.url()) == [PNG]
    assert lookups == [HOST]
    assert "not public" in str(await refusal(fetcher, world.url()))
    assert len(world.site.heads) == 1


async def test_next_address_is_tried_when_one_is_unreachable(world: World) -> None:
    world.site.pages["/a.png"] = plain(PNG)
    world.names[HOST] = ["127.0.0.9", "127.0.0.1"]
    assert await get(world.fetcher(), world.url()) == [PNG]
    world.names[HOST] = ["127.0.0.9"]
    refused = await refusal(world.fetcher(), world.url())
    assert (refused.status, refused.code) == (502, "media_url_failed")


async def test_slow_and_endless_responses_time_out(world: World) -> None:
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
        "/hints": endless("", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100),
        "/extension": endless(CODED + "1\r\nx\r\n1;", b"x" * 65536),
    }
    world.site.pages |= {path: then_waits(answer) for path, answer in slow.items()}
    fetcher = world.fetcher(timeout_s=1.0)
    for refused in await asyncio.gather(*(refusal(fetcher, world.url(path)) for path in slow)):
        assert (refused.status, refused.code) == (504, "media_url_timeout")
        assert "within 1 s" in str(refused)
    await until_async(lambda: world.site.closed_early == len(slow))


FAILING = {name: HOSTILE_ANSWERS[name][0] for name in ("cut", "cut-chunk", "no-http", "broken")}


@pytest.mark.parametrize("name", FAILING)
async def test_failing_server_is_requested_once_more(
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
    assert "requested once more" in caplog.text
    assert (await refusal(fetcher, world.url())).status == 502
    assert len(world.site.heads) == 4


async def test_front_without_free_files_logs_each_failed_fetch(
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
async def test_refusing_server_is_requested_once(world: World, name: str) -> None:
    world.site.pages["/a.png"] = HOSTILE_ANSWERS[name][0]
    await refusal(world.fetcher(max_bytes=1 << 20), world.url())
    assert len(world.site.heads) == 1


async def test_both_attempts_share_one_timeout(world: World) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        if len(world.site.heads) == 1:
            writer.write(plain(b"", status="503 Service Unavailable"))
        else:
            await asyncio.sleep(60)

    world.site.pages["/a.png"] = answer
    refused = await refusal(world.fetcher(timeout_s=1.0), world.url())
    assert (refused.status, refused.code) == (504, "media_url_timeout")
    await until_async(lambda: world.site.closed_early == 1)
    assert len(world.site.heads) == 2


SIZES = [1, 2, 3, 4, 65_535, 65_536, 65_537, 300_000, 1_600_001]


@pytest.mark.parametrize("framing", ["length", "chunks", "end"])
async def test_fetched_file_equals_the_sent_one(world: World, framing: str) -> None:
    fetcher = world.fetcher(max_bytes=SIZES[-1])
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


async def test_redirects_to_allowed_hosts_are_followed(world: World) -> None:
    world.names["cdn.test"] = ["127.0.0.1"]
    world.site.pages = {
        "/a.png": moved("b?x=1"),
        "/b?x=1": moved(f"//cdn.test:{world.site.port}/c", "307 Temporary Redirect"),
        "/c": plain(PNG),
    }
    assert await get(world.fetcher(), world.url()) == [PNG]
    hosts = [head.split(b"\r\n")[1].lower() for head in world.site.heads]
    port = world.site.port
    expected = [f"host: {HOST}:{port}", f"host: {HOST}:{port}", f"host: cdn.test:{port}"]
    assert [host.decode() for host in hosts] == expected


async def test_site_gets_no_cookie_or_other_header(world: World) -> None:
    world.site.pages["/a.png"] = plain(PNG, "set-cookie: a=b")
    fetcher = world.fetcher(cache_bytes=0)
    await get(fetcher, world.url())
    await get(fetcher, world.url())
    assert len(world.site.heads) == 2
    for head in world.site.heads:
        names = {line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:] if line}
        assert names == {b"host", b"accept", b"accept-encoding", b"user-agent", b"connection"}
        assert b"identity" in head


async def test_url_of_many_requests_is_fetched_once(world: World) -> None:
    go_on = asyncio.Event()
    world.site.pages["/a.png"] = once(go_on, plain(PNG))
    fetcher = world.fetcher()
    asked = [asyncio.create_task(get(fetcher, world.url(), world.url())) for _ in range(50)]
    await until_async(lambda: bool(world.site.heads))
    go_on.set()
    assert await asyncio.gather(*asked) == [[PNG] * 2] * 50
    assert await get(fetcher, world.url("/a.png#other")) == [PNG]
    assert len(world.site.heads) == 1
    text = generate_latest(world.metrics.registry).decode()
    for result, count in (("ok", 1), ("joined", 99), ("cache", 1)):
        assert f'epd_front_media_fetches_total{{result="{result}"}} {count}.0' in text


async def test_fetch_goes_on_when_one_of_two_requests_ends(world: World) -> None:
    world.site.pages["/a.png"] = slowly(plain(PNG), 50, 0.05)
    fetcher = world.fetcher()
    first, second = (asyncio.create_task(get(fetcher, world.url())) for _ in range(2))
    await until_async(lambda: bool(world.site.heads))
    first.cancel()
    assert await second == [PNG]
    assert first.cancelled()


async def test_fetch_ends_when_no_request_waits_for_it(world: World) -> None:
    world.site.pages["/a.png"] = slowly(plain(PNG), 1, 0.5)
    fetcher = world.fetcher()
    waiting = [asyncio.create_task(get(fetcher, world.url())) for _ in range(2)]
    await until_async(lambda: bool(world.site.heads))
    world.site.pages["/a.png"] = plain(PNG)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    # A request of this moment does not join the fetch that ends.
    assert await get(fetcher, world.url()) == [PNG]
    await until_async(lambda: world.site.closed_early == 1)
    cancelled = 'epd_front_media_fetches_total{result="cancelled"} 1.0'
    assert cancelled in generate_latest(world.metrics.registry).decode()


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
async def test_cache_control_of_a_site_is_obeyed(world: World, header: str, kept: bool) -> None:
    world.site.pages["/a.png"] = plain(PNG, header)
    fetcher = world.fetcher()
    for _ in range(3):
        await get(fetcher, world.url())
    assert len(world.site.heads) == (1 if kept else 3)


async def test_file_is_cached_for_a_limited_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.site.pages = dict.fromkeys(("/a.png", "/b.png"), plain(PNG))
    fetcher = world.fetcher()
    for _ in range(2):
        await get(fetcher, world.url("/a.png"))
    monkeypatch.setattr(media_urls, "CACHE_S", 0.0)
    for _ in range(2):
        await get(fetcher, world.url("/b.png"))
    assert world.site.paths == ["/a.png", "/b.png", "/b.png"]


async def test_least_recently_used_file_is_evicted(world: World) -> None:
    size = 30_000
    world.site.pages = {f"/{number}": plain(bytes(size)) for number in range(4)}
    fetcher = world.fetcher(cache_bytes=2 * (size * 4 // 3 + 1000))
    for path in ("/0", "/1", "/0", "/2", "/0", "/1"):
        await get(fetcher, world.url(path))
    assert world.site.paths == ["/0", "/1", "/2", "/1"]


@pytest.mark.parametrize(("hosts", "most"), [([HOST], 3), ([HOST, "other.test"], 4)])
async def test_fetches_at_a_time_are_limited(
    world: World, hosts: list[str], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_urls, "MAX_FETCHES", 4)
    monkeypatch.setattr(media_urls, "MAX_FETCHES_OF_HOST", 3)

    async def when_all_turns_are_taken(writer: asyncio.StreamWriter) -> None:
        await until_async(lambda: world.site.most_open >= most)
        await asyncio.sleep(0.05)
        writer.write(plain(PNG))

    world.names["other.test"] = ["127.0.0.1"]
    world.site.pages = {f"/{number}": when_all_turns_are_taken for number in range(12)}
    fetcher = world.fetcher()
    await get(fetcher, *[world.url(path, host) for path in world.site.pages for host in hosts])
    assert world.site.most_open == most


async def test_host_without_a_free_connection_times_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_urls, "MAX_FETCHES_OF_HOST", 1)
    paths = [f"/{number}" for number in range(4)]
    world.site.pages = {**dict.fromkeys(paths, never), "/a.png": plain(PNG)}
    fetcher = world.fetcher(timeout_s=0.3)
    refused = await asyncio.gather(*(refusal(fetcher, world.url(path)) for path in paths))
    assert {each.code for each in refused} == {"media_url_timeout"}
    assert world.site.most_open == 1
    monkeypatch.setattr(media_urls, "TIMEOUT_S", DEADLINE_S)
    assert await get(fetcher, world.url()) == [PNG]


async def test_files_on_their_way_count_as_memory(world: World) -> None:
    world.site.pages = {"/a.png": plain(bytes(1 << 20)), "/b.png": plain(bytes(1 << 18))}
    fetcher = world.fetcher(most_bytes=1 << 19)
    refused = await refusal(fetcher, world.url())
    assert (refused.status, refused.code, refused.retry_after_s) == (503, "busy", 2)
    assert await get(fetcher, world.url("/b.png")) == [bytes(1 << 18)]


async def test_slow_lookups_of_a_domain_delay_no_other_domain(world: World) -> None:
    world.site.pages = dict.fromkeys(("/a.png", "/b.png"), plain(PNG))
    answered, resolve = threading.Event(), world.resolve
    slow = [f"n{number}.slow.test" for number in range(12)]

    def look_up(host: str, port: int) -> list[str]:
        found = resolve(host, port)
        if host in slow:
            answered.wait(30)
        return found

    world.resolve = look_up
    world.names |= {name: ["127.0.0.1"] for name in slow}
    fetcher = world.fetcher()
    waiting = [asyncio.create_task(get(fetcher, world.url(host=name))) for name in slow]
    try:
        await until_async(lambda: len(world.looked_up) == media_urls.LOOKUPS_OF_DOMAIN)
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


async def test_https_checks_the_certificate_of_the_name(
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


async def test_signature_of_a_url_is_not_logged(
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
