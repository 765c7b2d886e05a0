"""What ``model:`` in a topology file points at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from epd_portable.config.folders import expanded
from epd_portable.errors import ConfigError

DEMO = "demo"
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model as engines and clients know it.

    Attributes:
        argument: Value of ``--model``: an absolute folder or a Hugging Face id.
        served_name: Value of ``model`` in requests.
        is_folder: Whether it loads without a network.
    """

    argument: str
    served_name: str
    is_folder: bool


def resolve_model(model: str, *, served_name: str | None = None) -> ModelSource:
    """Find a model: the bundled ``demo``, an existing folder, or a Hugging Face id.

    Raises:
        ConfigError: It looks like a folder but is none, or the folder holds no ``config.json``.
    """
    if model == DEMO:
        folder = Path(str(files("epd_portable"))) / "demo" / "model"
    else:
        folder = expanded(model)
    looks_like_folder = model == DEMO or model.startswith((".", "/", "~")) or folder.is_dir()
    if not looks_like_folder and HUB_ID.fullmatch(model):
        return ModelSource(argument=model, served_name=served_name or model, is_folder=False)
    if not folder.is_dir():
        raise ConfigError(
            f"model {model!r}: there is no folder {folder}; give an existing folder, "
            f"a Hugging Face id such as Qwen/Qwen2.5-VL-3B-Instruct, or '{DEMO}'"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {model!r}: {folder} holds no config.json; is it a checkpoint?")
    folder = folder.resolve()
    name = served_name or (DEMO if model == DEMO else folder.name)
    return ModelSource(argument=str(folder), served_name=name, is_folder=True)
