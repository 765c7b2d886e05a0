from __future__ import annotations

import socket

import httpx
import pytest

from epd_portable.errors import ConfigError, PortInUseError
from epd_portable.router.__main__ import KEEP_ALIVE_S, listen
from epd_portable.router.settings import RouterSettings


def settings(host: str = "127.0.0.1", port: int = 0) -> RouterSettings:
    pd = {"name": "p", "role": "prefill-decode", "url": "http://h:1", "control": "tcp://h:2"}
    return RouterSettings.model_validate(
        {"host": host, "port": port, "model": "demo", "instances": [pd]}
    )


def test_small_pieces_of_an_answer_are_sent_without_delay() -> None:
    with listen(settings()) as listener:
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_idle_connections_stay_open_for_longer_than_clients_keep_them() -> None:
    kept_s = httpx.Limits().keepalive_expiry
    assert kept_s is not None
    assert kept_s * 2 < KEEP_ALIVE_S


def test_a_port_in_use_is_refused_with_its_number() -> None:
    with listen(settings()) as first, pytest.raises(PortInUseError) as caught:
        listen(settings(port=first.getsockname()[1]))
    assert "choose another port" in str(caught.value)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*cannot be used"):
        listen(settings(host="192.0.2.1"))
