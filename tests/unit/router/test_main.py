from __future__ import annotations

import socket

import httpx
import pytest

from epd_portable.errors import ConfigError
from epd_portable.router.http.server_connection import KEEP_ALIVE_S
from epd_portable.router.serving import listen


def test_small_pieces_of_an_answer_are_sent_without_delay() -> None:
    with listen("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_idle_connections_stay_open_for_longer_than_clients_keep_them() -> None:
    kept_s = httpx.Limits().keepalive_expiry
    assert kept_s is not None
    assert kept_s * 2 < KEEP_ALIVE_S


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*cannot be used"):
        listen("192.0.2.1", 0)
