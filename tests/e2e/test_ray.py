"""The commands of docs/ray.md on a real Ray of three nodes on this machine, with real engines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from epd_portable.config.secret import make_secret_file
from epd_portable.launch.plan.ports import port_source
from epd_portable.launch.run.sessions import SHM
from tests.e2e import asking

pytestmark = [
    pytest.mark.full,
    pytest.mark.needs_ray,
    # Ray's own, and those of what it imports.
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).parents[2]
APPLICATION = ROOT / "deploy/ray/serve.yaml"
PAGE = ROOT / "docs" / "ray.md"
BIN = Path(sys.executable).parent
DEADLINE_S = 240.0
HEAD, *WORKERS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Addresses of the loopback interface: to Ray, and to launchers, three machines."""
SETTINGS = ("--set", "engine_args.max_model_len=1024", "--set", "transfer.pool_bytes=16MiB")
PAIRS = """
model: demo
instances: {encode: {count: 2}, prefill_decode: {count: 2}}
transfer: {pool_bytes: 16MiB}
router: {port: %d, drain_s: 20}
platform: {cpu: {engine_args: {dtype: bfloat16, enforce_eager: true}}}
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def until(probe: Callable[[], Any]) -> Any:
    """Return the first answer that is true."""
    end_s = time.monotonic() + DEADLINE_S
    while not (found := probe()):
        assert time.monotonic() < end_s, found
        time.sleep(0.5)
    return found


shm_prefixes: set[str] = set()
"""Of the runs whose processes `ours` has seen."""


def ours() -> dict[int, str]:
    """Return the processes of launchers, guards and engines on this machine."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and "epd_portable." in words and str(BIN) in words:
                found[process.pid] = words
    shm_prefixes.update(re.findall(r"launch\.run\.guard \S+ (\S+)", " ".join(found.values())))
    return found


def family(pid: int) -> set[int]:
    """Return a process and all that it has started."""
    process = psutil.Process(pid)
    return {pid, *(child.pid for child in process.children(recursive=True))}


def gone(pids: set[int]) -> bool:
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in pids
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, which runs nothing but a router, and two nodes with room for two launchers each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", "240")
        patch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
        from ray.cluster_utils import Cluster

        common = {"object_store_memory": 80 << 20, "include_dashboard": False}
        client_port = port_source("000000a0")()
        head = {"num_cpus": 0, "node_ip_address": HEAD, "ray_client_server_port": client_port}
        made = Cluster(initialize_head=True, head_node_args=head | common)
        made.client_address = f"ray://{HEAD}:{client_port}"
        try:
            made.workers = {
                address: made.add_node(num_cpus=4, node_ip_address=address, **common)
                for address in WORKERS
            }
            patch.setenv("RAY_ADDRESS", made.address)
            yield made
        finally:
            made.shutdown()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """What a test has started has ended with it."""
    assert not ours()
    yield
    until(lambda: not ours())
    # What a launcher reads on its node, its secret too.
    assert not list(Path(tempfile.gettempdir()).glob("epd-held-*"))
    assert shm_prefixes
    assert not [path for path in SHM.iterdir() if path.name.startswith(tuple(shm_prefixes))]


class Load:
    """Asks for pictures without a pause, in threads, until it is closed."""

    def __init__(self, url: str, *, clients: int, size: int = 112, **extra: Any) -> None:
        self.statuses: list[int] = []
        self._url = url
        self._size = size
        self._extra = extra
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        while not self._closed.is_set():
            number += 100
            body = asking.body(
                [asking.picture(number, self._size), asking.text("What is it?")], **self._extra
            )
            try:
                self.statuses.append(asking.post(self._url, body).status_code)
            except httpx.TransportError:
                self.statuses.append(0)

    def after(self, count: int) -> None:
        """Wait for so many more answers."""
        enough = len(self.statuses) + count
        until(lambda: len(self.statuses) >= enough)

    def close(self) -> list[int]:
        self._closed.set()
        for thread in self._threads:
            thread.join()
        return self.statuses


def launch(command: str) -> subprocess.CompletedProcess[str]:
    """Run commands of the page."""
    return subprocess.run(
        ["bash", "-ec", command],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
        check=False,
    )


