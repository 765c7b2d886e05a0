"""What is wrong with a topology file beyond its schema, reported together with what that finds.

Each check takes what the file says for the chosen platform, which may be wrong in other ways too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from epd_portable import envs
from epd_portable.config.document import KeyPath
from epd_portable.config.groups import engine_argument_problem
from epd_portable.config.load import GROUPS, Check
from epd_portable.config.removed import REMOVED, removed
from epd_portable.config.secret import Secret
from epd_portable.config.store import StoreSection
from epd_portable.errors import ConfigError
from epd_portable.launch.plan.engine import owned_variables
from epd_portable.launch.plan.installed import EngineArguments, installed_arguments
from epd_portable.platforms.traits import PlatformTraits
from epd_portable.router.ingress.access import ApiKeys

Found = Iterator[tuple[KeyPath, str]]
_FILES = ("tls_cert_file", "tls_key_file")
_KEY_FILES = ("api_keys_file", "hop_keys_file")


def usual_checks(traits: PlatformTraits) -> tuple[Check, ...]:
    """Return the checks of every file that is planned or started here."""
    return (variables_check(traits), engine_arguments_check(installed_arguments()))


def variables_check(traits: PlatformTraits) -> Check:
    """Return the check that the launcher's variables are not set and the package's are right."""
    variables = {variable.name: variable for variable in envs.TABLE}

    def check(data: Mapping[str, Any]) -> Found:
        instances = data.get(GROUPS)
        groups = instances if isinstance(instances, dict) else {}
        for group, path, section in _sections(data, "env"):
            holders = [groups[group]] if group else groups.values()
            has_share = any(isinstance(each, dict) and each.get("share") for each in holders)
            owned = owned_variables(traits, has_share=has_share)
            for name in section:
                if name in owned:
                    yield (*path, name), f"{name} is set by the launcher; {owned[name]}"
                elif name in REMOVED:
                    yield (*path, name), removed(name)
                elif name in variables:
                    try:
                        variables[name].get({name: str(section[name])})
                    except ConfigError as error:
                        yield (*path, name), str(error)

    return check


def engine_arguments_check(known: EngineArguments | None) -> Check:
    """Return the check that the installed engine, if there is one, has the arguments."""

    def check(data: Mapping[str, Any]) -> Found:
        for _, path, section in _sections(data, "engine_args") if known else ():
            assert known is not None
            for name, value in section.items():
                # What the schema refuses is reported by it.
                if not engine_argument_problem(name) and (problem := known.problem(name, value)):
                    yield (*path, name), problem

    return check


def named_files(data: Mapping[str, Any]) -> Found:
    """Check that the files can be read which the launcher, the router and instances need."""
    secret_file = data.get("secret_file")
    if isinstance(secret_file, str) and secret_file:
        try:
            Secret.read(secret_file)
        except ConfigError as error:
            yield ("secret_file",), str(error).removeprefix(f"secret_file {secret_file} ")
    router = data.get("router")
    for key in (*_FILES, *_KEY_FILES):
        path = router.get(key) if isinstance(router, dict) else None
        if not isinstance(path, str):
            continue
        try:
            if key in _KEY_FILES:
                ApiKeys(path, f"router.{key}")
            else:
                Path(path).read_bytes()
        except ConfigError as error:
            yield ("router", key), str(error).removeprefix(f"router.{key} ")
        except OSError as error:
            yield ("router", key), f"{path} cannot be read: {error.strerror}"
    store = data.get("store")
    if isinstance(store, dict) and isinstance(store.get("password_file"), str):
        try:
            StoreSection.model_construct(
                kind="redis", password_file=store["password_file"]
            ).password()
        except ConfigError as error:
            yield ("store", "password_file"), str(error).removeprefix("store.password_file ")


def _sections(
    data: Mapping[str, Any], key: str
) -> Iterator[tuple[str, KeyPath, Mapping[str, Any]]]:
    """Yield the group, the path and the content of ``key`` at the top and of every group."""
    instances = data.get(GROUPS)
    groups = instances if isinstance(instances, dict) else {}
    for group, holder in (("", data), *groups.items()):
        section = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(section, dict):
            yield group, (GROUPS, group, key) if group else (key,), section
