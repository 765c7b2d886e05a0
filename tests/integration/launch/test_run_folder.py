"""The folder of a run, and the secret that the launcher makes in it."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from epd_portable.config.secret import Secret
from epd_portable.launch.cli import _run_folder, main
from epd_portable.launch.plan.processes import run_secret_file

CONFIG = str(Path(__file__).parents[3] / "configs" / "1e1pd.yaml")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_has_a_fresh_secret_that_only_its_user_can_read_and_that_goes_with_it(
    tmp_path: Path,
) -> None:
    tokens, folder = [], tmp_path / "run"
    for _ in range(2):
        with pytest.raises(RuntimeError), _run_folder(folder, make_secret=True):
            file = Path(run_secret_file(str(folder)))
            assert (mode(folder), mode(file)) == (0o700, 0o600)
            tokens.append(Secret.read(str(file)).instance_token())
            # What cleans old files away tries to lock a folder before it looks into it.
            descriptor = os.open(folder, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
            raise RuntimeError
        assert not folder.exists()
    assert tokens[0] != tokens[1]
    with _run_folder(folder, make_secret=False):
        assert list(folder.iterdir()) == []


def test_somebody_elses_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        pytest.raises(FileExistsError),
        _run_folder(tmp_path / "run", make_secret=True),
    ):
        pytest.fail("it was")
    assert (tmp_path / "run").exists()


def test_a_plan_names_the_place_of_a_secret_and_makes_none() -> None:
    done = CliRunner().invoke(main, ["plan", "--platform", "cpu", "--config", CONFIG, "--json"])
    assert done.exit_code == 0, done.output
    settings = json.loads(json.loads(done.stdout)["processes"][-1]["argv"][-1])
    place = Path(settings["secret_file"])
    assert place.name == "secret"
    assert not place.parent.exists()
