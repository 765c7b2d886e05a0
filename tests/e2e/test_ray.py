"""The application of Ray Serve on a real Ray of three nodes, with real engines on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from epd_portable.launch.plan.machine import port_source
from epd_portable.launch.run.sessions import SHM
from tests.e2e import asking
from tests.kit.load import Load

pytestmark = [
    pytest.mark.full,
    pytest.mark.needs_ray,
    # Ray's own, and those of what it imports.
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).parents[2]
APPLICATION = ROOT / "deploy/ray/serve.yaml"
BIN = Path(sys.executable).parent
DEADLINE_S = 240.0
HEAD, *WORKERS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Addresses of the loopback interface: to Ray, and to launchers, three machines."""
SPARE = "127.0.0.5"
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
"""A worker node with the cores of one replica."""


def until(probe: Callable[[], Any]) -> Any:
    """Return the first answer that is true."""
    end_s = time.monotonic() + DEADLINE_S
    while not (found := probe()):
        assert time.monotonic() < end_s, found
        time.sleep(0.5)
    return found


shm_prefixes: set[str] = set()
"""Prefixes of the runs whose processes `ours` has seen."""


def ours() -> dict[int, str]:
    """Return the processes of launchers, guards and engines on this machine."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and "epd_portable." in words and str(BIN) in words:
                found[process.pid] = words
    ids = re.findall(r"launch\.run\.guard (\S+)", " ".join(found.values()))
    shm_prefixes.update(f"epd-{each}-" for each in ids)
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


@pytest.fixture
def cluster(nothing_is_left: None) -> Iterator[Any]:
    """A head without replicas, and two worker nodes with the cores of one replica each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", "240")
        patch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
        from ray.cluster_utils import Cluster

        head = {**NODE, "num_cpus": 0, "node_ip_address": HEAD}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            made.workers = [made.add_node(node_ip_address=each, **NODE) for each in WORKERS]
            patch.setenv("RAY_ADDRESS", made.address)
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """The test's processes, folders and shared memory end with it."""
    assert not ours()
    yield
    until(lambda: not ours())
    assert not list(Path(tempfile.gettempdir()).glob("epd-ray-*"))
    assert shm_prefixes
    assert not [path for path in SHM.iterdir() if path.name.startswith(tuple(shm_prefixes))]


def images(url: str) -> Load[int]:
    """Send requests with large images without a pause; results are statuses, 0 if there is none."""

    def send(number: int) -> int:
        content = [asking.picture(100 + number, 448), asking.text("What is it?")]
        try:
            return asking.post(url, asking.body(content, max_tokens=200)).status_code
        except httpx.TransportError:
            return 0

    return Load(send, clients=24, pause_s=0.0)


def test_serve_balances_scales_and_replaces_lost_replicas(cluster: Any) -> None:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    [application] = yaml.safe_load(APPLICATION.read_text("utf-8"))["applications"]
    application["args"] |= {"platform": "cpu", "config": str(ROOT / "configs" / "1e1pd.yaml")}
    application["args"]["set"] = ["engine_args.max_model_len=1024", "transfer.pool_bytes=16MiB"]
    [deployment] = application["deployments"]
    deployment["autoscaling_config"] |= {
        **{"upscale_delay_s": 1, "downscale_delay_s": 1, "max_replicas": 2}
    }
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
        with images(url) as load:
            until(lambda: replicas() == 2)
            launchers = [pid for pid, words in ours().items() if "launch.cli up" in words]
            families = [family(pid) for pid in launchers]
            assert len(families) == 2
            # A node has devices for one replica.
            lost = cluster.workers.pop()
            cluster.remove_node(lost, allow_graceful=False)
            until(lambda: any(map(gone, families)))
            assert not all(map(gone, families))
            load.wait_for(24)
            cluster.workers.append(cluster.add_node(node_ip_address=SPARE, **NODE))
            until(lambda: replicas() == 2)
            load.wait_for(24)
        # Only the requests at the lost node have failed.
        assert sum(status != 200 for status in load.seen) <= 24
        until(lambda: replicas() == 1)
        assert asking.ask(url, question).tokens == whole_answer.tokens
    finally:
        serve.shutdown()
        ray.shutdown()
