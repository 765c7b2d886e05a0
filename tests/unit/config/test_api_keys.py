"""Files of API keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.config.api_keys import ApiKeys
from epd_portable.errors import ConfigError

KEY, MISSING = "k" * 20, "missing"


def keys_file(folder: Path, content: str, mode: int = 0o600) -> str:
    path = folder / "keys"
    if content != MISSING:
        path.write_text(content)
        path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("short", 0o600, "at least 16 characters"),
        ("", 0o600, "holds 0 keys"),
        (KEY, 0o644, "chmod 600"),
        (MISSING, 0o600, "cannot be read"),
    ],
)
def test_unusable_file_of_keys_is_refused(
    tmp_path: Path, content: str, mode: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ApiKeys(keys_file(tmp_path, content, mode))


def test_keys_are_held_as_digests(tmp_path: Path) -> None:
    keys = ApiKeys(keys_file(tmp_path, f"# a comment\n{KEY}\n"))
    assert keys.holds(KEY) and not keys.holds(KEY + "x")
    assert KEY not in repr(vars(keys))
