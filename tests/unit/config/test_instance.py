from __future__ import annotations

import pytest

from epd_portable.config.instance import InstanceConfig
from epd_portable.errors import ConfigError
from epd_portable.media.limits import MediaLimits


def test_an_encode_instance_needs_a_name_and_a_platform_only() -> None:
    config = InstanceConfig.parse({"instance": "encode-0", "platform": "cpu"})
    assert (config.path, config.wait_timeout_s, config.lease_s) == ("auto", 30.0, 10.0)


def test_limits_of_media_are_checked_with_the_rest() -> None:
    raw = {"instance": "encode-0", "platform": "cpu", "media_limits": {"max_item_pixel": 1}}
    with pytest.raises(ConfigError, match=r"media_limits\.max_item_pixel"):
        InstanceConfig.parse(raw)
    config = InstanceConfig.parse({**raw, "media_limits": {"max_item_pixels": 1}})
    assert config.media_limits == MediaLimits(max_item_pixels=1)
    assert InstanceConfig.parse(config.model_dump()) == config


def test_every_wrong_key_is_named_at_once() -> None:
    raw = {"platform": "tpu", "lease_s": 0, "pool_byte": 1, "wait_timeout_s": -1}
    with pytest.raises(ConfigError) as caught:
        InstanceConfig.parse(raw)
    for key in ("instance", "platform", "lease_s", "pool_byte", "wait_timeout_s"):
        assert f"{key}:" in str(caught.value)
