"""Launchers as detached actors of Ray: started, asked and ended. The only module that runs on Ray.

An actor holds one launcher. When the actor is killed, by `ray.kill` or with its node, so is the
launcher with all that it has started; Ray then starts the actor again, on another node if it must.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util import get_node_ip_address, list_named_actors

from epd_portable.config.secret import read_private_file
from epd_portable.connector.curve import is_off_host
from epd_portable.errors import ConfigError, LaunchError
from epd_portable.launch.notices import Notice
from epd_portable.launch.plan.launchers import ELSEWHERE, HEAD, LauncherSpec, spread
from epd_portable.launch.plan.request import PlanRequest, counts_of
from epd_portable.launch.run.held import HeldLauncher
from epd_portable.launch.run.log_files import Tail
from epd_portable.launch.run.running import RunRecord
from epd_portable.launch.run.wait import Wait

ROUTER = "router"
_AGAIN_AFTER_S = 5.0
_SAY_EVERY_S = 10.0
_ANSWERS_WITHIN_S = 10.0
_SAID_WITHIN_S = 2.0
_CALLS = 8
"""At the same time to one actor: some last as long as a start."""


class HeldActor:
    """A launcher on the node of this actor."""

    def __init__(self, spec: LauncherSpec) -> None:
        self._host = str(get_node_ip_address())
        self._launcher = HeldLauncher(spec, f"launch.host={self._host}")
        self._started_again = ray.get_runtime_context().was_current_actor_reconstructed
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        """End with the launcher, so that Ray starts both again; the first start may just fail."""
        asked = self._launcher.wait_ended()
        if not asked and (self._launcher.url or self._started_again):
            time.sleep(_AGAIN_AFTER_S)
            os._exit(1)

    def ready(self) -> str:
        """Return the host when the launcher is ready; raise `LaunchError` if it has ended."""
        self._launcher.wait_ready()
        return self._host

    def said(self) -> str:
        """Return the host, and what the launcher reports last."""
        return f"on {self._host}: {self._launcher.said}"

    def record(self) -> tuple[str, RunRecord | None]:
        """Return the host, and how the run is there; ``None`` before it has begun."""
        return self._host, self._launcher.record()

    def read(self, tail: Tail, lines: int | None) -> tuple[list[str], Tail]:
        """Return the last lines of a log, or the new ones, and its place."""
        return (tail.new() if lines is None else tail.last(lines)), tail

    def stops_s(self) -> float:
        """Return how long `stop` takes at most."""
        return self._launcher.stops_s

    def stop(self) -> None:
        """End the launcher; nothing of it is left."""
        self._launcher.stop()


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as options of an actor."""
    rest = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": rest,
        # Else Ray kills the guard of `HeldLauncher` together with what it cleans up for.
        "runtime_env": {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}},
    }


