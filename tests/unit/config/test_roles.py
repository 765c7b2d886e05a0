"""Names of roles, and what follows from a role."""

from __future__ import annotations

import pytest

from epd_portable.config.roles import (
    DUTIES,
    ROLES,
    SENDS_KV,
    SHORT_ROLES,
    TAKES_ITEMS,
    TAKES_KV,
    group_of,
    role_named,
)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_known_by_hyphens_and_by_underscores(role: str) -> None:
    assert role_named(role) == role_named(role.replace("-", "_")) == role
    assert group_of(role).replace("_", "-") == role  # type: ignore[arg-type]


@pytest.mark.parametrize(("short", "role"), SHORT_ROLES.items())
def test_a_role_is_known_by_its_short_names(short: str, role: str) -> None:
    assert role_named(short) == role


@pytest.mark.parametrize("name", ["", "encoder", "Encode", "decode-encode", "x", "p-d"])
def test_nothing_else_is_a_role(name: str) -> None:
    assert role_named(name) is None


def test_whoever_sends_or_takes_does_what_it_is_asked_for() -> None:
    assert {DUTIES[role] for role in SENDS_KV} == {"prefill"}
    assert {DUTIES[role] for role in TAKES_KV} == {"answer"}
    assert "encode" not in TAKES_ITEMS
    # Whoever encodes by role gets no items.
    assert not {role for role in TAKES_ITEMS if role.startswith("encode")}
