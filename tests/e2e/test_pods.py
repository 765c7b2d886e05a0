"""Shape ``nodes`` of ``epd-launch render`` in a Pod of podman, with real engines on the CPU.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner

from epd_portable.launch import cli
from tests.e2e.asking import ask, picture
from tests.e2e.cases import ASK

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.needs_podman,
    pytest.mark.needs_vllm,
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).resolve().parents[2]
IMAGE, POD = "localhost/epd-test:1", "epd-test-pod-0"
READY_S, END_S = 300, 90
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


def rendered(folder: Path) -> Path:
    """Render shape ``nodes`` and return what of it podman plays."""
    settings = ("router.item_outcomes=true", "router.elastic_encode=false")
    words = ["render", "--target", "kubernetes", "--shape", "nodes", "--platform", "cpu"]
    words += ["--config", str(ROOT / "configs/1e1pd.yaml"), "--output", str(folder)]
    words += ["--name", "epd-test", "--image", IMAGE]
    words += [word for each in settings for word in ("--set", each)]
    result = CliRunner().invoke(cli.main, words)
    assert result.exit_code == 0, result.output
    documents: list[dict[str, Any]] = []
    for name in ("topology.yaml", "nodes.yaml"):
        documents += yaml.safe_load_all((folder / name).read_text())
    played = [each for each in documents if each["kind"] in ("ConfigMap", "Deployment")]
    in_root_of_this_machine(played[-1]["spec"]["template"]["spec"])
    file = folder / "play.yaml"
    file.write_text(yaml.safe_dump_all(played, sort_keys=False))
    return file


def in_root_of_this_machine(pod: dict[str, Any]) -> None:
    """Put what an image would have into a Pod of an empty one."""
    [container] = pod["containers"]
    assert container["command"] == ["epd-launch"]
    for volume in pod["volumes"]:
        if "emptyDir" in volume:
            volume["emptyDir"] = {}
    pod["volumes"].append({"name": "tmp", "emptyDir": {}})
    container["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"})
    folders = {*("/usr", "/bin", "/lib", "/lib64"), sys.base_prefix, str(ROOT)}
    for number, path in enumerate(sorted(folders)):
        pod["volumes"].append({"name": f"root-{number}", "hostPath": {"path": path}})
        mount = {"name": f"root-{number}", "mountPath": path, "readOnly": True}
        container["volumeMounts"].append(mount)
    search = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    container["env"] = [{"name": "PATH", "value": search}, {"name": "HOME", "value": "/tmp"}]
    del container["ports"]  # Published at this machine otherwise.


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of the Pod."""
    (tmp_path / "containers.conf").write_text(CONTAINERS)
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    subprocess.run(["tar", "-cf", tmp_path / "empty.tar", "-T", os.devnull], check=True)
    podman("import", "--quiet", str(tmp_path / "empty.tar"), IMAGE)
    file = rendered(tmp_path / "k8s")
    podman("kube", "play", str(file))
    try:
        [infra] = json.loads(podman("container", "inspect", f"{infra_of(POD)}"))
        addresses = [each["IPAddress"] for each in infra["NetworkSettings"]["Networks"].values()]
        yield f"http://{addresses[0]}:8000"
    finally:
        podman("kube", "down", str(file))


def infra_of(pod: str) -> str:
    found: str = json.loads(podman("pod", "inspect", pod))["InfraContainerID"]
    return found


def state_of(container: str) -> dict[str, Any]:
    [found] = json.loads(podman("container", "inspect", container))
    state: dict[str, Any] = {**found["State"], "restarts": found["RestartCount"]}
    return state


def until_healthy(url: str) -> None:
    end_s = time.monotonic() + READY_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end_s, podman("logs", f"{POD}-epd")
        time.sleep(0.5)


def test_a_rendered_pod_answers_comes_back_and_drains(played: str) -> None:
    container = f"{POD}-epd"
    until_healthy(played)
    assert ask(played, [picture(1), ASK]).sources == ["transfer"]

    # The launcher is killed: its engines go with it, and the container comes back.
    before = state_of(container)
    os.kill(before["Pid"], signal.SIGKILL)
    end_s = time.monotonic() + END_S
    while (after := state_of(container))["restarts"] == before["restarts"]:
        assert time.monotonic() < end_s, after
        time.sleep(0.5)
    until_healthy(played)
    assert ask(played, [picture(2), ASK]).sources == ["transfer"]

    # What ends a Pod lets what is open end.
    stream = {"model": "demo", "stream": True, "max_tokens": 512, "ignore_eos": True}
    stream["messages"] = [{"role": "user", "content": "count"}]
    url = f"{played}/v1/chat/completions"
    with httpx.stream("POST", url, json=stream, timeout=END_S, trust_env=False) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(state_of(container)["Pid"], signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert "stopped" in podman("logs", container)
