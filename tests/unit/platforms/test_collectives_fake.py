from __future__ import annotations

import pytest

from epd_portable.platforms.collectives_fake import FakeCollectiveGroup


def test_a_fake_group_has_at_least_two_ranks() -> None:
    with pytest.raises(ValueError, match="a group of 1"):
        FakeCollectiveGroup.make(1)
