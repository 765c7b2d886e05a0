from __future__ import annotations

from pathlib import Path

import pytest

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.load import parse_topology
from epd_portable.config.store import StoreSection
from epd_portable.errors import ConfigError

HEAD = "model: demo\nstore: "


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{kind: redis}", "url is missing"),
        ("{kind: file}", "path is missing"),
        ("{kind: file, path: /s, url: 'redis://h:1'}", "url belongs to redis"),
        ("{kind: redis, url: 'redis://h:1', path: /s}", "path belongs to file"),
        ("{kind: redis, url: 'http://h:1'}", "redis://host:port"),
        ("{kind: redis, url: 'redis://h:1/0?db=1'}", "leave out what follows"),
        ("{kind: redis, url: 'redis://h:1', max_bytes: 5}", "store.max_bytes"),
        ("{kind: mongo}", "'redis' or 'file'"),
    ],
)
def test_conflicting_store_keys_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_topology(HEAD + text, "cpu")


URL = "redis://:hunter2@h:1"
"""URL with a password, which is refused and not repeated."""
STORED = HEAD + "{kind: redis, url: 'redis://h:1'}\n"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (f"{HEAD}{{kind: redis, url: '{URL}'}}", []),
        (f"{HEAD}{{kind: redis, url: ['{URL}']}}", []),
        (f"model: demo\ntransfer: {{path: '{URL}'}}", []),
        (f"{HEAD}{{kind: '{'x' * 177}{URL}'}}", []),
        (f"model: demo\nfront: {{join: '{URL}'}}", []),
        (f"model: demo\n'{URL}': 3", []),
        (f"model: demo\n? [{URL}]\n: 3", []),
        (f"model: demo\nstore: !!int '{URL}'", []),
        (f"{STORED}platform: {{cpu: {{store: {{url: '{URL}'}}}}}}", []),
        (f"{STORED}platform: {{npu: {{store: {{url: '{URL}'}}}}}}", []),
        (f"{STORED}platform: {{npu: {{store: '{URL}'}}}}", []),
        (STORED, [f"store.url={URL}"]),
        (STORED, [f"store={{kind: redis, url: '{URL}'}}"]),
        (STORED, [f"store.path={URL}"]),
        (STORED, [f"store.max_bytes={URL}"]),
        (STORED, [f"store.url: {URL}"]),
        (STORED, [f"store.url={{{URL}"]),
        (STORED, [f"platform.cpu.store.url={URL}"]),
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(text: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_topology(text, "cpu", overrides=overrides)
    assert "hunter2" not in str(error.value)


def test_a_store_travels_to_instances_as_it_was_written() -> None:
    text = HEAD + "{kind: redis, url: 'rediss://me@h:1', ttl_s: 60, max_bytes: 1GiB}"
    section = parse_topology(text, "cpu").store
    assert section is not None
    config = InstanceConfig(instance="e", platform="cpu", store=section)
    assert InstanceConfig.parse(config.as_json()).store == section
    assert "store" not in InstanceConfig(instance="e", platform="cpu").as_json()


def test_a_password_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("hunter2\n")
    section = StoreSection(kind="redis", url="redis://h:1", password_file=str(path))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"store\.password_file .* 0644"):
        section.password()
    path.chmod(0o600)
    assert section.password() == "hunter2"
    assert StoreSection(kind="redis", url="redis://h:1").password() is None