def test_a_topology_on_a_cluster_outlives_a_node_and_a_kill(cluster: Any, tmp_path: Path) -> None:
    import ray

    port = port_source("000000a1")()
    config = tmp_path / "topology.yaml"
    config.write_text(PAIRS % port)
    up, stop = (
        next(block for block in blocks("bash") if f"epd-launch {word} --cluster" in block)
        for word in ("up", "stop")
    )
    asked = "--platform cuda --config configs/1e3pd.yaml"
    assert asked in up
    started = launch(up.replace(asked, f"--platform cpu --config {config}"))
    assert started.returncode == 0, started.stdout + started.stderr
    assert f"ready: http://{HEAD}:{port}/v1" in started.stdout
    assert "pair-1/encode-0@pair-1" in started.stdout  # `logs`
    url = f"http://{HEAD}:{port}"

    def launchers() -> dict[str, Any]:
        status = launch("epd-launch status --cluster auto --json")
        assert status.stdout, status.stderr
        return json.loads(status.stdout)["launchers"]

    def both_serve() -> dict[str, Any]:
        found = launchers()
        runs = {name: seen["run"] for name, seen in found.items() if seen and seen["run"]}
        serving = len(runs) == 3 and all(run["phase"] == "serving" for run in runs.values())
        return found if serving else {}

    there = both_serve()
    assert ours()
    load = Load(url, clients=3)
    try:
        load.after(5)
        lost = there["pair-0"]["host"]
        dead = [name for name, seen in there.items() if seen["host"] == lost]
        before = set().union(*(family(there[name]["run"]["pid"]) for name in dead))
        cluster.remove_node(cluster.workers.pop(lost), allow_graceful=False)
        until(lambda: gone(before))
        there = until(both_serve)
        assert there["pair-0"]["host"] in cluster.workers
        load.after(5)
        # An actor that is killed takes all with it, and comes back.
        before = family(there["pair-1"]["run"]["pid"])
        ray.init("auto", namespace="epd-epd", log_to_driver=False)
        try:
            ray.kill(ray.get_actor("pair-1"), no_restart=False)
        finally:
            ray.shutdown()
        until(lambda: gone(before))
        assert until(both_serve)["pair-1"]["run"]["pid"] not in before
        load.after(5)
    finally:
        statuses = load.close()
        stopped = launch(stop)
    assert stopped.returncode == 0, stopped.stderr
    assert set(statuses) == {200}
    assert launch("epd-launch status --cluster auto").returncode == 1


def test_a_topology_is_started_and_ended_from_a_machine_outside_the_cluster(
    cluster: Any, tmp_path: Path
) -> None:
    port = port_source("000000a3")()
    secret = tmp_path / "secret"
    make_secret_file(str(secret))
    config = ROOT / "configs" / "1e1pd.yaml"
    there = f"--cluster {cluster.client_address}"
    up = f"epd-launch up {there} --platform cpu --config {config} --port {port}"
    # A router that instances may join: no engine is needed.
    up += f" --set secret_file={secret} --set instances.encode.count=0"
    up += " --set instances.prefill_decode.count=0"
    with socket.create_server((HEAD, port)):
        refused = launch(up)
    assert refused.returncode == 1
    assert f"router: router.port {port} on {HEAD} is in use" in refused.stderr
    started = launch(up)
    try:
        assert f"ready: http://{HEAD}:{port}/v1" in started.stdout, started.stderr
        assert httpx.get(f"http://{HEAD}:{port}/health", trust_env=False).status_code == 503
        assert ours()
        again = launch(up)
        assert again.returncode == 2
        assert "runs there already (router)" in again.stderr
    finally:
        stopped = launch(f"epd-launch stop {there}")
    assert stopped.stdout == "epd has ended\n"


