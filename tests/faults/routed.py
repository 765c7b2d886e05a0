"""Topologies of small engines with servers of their own, behind the real router."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from epd_portable.config.instance import InstanceConfig
from epd_portable.router.settings import InstanceSettings, RouterSettings
from tests.faults.topology import DEADLINE_S, NO_TLS, ROOT, Topology, role_of
from tests.keyring import secret_file

PRELOADED = ("torch.distributed", "pydantic", "starlette.applications", "uvicorn", "zmq")
"""Modules of the process from which the launcher forks small engines."""


class RoutedTopology(Topology):
    """`Topology` with a router; variables of ``env`` reach engines that start by themselves."""

    def _processes(
        self, configs: Sequence[InstanceConfig], next_port: Callable[[], int]
    ) -> list[dict[str, Any]]:
        self.urls: dict[str, str] = {}
        specs, backends = [], []
        for config in configs:
            name, role, port = config.instance, role_of(config), next_port()
            url = self.urls[name] = f"http://127.0.0.1:{port}"
            argv = [sys.executable, "-m", "tests.faults.small.engine"]
            argv += [config.model_dump_json(), str(port)]
            spec = self._spec(name, role, argv, url, config.pool)
            specs.append({**spec, "preload": PRELOADED})
            backends.append(
                InstanceSettings(name=name, role=role, url=url, control=config.control_address)
            )
        port, wait_s = next_port(), configs[0].wait_timeout_s
        self.url = f"http://127.0.0.1:{port}"
        settings = RouterSettings(
            port=port,
            model="small",
            instances=tuple(backends),
            secret_file=secret_file(),
            store=configs[0].store,
            registration=False,
            item_outcomes=True,
            elastic_encode=False,
            wait_timeout_s=wait_s,
            idle_timeout_s=2 * wait_s,
            probe_interval_s=0.2,
            probe_timeout_s=1.0,
            nack_grace_s=0.2,
        )
        argv = [sys.executable, "-m", "epd_portable.router"]
        argv += ["--settings", settings.model_dump_json()]
        return [*specs, {**self._spec("router", "router", argv, self.url, ""), "preload": ()}]

    def _start(self, plan: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.integration.launch.run_plan", str(plan)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env=variables,
        )

    def state(self, name: str, *, reset: bool = False) -> dict[str, int]:
        """Return what an instance keeps; ``reset`` empties its encoder cache before."""
        url = f"{self.urls[name]}/state" + ("?reset" if reset else "")
        answer = httpx.post(url, timeout=DEADLINE_S, trust_env=False, verify=NO_TLS)
        found: dict[str, int] = answer.json()
        return found