@contextlib.contextmanager
def connected(address: str, name: str) -> Iterator[None]:
    """Connect to a cluster, in the namespace of one topology there.

    Raises:
        ConfigError: There is no such cluster.
    """
    _require_listener(address)
    try:
        ray.init(address, namespace=f"epd-{name}", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RayError) as error:
        raise ConfigError(f"--cluster {address}: {error}") from error
    try:
        yield
    except RayError as error:
        raise LaunchError(f"Ray: {error}") from error
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Refuse an address at which nothing listens: Ray asks it again for minutes."""
    server = urlsplit(f"//{address.removeprefix('ray://')}")
    try:
        if server.port is not None:
            socket.create_connection((server.hostname, server.port), _ANSWERS_WITHIN_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--cluster {address}: {error}; write auto, or the address that `ray status` or "
            "`ray start` shows"
        ) from error


def deploy(request: PlanRequest, say: Callable[[Notice], None]) -> str:
    """Start a topology on the cluster; return the address for clients when all is ready.

    Raises:
        ConfigError: The file is wrong, or its topology runs there already.
        LaunchError: A launcher did not start; all have been ended.
    """
    if there := list_named_actors():
        raise ConfigError(
            f"a topology of this name runs there already ({', '.join(sorted(there))}): end it "
            "with `epd-launch stop`, or take another --name"
        )
    head = next(
        node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and HEAD.keys() <= node["Resources"].keys()
    )
    specs, url = _specs(request, head)
    started = {
        spec.name: ray.remote(HeldActor)
        .options(
            name=spec.name,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=_CALLS,
            **actor_options(spec.resources),
        )
        .remote(spec)
        for spec in specs
    }
    say(Notice("starting", f"starting {', '.join(started)}", {"instances": list(started)}))
    try:
        _await_ready(started, specs, say)
    except BaseException:
        stop()
        raise
    return url


def _specs(request: PlanRequest, head: str) -> tuple[list[LauncherSpec], str]:
    """Return the router's launcher and those of all instances, and the router's address."""
    topology = request.with_settings(f"launch.host={ELSEWHERE}", "router.join=[]").load()
    file, router = topology.secret_file, topology.router
    secret = read_private_file(file, key="secret_file") if file else secrets.token_hex(32)
    # Instances and clients of other nodes reach it.
    host = router.host if is_off_host(router.host) else head
    base, elsewhere = f"router.host={host}", f"launch.host={ELSEWHERE}"
    alone = (base, elsewhere, "router.join=[]", *counts_of({}))
    specs = [LauncherSpec.plan(request, ROUTER, *alone, secret=secret, resources=HEAD)]
    reached_at = head if host in ("0.0.0.0", "::") else host
    url = f"http{'s' if router.tls_cert_file else ''}://{reached_at}:{router.port}"
    for name, settings in spread(topology):
        joins = (base, elsewhere, f"router.join={url}", "front=router", *settings)
        specs.append(LauncherSpec.plan(request, name, *joins, secret=secret))
    return specs, url


def _await_ready(
    actors: Mapping[str, ActorHandle],
    specs: Sequence[LauncherSpec],
    say: Callable[[Notice], None],
) -> None:
    """Return when all launchers are ready; report what each waits for meanwhile.

    Raises:
        LaunchError: One has ended, or has no node in time.
    """
    needs = {spec.name: spec.resources for spec in specs}
    wait = Wait("not all launchers have a node", specs[0].node_s, limit="launch.startup_timeout_s")
    waiting = {actor.ready.remote(): name for name, actor in actors.items()}
    said: dict[str, str] = {}
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=_SAY_EVERY_S)
        for answer in done:
            name = waiting.pop(answer)
            say(Notice("stage", f"{name} is ready on {_answer(name, answer)}", {"name": name}))
        if not done:
            names = list(waiting.values())
            # One that has answered once has its node, however late it answers.
            said |= _answered({name: actors[name].said.remote() for name in names}, _SAID_WITHIN_S)
            away = {name: _without_node(needs[name]) for name in names if name not in said}
            text = "; ".join(f"{name} {(said | away)[name]}" for name in names)
            say(Notice("waiting", f"waiting for {text}", {"names": names}))
            if away:
                wait.go_on(text)


def _without_node(needs: Mapping[str, float]) -> str:
    """Return why a launcher has no node, as far as Ray shows it."""
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in needs.items())
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = any(all(node.get(name, 0) >= each for name, each in needs.items()) for node in nodes)
    return f"(no node has {wanted}{' free' if fit else ': add one, or ask for less'})"


def _answered(asked: Mapping[str, ObjectRef], timeout_s: float) -> dict[str, Any]:
    """Return what actors answer within a time; one without a node does not."""
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    found = {}
    for name, answer in asked.items():
        if answer in done:
            with _unless_lost():
                found[name] = ray.get(answer)
    return found


def _answer(name: str, answer: Any) -> Any:
    try:
        return ray.get(answer)
    except RayTaskError as error:
        raise LaunchError(f"{name}: {error.cause}") from error


def actors() -> dict[str, ActorHandle]:
    """Return the actors of the topology, the router first.

    Raises:
        LaunchError: There is none.
    """
    names = sorted(list_named_actors(), key=lambda name: (name != ROUTER, name))
    if not names:
        raise LaunchError("no topology of this name runs on the cluster")
    return {name: ray.get_actor(name) for name in names}


def records() -> dict[str, tuple[str, RunRecord | None] | None]:
    """Return the node and the run of each launcher; ``None`` for one that has no node now."""
    asked = {name: actor.record.remote() for name, actor in actors().items()}
    return dict.fromkeys(asked) | _answered(asked, _ANSWERS_WITHIN_S)


@contextlib.contextmanager
def _unless_lost() -> Iterator[None]:
    """Go on when an actor has no node, for which Ray has several names until it has found out."""
    try:
        yield
    except RayTaskError:  # The actor's own.
        raise
    except RayError:
        pass


def tails() -> dict[str, Tail]:
    """Return the logs of all processes, by names that begin with the launcher's."""
    there = actors()
    runs = {name: seen[1] for name, seen in records().items() if seen and seen[1]}
    return {
        f"{name}/{each.name}": RemoteTail(there[name], Path(each.log))
        for name, run in runs.items()
        for each in run.processes
    }


class RemoteTail(Tail):
    """A log on the node of an actor."""

    def __init__(self, actor: ActorHandle, path: Path) -> None:
        self._actor = actor
        self._tail = Tail(path)

    def last(self, count: int) -> list[str]:
        """Return the last lines."""
        return self._ask(count)

    def new(self) -> list[str]:
        """Return the lines that were completed since the last look."""
        return self._ask(None)

    def _ask(self, count: int | None) -> list[str]:
        lines: list[str]
        asked = self._actor.read.remote(self._tail, count)
        lines, self._tail = ray.get(asked, timeout=_ANSWERS_WITHIN_S)
        return lines


def stop() -> None:
    """End the topology: first the router, which waits for open requests; nothing is left of it."""
    there = actors()
    stops_s = _answered(
        {name: actor.stops_s.remote() for name, actor in there.items()}, _ANSWERS_WITHIN_S
    )
    for name, actor in there.items():
        if name in stops_s:  # Else there is nothing to end.
            with _unless_lost():
                ray.get(actor.stop.remote(), timeout=stops_s[name])
        ray.kill(actor)
