from __future__ import annotations

import pytest

from epd_portable.config.instance import InstanceConfig
from epd_portable.errors import ConfigError


def test_an_encode_instance_needs_a_name_and_a_platform_only() -> None:
    config = InstanceConfig.parse({"instance": "encode-0", "platform": "cpu"})
    assert (config.path, config.wait_timeout_s, config.lease_s) == ("auto", 30.0, 10.0)


def test_every_wrong_key_is_named_at_once() -> None:
    raw = {"platform": "tpu", "lease_s": 0, "pool_byte": 1, "wait_timeout_s": -1}
    with pytest.raises(ConfigError) as caught:
        InstanceConfig.parse(raw)
    for key in ("instance", "platform", "lease_s", "pool_byte", "wait_timeout_s"):
        assert f"{key}:" in str(caught.value)