class Up:
    """``epd-launch up`` with the shipped pair, which is left alone until it waits for it."""

    def __init__(self, run_id: str, *words: str) -> None:
        command = [str(BIN / "epd-launch"), "up", "--cluster", "auto", *words]
        command += ["--config", str(ROOT / "configs" / "1e1pd.yaml")]
        self._process = subprocess.Popen(
            [*command, "--port", str(port_source(run_id)())],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._lines = iter(self._process.stdout.readline, "")
        self.waiting = next(line for line in self._lines if "waiting for pair-0" in line)
        assert ours()

    def end(self, signum: signal.Signals | None = None) -> tuple[int, str]:
        """Return its exit status and its further lines."""
        if signum is not None:
            self._process.send_signal(signum)
        return self._process.wait(DEADLINE_S * 2), "".join(self._lines)


def test_up_ends_with_the_reason_when_the_router_refuses(cluster: Any) -> None:
    refused = ("--set", "router.instance_networks=[10.0.0.0/8]")
    status, said = Up("000000a5", "--platform", "cpu", *SETTINGS, *refused).end()
    assert status == 1
    assert "pair-0: encode-0@pair-0 cannot join: router http://127.0.0.2:" in said
    assert "is in no network of router.instance_networks (10.0.0.0/8)" in said
    assert launch("epd-launch status --cluster auto").returncode == 1


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_up_ends_clean_at_a_signal_while_it_waits_for_a_node(
    cluster: Any, signum: signal.Signals, status: int
) -> None:
    up = Up("000000a6", "--platform", "cuda")
    assert "(no node has GPU 2: add one, or ask for less)" in up.waiting
    ended, said = up.end(signum)
    assert ended == status, said
    assert "***" not in said and "Traceback" not in said
    assert launch("epd-launch status --cluster auto").returncode == 1


def test_a_request_passes_the_proxy_of_serve_and_a_replica_once(
    cluster: Any, tmp_path: Path
) -> None:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    secret, access_log = tmp_path / "secret", tmp_path / "access.jsonl"
    make_secret_file(str(secret))
    [application] = yaml.safe_load(APPLICATION.read_text("utf-8"))["applications"]
    application["args"] |= {"platform": "cpu", "config": str(ROOT / "configs" / "1e1pd.yaml")}
    # A router that instances may join: no engine is needed.
    application["args"]["set"] = [f"secret_file={secret}", f"router.access_log={access_log}"]
    application["args"]["set"] += [
        f"instances.{group}.count=0" for group in ("encode", "prefill_decode")
    ]
    port = port_source("000000a4")()
    ray.init("auto", log_to_driver=False)
    try:
        serve.start(http_options={"host": HEAD, "port": port, "location": "HeadOnly"})
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))
        until(lambda: serve.status().applications["epd"].status == "RUNNING")
        assert ours()
        known = {"x-request-id": "epd-asked-once"}
        answer = asking.post(f"http://{HEAD}:{port}", asking.body("Hello"), headers=known)
        assert answer.status_code == 503 and "no prefill+decode instance" in answer.text
        logs = Path(cluster.head_node.get_session_dir_path()) / "logs" / "serve"

        def passed() -> list[int]:
            """Return how often its id is in the lines of requests, by who wrote them."""
            by_whom = logs.glob("proxy_*"), logs.glob("replica_epd_epd_*"), [access_log]
            said = ["\n".join(file.read_text("utf-8") for file in files) for files in by_whom]
            return [len(re.findall(r"epd-asked-once( -- POST|\")", each)) for each in said]

        until(lambda: all(passed()))
        assert passed() == [1, 1, 1]
    finally:
        serve.shutdown()
        ray.shutdown()


def test_serve_scales_replicas_by_how_full_they_are(cluster: Any, tmp_path: Path) -> None:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    [deployments] = blocks("yaml")
    [application] = yaml.safe_load(APPLICATION.read_text("utf-8"))["applications"]
    application |= yaml.safe_load(deployments)
    application["args"] |= {"platform": "cpu", "config": str(ROOT / "configs" / "1e1pd.yaml")}
    application["args"]["set"] = [each for each in SETTINGS if each != "--set"]
    [deployment] = application["deployments"]
    deployment["autoscaling_config"] |= {
        **{"upscale_delay_s": 1, "downscale_delay_s": 1, "max_replicas": 2}
    }
    if len(cluster.workers) < 2:
        cluster.workers["127.0.0.5"] = cluster.add_node(
            num_cpus=4, node_ip_address="127.0.0.5", object_store_memory=80 << 20
        )
    port = port_source("000000a2")()
    ray.init("auto", log_to_driver=False)
    try:
        serve.start(http_options={"host": HEAD, "port": port, "location": "HeadOnly"})
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))

        def replicas() -> int:
            seen = serve.status().applications["epd"]
            assert seen.status != "DEPLOY_FAILED", seen
            states = seen.deployments["epd"].replica_states if seen.deployments else {}
            return states.get("RUNNING", 0)

        until(lambda: replicas() == 1)
        url = f"http://{HEAD}:{port}"
        question = [asking.picture(1), asking.text("What is it?")]
        whole_answer = asking.ask(url, question)
        assert asking.ask_streamed(url, question).tokens == whole_answer.tokens
        assert httpx.get(f"{url}/v1/nothing", trust_env=False).status_code == 404
        load = Load(url, clients=24, size=448, max_tokens=200)
        try:
            until(lambda: replicas() == 2)
            # One is killed: nothing of it is left, and the other one serves.
            launchers = [pid for pid, words in ours().items() if "launch.cli up" in words]
            families = [family(pid) for pid in launchers]
            assert len(families) == 2
            killed, *_ = (
                each
                for each in ray.util.list_named_actors(all_namespaces=True)
                if "epd#epd#" in each["name"]
            )
            ray.kill(ray.get_actor(killed["name"], namespace=killed["namespace"]))
            until(lambda: any(map(gone, families)))
            assert not all(map(gone, families))
            load.after(24)
        finally:
            statuses = load.close()
        # Only what was open at the replica that was killed has failed.
        assert sum(status != 200 for status in statuses) <= 24
        until(lambda: replicas() == 1)
        assert asking.ask(url, question).tokens == whole_answer.tokens
    finally:
        serve.shutdown()
        ray.shutdown()
