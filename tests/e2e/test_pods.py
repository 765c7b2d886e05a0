"""The Pod of deploy/kubernetes/one-node in podman; with real engines on the CPU.

The image is the root file system of this machine. What podman 4.3 lacks is replaced, or left out:

- emptyDir: ``medium`` and ``sizeLimit``; ``/dev/shm`` is a folder on disk
- Deployment: one replica; no strategy, and no object that scales or protects it
- probes other than liveness, ``preStop`` and names of ports
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.asking import ask, picture
from tests.e2e.cases import ASK

pytestmark = [pytest.mark.full, pytest.mark.needs_podman]

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/epd-test:1"
READY_S, END_S = 300, 90
NAME = "epd-test"
SETTINGS = ("front.item_outcomes=true", "front.elastic_encode=false")
CONTAINERS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


def podman(*words: str) -> str:
    ended = subprocess.run(["podman", *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def pod_of(folder: Path) -> Path:
    """Return a file with the Deployment of deploy/kubernetes/one-node and its ConfigMap."""
    source = ROOT / "deploy/kubernetes/one-node"
    deployment = yaml.safe_load((source / "deployment.yaml").read_text())
    deployment["metadata"]["name"] = NAME
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    container["image"] = IMAGE
    container["args"] += [f"--set={each}" for each in SETTINGS]
    topology = {"topology.yaml": (source / "topology.yaml").read_text()}
    metadata = {"name": "epd-topology"}
    held = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": topology}
    in_root_of_this_machine(pod)
    file = folder / "play.yaml"
    file.write_text(yaml.safe_dump_all([held, deployment], sort_keys=False))
    return file


def in_root_of_this_machine(pod: dict[str, Any]) -> None:
    """Put what an image would have into a Pod of an empty one."""
    [container] = pod["containers"]
    assert container["command"] == ["epd-launch"]
    for volume in pod["volumes"]:
        if "emptyDir" in volume:
            volume["emptyDir"] = {}
    folders = {*("/usr", "/bin", "/lib", "/lib64"), sys.base_prefix, str(ROOT)}
    for number, path in enumerate(sorted(folders)):
        pod["volumes"].append({"name": f"root-{number}", "hostPath": {"path": path}})
        mount = {"name": f"root-{number}", "mountPath": path, "readOnly": True}
        container["volumeMounts"].append(mount)
    search = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    container["env"] = [{"name": "PATH", "value": search}]
    del container["ports"]  # Published at this machine otherwise.


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], str]]:
    """Return what plays a file and returns the address of its Pod."""
    (tmp_path / "containers.conf").write_text(CONTAINERS)
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    subprocess.run(["tar", "-cf", tmp_path / "empty.tar", "-T", os.devnull], check=True)
    podman("import", "--quiet", str(tmp_path / "empty.tar"), IMAGE)
    files: list[Path] = []

    def start(file: Path) -> str:
        files.append(file)
        podman("kube", "play", str(file))
        [pod] = json.loads(podman("pod", "ps", "--format", "json"))
        [infra] = json.loads(podman("container", "inspect", pod["InfraId"]))
        addresses = [each["IPAddress"] for each in infra["NetworkSettings"]["Networks"].values()]
        return f"http://{addresses[0]}:8000"

    yield start
    for file in files:
        podman("kube", "down", str(file))


def state_of(container: str) -> dict[str, Any]:
    [found] = json.loads(podman("container", "inspect", container))
    state: dict[str, Any] = {**found["State"], "restarts": found["RestartCount"]}
    return state


def until_status(url: str, status: int, container: str) -> None:
    end_s = time.monotonic() + READY_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == status:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end_s, podman("logs", container)
        time.sleep(0.5)


def kill(container: str) -> None:
    """Kill the launcher of a container, and wait until the container has come back."""
    before = state_of(container)
    os.kill(before["Pid"], signal.SIGKILL)
    end_s = time.monotonic() + END_S
    while (after := state_of(container))["restarts"] == before["restarts"]:
        assert time.monotonic() < end_s, after
        time.sleep(0.5)


def until_stopped(container: str) -> None:
    """Wait until the launcher says that it has stopped; the container comes back."""
    end_s = time.monotonic() + END_S
    while "stopped" not in podman("logs", container):
        assert time.monotonic() < end_s
        time.sleep(0.5)


@pytest.mark.needs_vllm
def test_a_pod_of_all_stages_answers_comes_back_and_drains(
    play: Callable[[Path], str], tmp_path: Path
) -> None:
    container = "epd-test-pod-0-epd"
    url = play(pod_of(tmp_path))
    until_status(url, 200, container)
    assert ask(url, [picture(1), ASK]).sources == ["transfer"]

    kill(container)  # Its engines go with the launcher.
    until_status(url, 200, container)
    assert ask(url, [picture(2), ASK]).sources == ["transfer"]

    # What ends a Pod lets what is open end.
    request = {"model": "demo", "stream": True, "max_tokens": 512, "ignore_eos": True}
    request["messages"] = [{"role": "user", "content": "count"}]
    path = f"{url}/v1/chat/completions"
    with httpx.stream("POST", path, json=request, timeout=END_S, trust_env=False) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(state_of(container)["Pid"], signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    until_stopped(container)
