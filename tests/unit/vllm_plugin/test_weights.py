from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_portable.errors import ConfigError
from epd_portable.vllm_plugin.agreement import weights_of

Tensors = dict[str, bytes]
MODEL: Tensors = {"visual.a": bytes(range(200)), "visual.b": bytes(64), "model.c": b"\7" * 1000}


def write(path: Path, tensors: Tensors, dtype: str = "F32") -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": [len(data) // 4],
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def of(folder: Path, tensors: Tensors, dtype: str = "F32") -> str:
    write(folder / "model.safetensors", tensors, dtype)
    return weights_of(folder)


def test_the_same_tensors_are_the_same_weights_wherever_they_are(tmp_path: Path) -> None:
    one = of(tmp_path / "a", MODEL)
    names = list(MODEL)
    write(tmp_path / "b" / "1.safetensors", {names[2]: MODEL[names[2]]})
    write(tmp_path / "b" / "2.safetensors", {name: MODEL[name] for name in names[:2]})
    assert weights_of(tmp_path / "b") == one


@pytest.mark.parametrize(
    "other",
    [
        {**MODEL, "visual.a": b"\xff" + MODEL["visual.a"][1:]},
        {**MODEL, "visual.a": MODEL["visual.a"][:-1] + b"\xff"},
        {**MODEL, "model.c": b"\7" * 500 + b"\x08" + b"\7" * 499},
        {**MODEL, "more": b"\0\0\0\0"},
        {name: data for name, data in MODEL.items() if name != "visual.b"},
        {"visual.z" if name == "visual.b" else name: data for name, data in MODEL.items()},
    ],
)
def test_other_tensors_are_other_weights(tmp_path: Path, other: Tensors) -> None:
    assert of(tmp_path / "a", MODEL) != of(tmp_path / "b", other)


def test_weights_differ_with_their_dtype(tmp_path: Path) -> None:
    assert of(tmp_path / "a", MODEL) != of(tmp_path / "b", MODEL, "I32")


def test_folder_without_weights_or_with_half_of_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        weights_of(tmp_path)
    write(tmp_path / "model.safetensors", MODEL)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in (0, 4, 100, len(whole) - 10):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="are not identified"):
            weights_of(tmp_path)
