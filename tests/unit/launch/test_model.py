"""Target of ``model:``."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.errors import ConfigError
from epd_portable.launch.plan.engine import resolve_model


def test_a_model_is_a_hub_id_or_a_folder_which_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = resolve_model("org/tiny")
    assert (source.argument, source.served_name, source.is_folder) == ("org/tiny",) * 2 + (False,)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "org" / "tiny" / "config.json").write_text("{}")
    source = resolve_model("org/tiny")
    expected = (str(tmp_path / "org" / "tiny"), "tiny", True)
    assert (source.argument, source.served_name, source.is_folder) == expected
    assert resolve_model("org/tiny", served_name="x").served_name == "x"


@pytest.mark.parametrize("model", ["/no/such/folder", "./no", "../no", "a/b/c", "~/no/such"])
def test_a_folder_that_is_not_there_is_named_with_what_to_give(model: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .* give an existing folder"):
        resolve_model(model)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))
