"""An encode engine of the front's launcher and one of another, encrypted as between machines.

In bfloat16, the dtype of real checkpoints, over ``tcp``, with items that may come before their
requests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Pair, every_instance_is_up, running, serving
from tests.e2e.engines import wait_until
from tests.e2e.two_encoders.deployment import (
    HOST,
    JOINED,
    SETTINGS,
    Deployment,
    epd_launch,
    other_launcher,
)
from tests.forked import Popen


@pytest.fixture(scope="package")
def deployment(
    fork: Popen, tmp_path_factory: pytest.TempPathFactory, reference_url: str
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    secret_file = folder / "secret"
    made = epd_launch("secret", str(secret_file))
    assert made.returncode == 0, made.stderr
    settings = [*SETTINGS, f"launch.host={HOST}", f"secret_file={secret_file}"]
    with running(folder, settings, popen=fork) as split:
        other = other_launcher(split, secret_file, fork)
        pair = Pair(split=split, reference_url=reference_url)
        with serving(other):
            wait_until(lambda: every_instance_is_up(split, JOINED), "both encoders get items")
            yield Deployment(pair=pair.since_now(), secret_file=secret_file, other=other)
