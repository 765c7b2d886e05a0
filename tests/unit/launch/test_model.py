"""What ``model:`` points at."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.errors import ConfigError
from epd_portable.launch.plan.model import resolve_model


def test_a_hub_id_is_passed_on() -> None:
    source = resolve_model("Qwen/Qwen2.5-VL-3B-Instruct")
    assert source.argument == source.served_name == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert not source.is_folder


def test_a_folder_is_served_under_its_last_part(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    source = resolve_model(str(tmp_path / "tiny"))
    assert source.argument == str(tmp_path / "tiny")
    assert source.served_name == "tiny"
    assert source.is_folder
    assert resolve_model(str(tmp_path / "tiny"), served_name="x").served_name == "x"


def test_a_folder_beside_wins_over_a_hub_id_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "m").mkdir(parents=True)
    (tmp_path / "org" / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/m").is_folder


@pytest.mark.parametrize("model", ["/no/such/folder", "./no", "../no", "a/b/c", "~/no/such"])
def test_a_folder_that_is_not_there_is_named_with_what_to_give(model: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .* give an existing folder"):
        resolve_model(model)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))
