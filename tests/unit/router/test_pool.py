from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from epd_portable.router.pool import PROBES_UNTIL_DOWN, Instance, Pool
from epd_portable.router.settings import InstanceSettings, RouterSettings


class Server:
    """Answers probes as told, without a network."""

    def __init__(self) -> None:
        self.answer: httpx.Response | Exception = httpx.Response(200)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def instance(server: Server) -> AsyncIterator[Instance]:
    settings = InstanceSettings(name="e", role="encode", url="http://e")
    async with httpx.AsyncClient(
        transport=httpx.MockTransport(server), base_url="http://e"
    ) as client:
        yield Instance(settings, client, warm_up=True)


async def test_an_instance_is_down_until_a_probe_succeeds(instance: Instance) -> None:
    assert not instance.healthy
    await instance.probe(1)
    assert instance.healthy
    await instance.wait_up()


async def test_a_refused_connection_takes_an_instance_down_at_once(
    instance: Instance, server: Server
) -> None:
    await instance.probe(1)
    server.answer = httpx.ConnectError("refused")
    await instance.probe(1)
    assert not instance.healthy
    assert "refused" in instance.reason
    await instance.wait_down()


async def test_a_bad_answer_takes_an_instance_down(instance: Instance, server: Server) -> None:
    await instance.probe(1)
    server.answer = httpx.Response(503)
    await instance.probe(1)
    assert not instance.healthy
    assert "503" in instance.reason


async def test_a_busy_instance_may_miss_a_probe(instance: Instance, server: Server) -> None:
    await instance.probe(1)
    server.answer = httpx.ReadTimeout("slow")
    for _ in range(PROBES_UNTIL_DOWN - 1):
        await instance.probe(1)
    assert instance.healthy
    await instance.probe(1)
    assert not instance.healthy


async def test_missed_probes_count_in_a_row_only(instance: Instance, server: Server) -> None:
    for _ in range(PROBES_UNTIL_DOWN):
        server.answer = httpx.ReadTimeout("slow")
        await instance.probe(1)
        server.answer = httpx.Response(200)
        await instance.probe(1)
        assert instance.healthy


async def test_an_instance_comes_back(instance: Instance) -> None:
    await instance.probe(1)
    instance.mark_down("lost")
    assert not instance.healthy
    await instance.probe(1)
    assert instance.healthy


@pytest.mark.parametrize("answer", [httpx.ConnectError("refused"), httpx.Response(503)])
async def test_after_its_process_was_gone_it_has_to_be_introduced_again(
    instance: Instance, server: Server, answer: httpx.Response | Exception
) -> None:
    await instance.probe(1)
    assert instance.state == "joining"
    instance.introduced()
    assert instance.state == "up"
    server.answer = answer
    await instance.probe(1)
    instance.introduced()
    server.answer = httpx.Response(200)
    await instance.probe(1)
    assert instance.state == "joining"


async def test_after_a_lost_connection_or_silence_it_goes_on(
    instance: Instance, server: Server
) -> None:
    await instance.probe(1)
    instance.introduced()
    instance.mark_down("lost")
    await instance.probe(1)
    assert instance.state == "up"
    server.answer = httpx.ReadTimeout("slow")
    for _ in range(PROBES_UNTIL_DOWN):
        await instance.probe(1)
    assert instance.state == "down"
    server.answer = httpx.Response(200)
    await instance.probe(1)
    assert instance.state == "up"


def test_work_in_flight_is_counted_even_when_it_fails(instance: Instance) -> None:
    with pytest.raises(ValueError, match="broken"), instance.working(), instance.working():
        assert instance.in_flight == 2
        raise ValueError("broken")
    assert instance.in_flight == 0


async def test_a_connection_reset_while_it_is_made_is_an_error_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What anyio raises then came as an ``AttributeError``, which ended who had asked."""

    async def reset(self: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", reset)
    pd = InstanceSettings(
        name="pd", role="prefill-decode", url="http://pd", control="tcp://127.0.0.1:9"
    )
    pool = Pool(RouterSettings(port=0, model="demo", instances=(pd,)))
    instance = pool.add(pd)
    await instance.probe(1.0)
    assert not instance.healthy
    assert "reset while connecting" in instance.reason
    await pool.remove("pd")
