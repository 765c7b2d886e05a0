"""Logs and the folder of a run: for nobody else, whatever the umask."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_portable.errors import ConfigError, LaunchError
from epd_portable.launch.run.log_files import make_private_folder, open_log, use_log_folder

Launch = Callable[..., Any]


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_private(tmp_path: Path, umask: None) -> None:
    make_private_folder(tmp_path / "run")
    use_log_folder(tmp_path / "logs")
    open_log(tmp_path / "logs" / "x.log").close()
    assert mode(tmp_path / "run") == mode(tmp_path / "logs") == 0o700
    assert mode(tmp_path / "logs" / "x.log") == 0o600


def test_a_folder_of_logs_is_closed_to_others_and_so_are_they(tmp_path: Path, umask: None) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs").chmod(0o777)
    for name in ("x.log", "x.log.1"):
        (tmp_path / "logs" / name).touch()
        (tmp_path / "logs" / name).chmod(0o666)
    use_log_folder(tmp_path / "logs")
    open_log(tmp_path / "logs" / "x.log").close()
    assert mode(tmp_path / "logs") == 0o700
    assert mode(tmp_path / "logs" / "x.log") == 0o600


def test_a_folder_that_holds_more_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "passwd").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"mode 0755.* \(passwd\) .*chmod 700"):
        use_log_folder(tmp_path)
    assert mode(tmp_path) == 0o755
    tmp_path.chmod(0o700)
    use_log_folder(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir(mode=0o700)
    os.chown(tmp_path / "logs", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        use_log_folder(tmp_path / "logs")


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(ConfigError, match="is no folder"):
        use_log_folder(tmp_path / "logs")
    with pytest.raises(ConfigError, match="logs/more cannot be used"):
        use_log_folder(tmp_path / "logs" / "more")


def test_a_link_in_place_of_a_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.log").symlink_to(tmp_path / "precious")
    with pytest.raises(LaunchError, match="cannot be written"):
        open_log(tmp_path / "x.log")
    assert not (tmp_path / "precious").exists()


def test_all_that_a_launcher_writes_under_any_umask_is_private(launch: Launch) -> None:
    run = launch({"encode-0": [], "router": []}, popen={"umask": 0})
    run.wait_for("ready:")
    assert run.stop(signal.SIGTERM) == 0
    logs = {path.name: mode(path) for path in run.log_dir.iterdir()}
    assert logs == dict.fromkeys(("encode-0.log", "router.log", "guard.log"), 0o600)
