"""Roles of instances: six sets of stages, and their aliases."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Role = Literal[
    "encode", "prefill", "decode", "encode-prefill", "prefill-decode", "encode-prefill-decode"
]
"""The stages that an instance is there for, in llm-d's words for them."""

ROLES: tuple[Role, ...] = typing.get_args(Role)

SHORT_ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "e": "encode",
        "p": "prefill",
        "d": "decode",
        "ep": "encode-prefill",
        "pd": "prefill-decode",
        "epd": "encode-prefill-decode",
        "both": "prefill-decode",
        "all": "encode-prefill-decode",
    }
)
"""Other names of roles."""

Stage = Literal["encode", "prefill", "decode"]
"""Stage of a request that an instance serves: an item, the KV of a prompt, or the response."""

ROLE_LABEL = "llm-d.ai/role"
"""Label of an instance that has its role."""

DUTIES: Mapping[Role, Stage] = MappingProxyType(  # What a role is there for first.
    {
        "encode": "encode",
        "prefill": "prefill",
        "decode": "decode",
        "encode-prefill": "prefill",
        "prefill-decode": "decode",
        "encode-prefill-decode": "decode",
    }
)

ENCODES: frozenset[Role] = frozenset({"encode", "encode-prefill", "encode-prefill-decode"})
"""Roles that encode items for others; all but ``encode`` in addition to their requests."""
TAKES_ITEMS: frozenset[Role] = frozenset(ROLES) - {"encode", "decode"}
"""Roles that get items from those."""

SENDS_KV: frozenset[Role] = frozenset({"prefill", "encode-prefill"})
TAKES_KV: frozenset[Role] = frozenset({"decode"})


def duties_of(role: Role) -> tuple[Stage, ...]:
    """Return the stages that instances of a role serve."""
    duty = DUTIES[role]
    return ("encode", duty) if role in ENCODES and duty != "encode" else (duty,)


def role_named(name: str) -> Role | None:
    """Return the role that a name means, hyphens or underscores; ``None`` for none."""
    plain = name.replace("_", "-")
    return next((role for role in ROLES if role == plain), SHORT_ROLES.get(plain))


def group_of(role: Role) -> str:
    """Return the key of a role in topology files."""
    return role.replace("-", "_")
