from __future__ import annotations

import pytest

from epd_portable.config.instance import InstanceConfig
from epd_portable.errors import ConfigError


def test_every_wrong_key_is_named_at_once() -> None:
    raw = {"platform": "tpu", "lease_s": 0, "pool_byte": 1, "wait_timeout_s": -1}
    with pytest.raises(ConfigError) as caught:
        InstanceConfig.parse(raw)
    for key in ("instance", "platform", "lease_s", "pool_byte", "wait_timeout_s"):
        assert f"{key}:" in str(caught.value)
