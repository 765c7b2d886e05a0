"""The compatibility fingerprint: files and settings of users, and nothing of a library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from epd_portable.errors import ConfigError
from epd_portable.vllm_plugin import agreement
from epd_portable.wire.fingerprint import differences
from tests import published

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LibraryConfig:
    """A configuration with defaults of some release of transformers."""

    def __init__(self, **defaults: Any) -> None:
        self._defaults = defaults

    def __getattr__(self, name: str) -> Any:
        return self._defaults[name]

    def to_dict(self) -> dict[str, Any]:
        return self._defaults


def engine(folder: Path | str, **settings: Any) -> Any:
    """Return what vLLM makes of an engine's arguments, as far as the fingerprint reads it."""
    multimodal = SimpleNamespace(
        mm_processor_kwargs=settings.pop("mm_processor_kwargs", None),
        media_io_kwargs=settings.pop("media_io_kwargs", {}),
    )
    values: dict[str, Any] = {
        "model": str(folder),
        "hf_config_path": None,
        "hf_config": LibraryConfig(),
        "hf_overrides": {},
        "hf_token": None,
        "config_format": "auto",
        "served_model_name": "m",
        "revision": None,
        "code_revision": None,
        "trust_remote_code": False,
        "dtype": "torch.bfloat16",
        "multimodal_config": multimodal,
        "quantization": None,
        "seed": 0,
    }
    load = SimpleNamespace(load_format="dummy")
    model = SimpleNamespace(**{**values, **settings})
    return SimpleNamespace(model_config=model, load_config=load)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(published.FOLDER / "qwen2_5_vl", tmp_path / "model"))


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **keys}), "utf-8")


def test_library_defaults_do_not_count(folder: Path) -> None:
    before = engine(folder, hf_config=LibraryConfig(vision_config={}))
    after = engine(folder, hf_config=LibraryConfig(vision_config={"rope_parameters": {"a": 1}}))
    assert agreement.fingerprint(before) == agreement.fingerprint(after)
    assert agreement.stored_as(before) == agreement.stored_as(after)


def test_version_of_transformers_in_files_does_not_count(folder: Path) -> None:
    before = agreement.fingerprint(engine(folder))
    config = folder / "config.json"
    vision = json.loads(config.read_text("utf-8"))["vision_config"]
    change(config, transformers_version="5.20.0", _name_or_path="/elsewhere")
    change(config, vision_config={**vision, "_name_or_path": "", "transformers_version": "5.20"})
    change(folder / "preprocessor_config.json", chat_template="other")
    assert agreement.fingerprint(engine(folder)) == before


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "torch.float16"}, "(--dtype): float16 at the sender, bfloat16 at the receiver"),
        ({"served_model_name": "other"}, "--served-model-name"),
        ({"revision": "v2"}, "(--revision): v2 at the sender, none at the receiver"),
        ({"hf_overrides": {"vision_config": {"depth": 1}}}, "--hf-overrides"),
        ({"hf_overrides": LibraryConfig}, "--hf-overrides"),
        ({"config_format": "mistral"}, "--config-format"),
        ({"mm_processor_kwargs": {"min_pixels": 4}}, "--mm-processor-kwargs"),
        ({"media_io_kwargs": {"video": {"num_frames": 4}}}, "--media-io-kwargs"),
    ],
)
def test_other_setting_is_named(folder: Path, settings: dict[str, Any], named: str) -> None:
    here, there = engine(folder), engine(folder, **settings)
    found = differences(agreement.fingerprint(here), agreement.fingerprint(there))
    assert named in found
    assert ", the" not in found
    assert agreement.stored_as(here) != agreement.stored_as(there)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("config.json", "config.json"),
        ("params.json", "config.json"),
        ("preprocessor_config.json", "preprocessor_config.json"),
        ("processor_config.json", "preprocessor_config.json"),
        ("video_preprocessor_config.json", "preprocessor_config.json"),
    ],
)
def test_other_file_is_named(folder: Path, name: str, named: str) -> None:
    before = agreement.fingerprint(engine(folder))
    path = folder / name
    change(path, size=1) if path.exists() else path.write_text('{"size": 1}', "utf-8")
    found = differences(before, agreement.fingerprint(engine(folder)))
    assert named in found
    assert ", the" not in found


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({}, {"mm_processor_kwargs": {"device": "cuda"}}),
        ({"mm_processor_kwargs": {"a": 1}}, {"mm_processor_kwargs": {"a": 1, "device": "cuda"}}),
        ({}, {"media_io_kwargs": {"video": {"backend": "torchcodec", "device": "cuda"}}}),
        ({}, {"revision": "main"}),
        ({}, {"quantization": "fp8"}),
    ],
)
def test_setting_of_the_device_does_not_count(
    folder: Path, here: dict[str, Any], there: dict[str, Any]
) -> None:
    found = [agreement.fingerprint(engine(folder, **each)) for each in (here, there)]
    assert found[0] == found[1]


