"""Problems of a topology file beyond its schema, reported together with those of the schema.

Each check takes the file's content for the chosen platform, which may be wrong in other ways too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from epd_portable import envs
from epd_portable.config.api_keys import ApiKeys
from epd_portable.config.document import KeyPath, dotted
from epd_portable.config.folders import expanded
from epd_portable.config.roles import SENDS_KV, TAKES_KV, group_of
from epd_portable.config.secret import Secret, read_private_file
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.engine import owned_variables
from epd_portable.log import STDERR
from epd_portable.platforms.traits import PlatformTraits

Found = Iterator[tuple[KeyPath, str]]
_OF_A_SERVER = ("mm_processor_device", "media_io_kwargs", "api_server_count")
"""Engine arguments of the server that processes media."""
MAX_API_SERVERS = 64
KV_GROUPS = frozenset(map(group_of, SENDS_KV | TAKES_KV))


def engine_settings(traits: PlatformTraits, data: Mapping[str, Any]) -> Found:
    """Check the variables and engine arguments of a file that is planned or started here."""
    variables = {variable.name: variable for variable in envs.TABLE}
    for groups, path, section in _sections(data, "env"):
        has_kv = not KV_GROUPS.isdisjoint(groups)
        owned = owned_variables(traits, has_kv=has_kv)
        for name, value in section.items():
            if name in owned:
                yield (*path, name), f"{name} is set by the launcher; {owned[name]}"
            elif name in variables:
                try:
                    variables[name].get({name: str(value)})
                except ConfigError as error:
                    yield (*path, name), str(error)
    for groups, path, section in _sections(data, "engine_args"):
        if "kv_transfer_config" in section and not KV_GROUPS.isdisjoint(groups):
            text = "the launcher writes it; its settings are under transfer"
            yield (*path, "kv_transfer_config"), text
        if section.get("mm_tensor_ipc") == "torch_shm":
            text = "torch_shm is for engines that vLLM's own server starts; leave it out"
            yield (*path, "mm_tensor_ipc"), text
        servers = section.get("api_server_count")
        is_count = isinstance(servers, int) and 1 <= servers <= MAX_API_SERVERS
        if servers is not None and not is_count:
            text = f"{servers!r} API servers of the front: write 1 to {MAX_API_SERVERS}"
            yield (*path, "api_server_count"), text
        for name in _OF_A_SERVER if path[:2] == ("instances", "encode") else ():
            if name in section:
                yield (
                    (*path, name),
                    "has no effect: the front processes media; set it in engine_args, for the "
                    "front and all instances",
                )


def fronts_to_join(data: Mapping[str, Any]) -> Found:
    """Check that an engine alone has fronts to join.

    Raises:
        ConfigError: It has none; no other problem of its counts is of interest then.
    """
    launch = data.get("launch")
    if not (isinstance(launch, dict) and launch.get("join")):
        raise ConfigError(
            "launch.join: not set, and `engine` starts an engine that joins fronts. Set it to "
            "their addresses, as --set launch.join=http://10.0.0.1:8000; `up` starts a front too"
        )
    return iter(())


def named_files(data: Mapping[str, Any]) -> Found:
    """Check that the files can be read which the launcher, the front and instances need."""
    readers: dict[tuple[str, ...], Callable[[str], object]] = {
        ("secret_file",): Secret.read,
        ("front", "tls_cert_file"): lambda path: Path(path).read_bytes(),
        ("front", "tls_key_file"): lambda path: Path(path).read_bytes(),
        ("front", "api_keys_file"): lambda path: ApiKeys(path, "front.api_keys_file"),
        ("front", "gateway_keys_file"): lambda path: ApiKeys(path, "front.gateway_keys_file"),
        ("front", "access_log"): lambda path: path == STDERR or Path(path).resolve().parent.stat(),
        ("instances", "encode", "environment"): lambda path: (
            expanded(path).absolute() / "bin/python"
        ).stat(),
        ("store", "password_file"): partial(read_private_file, key="store.password_file"),
    }
    for key, read in readers.items():
        path: Any = data
        for part in key:
            path = path.get(part) if isinstance(path, dict) else None
        if not isinstance(path, str) or not path:
            continue
        try:
            read(path)
        except ConfigError as error:
            said = str(error).removeprefix(f"{dotted(key)} ")
            yield key, said if len(key) > 1 else said.removeprefix(f"{path} ")
        except OSError as error:
            yield key, f"{error.filename} cannot be used: {error.strerror}"


def _sections(
    data: Mapping[str, Any], key: str
) -> Iterator[tuple[Mapping[str, Any], KeyPath, Mapping[str, Any]]]:
    """Yield the groups that it is for, the path and the content of each section ``key``."""
    instances = data.get("instances")
    groups = instances if isinstance(instances, dict) else {}
    holders = [((), data, groups)] + [
        (("instances", name), group, {name: group}) for name, group in groups.items()
    ]
    for path, holder, of in holders:
        section = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(section, dict):
            yield of, (*path, key), section
