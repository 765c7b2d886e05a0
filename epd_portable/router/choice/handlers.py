"""Profile handlers: which profile and which decider is for which stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from epd_portable.router.choice.parameters import Ignored, Name, Parameters
from epd_portable.router.choice.selection_types import Stage


class Handler(Parameters):
    """What holds without a handler: a profile is for the stage that it is named after."""

    @property
    def header(self) -> str:
        """Header that names the profile for one request, in lower case; or empty."""
        return ""

    def profile_of(self, stage: Stage) -> str:
        """Return the name of a stage's profile."""
        return stage

    def decider_of(self, stage: Stage) -> str | None:
        """Return the name of a stage's decider; empty for never, ``None`` for always."""
        return None


class _SingleProfileHandler(Handler):
    def decider_of(self, stage: Stage) -> str | None:
        return ""


class _OfStages(Parameters):
    encode: Name | None = None
    prefill: Name | None = None
    decode: Name | None = None


class _ProfileNames(_OfStages):
    fallback: Ignored = None


class _DisaggProfileHandler(Handler):
    profiles: _ProfileNames = _ProfileNames()
    deciders: _OfStages = _OfStages()
    stageOrder: Literal["decode-first", "prefill-first"] = "decode-first"

    def ignored(self) -> list[str]:
        """See `Parameters`: the instance that decodes is chosen first in any case."""
        order = ["stageOrder"] if self.stageOrder != "decode-first" else []
        return order + [f"profiles.{name}" for name in self.profiles.ignored()]

    def profile_of(self, stage: Stage) -> str:
        return getattr(self.profiles, stage) or stage

    def decider_of(self, stage: Stage) -> str | None:
        return getattr(self.deciders, stage) or ""


class _EpdProfileHandler(Handler):
    encodeProfile: Name = "encode"
    prefillProfile: Name = "prefill"
    decodeProfile: Name = "decode"
    deciderPluginName: Name | None = None
    primaryPort: Ignored = None

    def profile_of(self, stage: Stage) -> str:
        return str(getattr(self, f"{stage}Profile"))

    def decider_of(self, stage: Stage) -> str | None:
        return self.deciderPluginName if stage == "encode" else None


class _HeaderProfileHandler(_SingleProfileHandler):
    headerName: Name = "EPP-Profile"
    defaultProfile: Name = "decode"

    @property
    def header(self) -> str:
        return self.headerName.strip().lower()

    def profile_of(self, stage: Stage) -> str:
        return self.defaultProfile if stage == "decode" else stage


TYPES: Mapping[str, type[Parameters]] = {
    "disagg-profile-handler": _DisaggProfileHandler,
    "epd-profile-handler": _EpdProfileHandler,
    "header-profile-handler": _HeaderProfileHandler,
    "single-profile-handler": _SingleProfileHandler,
}