def test_remote_code_counts_where_it_is_trusted(folder: Path) -> None:
    change(folder / "config.json", auto_map={"AutoConfig": "code.Config"})
    (folder / "code.py").write_text("class Config: ...\n", "utf-8")
    trusting = engine(folder, trust_remote_code=True)
    before = agreement.fingerprint(trusting), agreement.fingerprint(engine(folder))
    (folder / "code.py").write_text("class Config: pass\n", "utf-8")
    assert "remote code" in differences(before[0], agreement.fingerprint(trusting))
    assert "--trust-remote-code" in differences(*before)
    assert agreement.fingerprint(engine(folder)) == before[1]


def test_quantization_counts_for_entries_of_a_store(folder: Path) -> None:
    entries = [agreement.stored_as(engine(folder, quantization=each)) for each in (None, "fp8")]
    assert entries[0] != entries[1]
    # vLLM names the method by the device that runs it.
    change(folder / "config.json", quantization_config={"quant_method": "awq"})
    entries = [
        agreement.stored_as(engine(folder, quantization=each)) for each in ("awq", "awq_marlin")
    ]
    assert entries[0] == entries[1]


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the snapshot of ``org/model`` in the cache of a hub that cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT, "utf-8")
    return Path(shutil.copytree(folder, repository / "snapshots" / COMMIT))


def test_hub_and_folder_have_one_fingerprint(folder: Path, hub: Path) -> None:
    here, there = engine(folder), engine("org/model")
    assert agreement.fingerprint(here) == agreement.fingerprint(there)
    change(hub / "config.json", size=1)
    assert "config.json" in differences(agreement.fingerprint(here), agreement.fingerprint(there))


def test_hub_with_pinned_revision_is_read_from_the_cache(hub: Path) -> None:
    pinned = agreement.fingerprint(engine("org/model", revision=COMMIT))
    assert "--revision" in differences(agreement.fingerprint(engine("org/model")), pinned)


def test_entries_of_a_store_depend_on_the_commit(hub: Path) -> None:
    real = engine("org/model")
    real.load_config.load_format = "auto"
    before = agreement.stored_as(real)
    other = "f" * 40
    hub.rename(hub.with_name(other))
    (hub.parent.parent / "refs" / "main").write_text(other, "utf-8")
    assert agreement.stored_as(real) != before


def test_hf_config_path_is_read_for_gguf(folder: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    with pytest.raises(ConfigError, match="hf_config_path"):
        agreement.fingerprint(engine(gguf))
    given = agreement.fingerprint(engine(gguf, hf_config_path=str(folder)))
    assert given == agreement.fingerprint(engine(folder))


def test_folder_with_a_colon_is_no_gguf(folder: Path) -> None:
    before = agreement.fingerprint(engine(folder))
    assert agreement.fingerprint(engine(folder.rename(folder.with_name("model:v2")))) == before


@pytest.mark.parametrize("broken", ["absent", "invalid", "no object", "broken code", "not cached"])
def test_model_without_readable_files_is_refused(folder: Path, hub: Path, broken: str) -> None:
    model: Path | str = folder
    if broken == "absent":
        (folder / "config.json").unlink()
    elif broken == "invalid":
        (folder / "config.json").write_text("{", "utf-8")
    elif broken == "no object":
        (folder / "config.json").write_text("7", "utf-8")
    elif broken == "broken code":
        (folder / "config.json").write_text('{"auto_map": {}}', "utf-8")
        (folder / "code.py").symlink_to(folder / "absent.py")
    else:
        model = "org/another"
    with pytest.raises(ConfigError, match=r"config\.json|cannot be read"):
        agreement.fingerprint(engine(model, trust_remote_code=True))


def test_fingerprint_holds_no_path_and_no_secret(folder: Path) -> None:
    text = agreement.fingerprint(
        engine(folder, served_model_name=str(folder), hf_token="hf_secret", revision="/etc/" * 20)
    )
    assert str(folder) not in text
    assert "hf_secret" not in text
    assert "/etc/" not in text
    assert len(text) < 256


def test_fingerprint_of_an_older_release_is_named(folder: Path) -> None:
    found = differences(agreement.fingerprint(engine(folder)), "67643a69bf3d0a11")
    assert "another release of epd-portable" in found
