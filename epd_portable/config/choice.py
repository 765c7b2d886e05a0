"""Choice of instances as a file describes it: llm-d's ``EndpointPickerConfig``.

Which types of plug-ins there are and what their parameters mean is not known here: see
`epd_portable.placement.profiles.catalogue`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from epd_portable.config.folders import expanded
from epd_portable.config.problems import checked, read_text
from epd_portable.config.quantities import Section
from epd_portable.errors import ConfigError

VERSIONS = ("llm-d.ai/", "inference.networking.x-k8s.io/")
"""Beginnings of the ``apiVersion`` of files of this shape."""
MAX_PLUGINS = 64

Name = Annotated[str, Field(min_length=1, max_length=128)]


class PluginSection(Section):
    """A plug-in."""

    type: Name
    name: Name | None = None
    parameters: dict[str, JsonValue] | None = None

    @property
    def known_as(self) -> str:
        """The name by which it is referred to."""
        return self.name or self.type


class PluginUse(Section):
    """A plug-in's part in a profile; only scorers have a weight, 1 by default."""

    pluginRef: Name
    weight: Annotated[float, Field(ge=0, le=1e6, strict=False)] | None = None


class ProfileSection(Section):
    """Choice for one stage: filters in their order, scorers, and at most one picker."""

    name: Name
    plugins: Annotated[list[PluginUse], Field(max_length=MAX_PLUGINS)]


class _Elsewhere(Section):
    """Sections of such files about what this front has other keys for, or needs none for."""

    featureGates: JsonValue = None
    dataLayer: JsonValue = None
    data: JsonValue = None
    saturationDetector: JsonValue = None
    flowControl: JsonValue = None
    requestHandler: JsonValue = None
    parser: JsonValue = None


ELSEWHERE = tuple(_Elsewhere.model_fields)


class ChoiceSection(_Elsewhere):
    """A whole configuration, or the file that has it.

    Attributes:
        file: That has the rest; relative to where the program was started.
    """

    file: Name | None = None
    apiVersion: Name | None = None
    kind: Literal["EndpointPickerConfig"] | None = None
    metadata: JsonValue = None
    plugins: list[PluginSection] = Field(default=[], max_length=MAX_PLUGINS)
    schedulingProfiles: list[ProfileSection] = Field(default=[], max_length=MAX_PLUGINS)

    @field_validator("apiVersion")
    @classmethod
    def _has_this_shape(cls, version: str | None) -> str | None:
        if version is not None and not version.startswith(VERSIONS):
            raise ValueError(f"{version!r} is not known; write llm-d.ai/v1alpha1, or leave it out")
        return version

    @model_validator(mode="after")
    def _has_one_source(self) -> ChoiceSection:
        more = [name for name, value in self if name != "file" and value not in (None, [])]
        if self.file is not None and more:
            raise ValueError(f"file and {more[0]} are both set; set either file or {more[0]}")
        if self.file is None and not self.schedulingProfiles:
            raise ValueError("give schedulingProfiles and plugins, or a file that has them")
        for what, names in (
            ("plug-ins", [each.known_as for each in self.plugins]),
            ("profiles", [each.name for each in self.schedulingProfiles]),
        ):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{what} {twice} occur more than once: give each its own name")
        return self


def with_file(section: ChoiceSection) -> ChoiceSection:
    """Return the content of a section, its file read.

    Raises:
        ConfigError: The file cannot be read, or it lists every problem of its content.
    """
    if section.file is None:
        return section
    path = expanded(section.file)
    return parse_choice(read_text(path), source=f"front.choice.file {path}")


def parse_choice(text: str, *, source: str = "configuration") -> ChoiceSection:
    """Check the text of a configuration.

    Raises:
        ConfigError: Lists every problem.
    """
    section = checked(text, ChoiceSection, source=source)
    if section.file is not None:
        raise ConfigError(f"{source}: names another file, {section.file}; write it out")
    return section
