"""Logs and the folder of a run, with its secret: for their user only, whatever the umask."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.errors import ConfigError, LaunchError
from epd_portable.launch.cli import _run_folder
from epd_portable.launch.environment import run_secret_file
from epd_portable.launch.run.logs import make_private_folder, open_log, use_log_folder

Launch = Callable[..., Any]


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_logs_are_closed_to_others_in_any_folder(tmp_path: Path, umask: None) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there").chmod(0o777)
    (tmp_path / "there" / "x.log").touch()
    (tmp_path / "there" / "x.log").chmod(0o666)
    make_private_folder(tmp_path / "run")
    assert mode(tmp_path / "run") == 0o700
    for name, wanted in (("there", 0o777), ("made", 0o700)):
        use_log_folder(tmp_path / name)
        open_log(tmp_path / name / "x.log").close()
        assert mode(tmp_path / name) == wanted
        assert mode(tmp_path / name / "x.log") == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_or_log_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir(mode=0o700)
    os.chown(tmp_path / "logs", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        use_log_folder(tmp_path / "logs")
    (tmp_path / "x.log").touch()
    os.chown(tmp_path / "x.log", 12345, 12345)
    with pytest.raises(LaunchError, match="belongs to another user"):
        open_log(tmp_path / "x.log")


def test_path_of_a_file_is_refused_as_folder(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    for name, said in (("logs", "is no folder"), ("logs/more", "logs/more cannot be used")):
        with pytest.raises(ConfigError, match=said):
            use_log_folder(tmp_path / name)


def test_a_link_in_place_of_a_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.log").symlink_to(tmp_path / "precious")
    with pytest.raises(LaunchError, match="cannot be written"):
        open_log(tmp_path / "x.log")
    assert not (tmp_path / "precious").exists()


def test_all_that_a_launcher_writes_under_any_umask_is_private(launch: Launch) -> None:
    run = launch({"encode-0": [], "front": []}, popen={"umask": 0})
    run.stop()
    logs = {path.name: mode(path) for path in run.log_dir.iterdir()}
    assert logs == dict.fromkeys(("encode-0.log", "front.log", "guard.log"), 0o600)


def test_run_has_a_private_secret_that_ends_with_it(
    tmp_path: Path,
) -> None:
    tokens, folder = [], tmp_path / "run"
    for _ in range(2):
        with pytest.raises(RuntimeError), _run_folder(folder, None):
            file = Path(run_secret_file(str(folder)))
            assert (mode(folder), mode(file)) == (0o700, 0o600)
            tokens.append(Secret.read(str(file)).derive("test"))
            # What cleans old files away tries to lock a folder before it looks into it.
            descriptor = os.open(folder, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
            raise RuntimeError
        assert not folder.exists()
    assert tokens[0] != tokens[1]


def test_run_keeps_the_secret_that_it_was_started_with(tmp_path: Path) -> None:
    given, folder = tmp_path / "secret", tmp_path / "run"
    make_secret_file(str(given))
    secret = given.read_text()
    with _run_folder(folder, str(given)):
        given.unlink()
        make_secret_file(str(given))
        copy = Path(run_secret_file(str(folder)))
        assert (copy.read_text(), mode(copy)) == (secret, 0o600)
        assert given.read_text() != secret


def test_somebody_elses_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        pytest.raises(FileExistsError),
        _run_folder(tmp_path / "run", None),
    ):
        pytest.fail("it was")
    assert (tmp_path / "run").exists()
