"""Rendered objects as YAML files of a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from epd_portable.errors import ConfigError
from epd_portable.launch.render.objects import Object


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and repeats what stands twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(objects: Sequence[Object]) -> str:
    """Return objects as the documents of one file."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100, explicit_start=True)


def write_files(folder: Path, files: Mapping[str, Sequence[Object]]) -> list[Path]:
    """Write files, and the list of them that ``kubectl apply -k`` reads.

    Files that are there are replaced. Those that hold a secret can be read by their owner only.

    Raises:
        ConfigError: They cannot be written.
    """
    written = []
    api = "kustomize.config.k8s.io/v1beta1"
    kustomization = {"apiVersion": api, "kind": "Kustomization", "resources": list(files)}
    listed = {"kustomization.yaml": [kustomization], **files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, objects in listed.items():
            path = folder / name
            is_secret = any(each["kind"] == "Secret" for each in objects)
            path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(path, flags, 0o600 if is_secret else 0o644), "w") as file:
                file.write(as_yaml(objects))
            written.append(path)
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written: {error}") from error
    return written
