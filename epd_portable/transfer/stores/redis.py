"""A store in a Redis or Valkey server: a hash for each entry, its head and parts, which expires.

A sorted set of all entries by the time at which they expire, and a hash of their sizes, let writers
keep the sum below ``store.max_bytes`` regardless of what else the server holds.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import Any

from epd_portable.config.store import StoreSection
from epd_portable.errors import ConfigError, CorruptEntryError, StoreError, StoreFullError
from epd_portable.transfer.stores.base import Entry, Store
from epd_portable.transfer.stores.entry import MAX_HEAD_BYTES

PREFIX = "epd:1:"
_ENTRY = PREFIX + "entry:"
_INDEX, _SIZES, _BYTES = (PREFIX + name for name in ("index", "sizes", "bytes"))
_HEAD, _PART = "h", "d"
PART_BYTES = 4 << 20
"""Size of a payload's parts: a server builds each reply in memory."""
_READ_BYTES = 1 << 20
"""Read from a socket at once."""
_MAX_CONNECTIONS = 8

_RESERVE = """
local index, sizes, bytes = KEYS[1], KEYS[2], KEYS[3]
local entry, now, expires = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local need, most = tonumber(ARGV[4]), tonumber(ARGV[5])
local gone = 0
local function forget(name)
  local size = tonumber(redis.call('HGET', sizes, name) or '0')
  redis.call('ZREM', index, name)
  redis.call('HDEL', sizes, name)
  redis.call('DECRBY', bytes, size)
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, 1000)) do
  forget(name)
end
forget(entry)
while tonumber(redis.call('GET', bytes) or '0') + need > most do
  local oldest = redis.call('ZRANGE', index, 0, 0)[1]
  if not oldest then
    redis.call('SET', bytes, 0)
    break
  end
  redis.call('UNLINK', oldest)
  forget(oldest)
  gone = gone + 1
end
redis.call('ZADD', index, expires, entry)
redis.call('HSET', sizes, entry, need)
redis.call('INCRBY', bytes, need)
return gone
"""
"""Counts an entry that is about to be written, and removes as many others as needed."""

_ASK = """
local heads, most, ttl_ms, expires = {}, tonumber(ARGV[1]), ARGV[2], ARGV[3]
for number = 2, #KEYS do
  local entry = KEYS[number]
  local size = redis.pcall('HSTRLEN', entry, 'h')
  heads[number - 1] = ''
  if type(size) == 'number' and size <= most then
    heads[number - 1] = redis.call('HGET', entry, 'h')
    redis.pcall('PEXPIRE', entry, ttl_ms)
    redis.pcall('ZADD', KEYS[1], 'XX', expires, entry)
  end
end
return heads
"""
"""Returns heads, and records their use if the server has memory for that. A value that cannot be a
head is returned as an empty one, which has no valid seal."""


class RedisStore(Store):
    """See `Store`.

    Raises:
        ConfigError: The library is not installed, or a configured file cannot be read.
    """

    def __init__(self, section: StoreSection) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ConfigError(
                "store.kind is redis, and the package redis is not installed: "
                "pip install 'epd-portable[store]'"
            ) from error
        assert section.url is not None
        options: dict[str, Any] = {}
        if section.url.startswith("rediss:"):
            options = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
            if section.tls_ca_file:
                options["ssl_ca_certs"] = section.tls_ca_file
        if password := section.password():
            options["password"] = password
        self._errors = redis.exceptions
        self._where = section.where
        self._max_bytes = section.max_bytes
        self._ttl_ms = int(section.ttl_s * 1000)
        self._timeout_s = section.timeout_s
        pool = redis.BlockingConnectionPool.from_url(
            section.url,
            max_connections=_MAX_CONNECTIONS,
            timeout=section.timeout_s,
            socket_timeout=section.timeout_s,
            socket_connect_timeout=section.timeout_s,
            socket_read_size=_READ_BYTES,
            retry=Retry(NoBackoff(), 0),
            **options,
        )
        self._client: Any = redis.Redis(connection_pool=pool)
        self._reserve = self._client.register_script(_RESERVE)

    def has_caches(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        names = [_INDEX, *(_ENTRY + key for key in keys)]
        limits = (MAX_HEAD_BYTES, self._ttl_ms, _now_ms() + self._ttl_ms)
        with self._translated("asking"):
            found: list[bytes | None] = self._client.eval(_ASK, len(names), *names, *limits)
        return found

    def save_caches(self, entries: Sequence[Entry]) -> int:
        now = _now_ms()
        largest = max((each.payload.nbytes for each in entries), default=0)
        if largest > self._max_bytes:
            raise StoreFullError(
                f"an entry of {largest} bytes: store.max_bytes is {self._max_bytes}"
            )
        with self._translated("writing"), self._client.pipeline(transaction=False) as pipe:
            for entry in entries:
                name = _ENTRY + entry.key
                size = len(entry.head) + entry.payload.nbytes
                self._reserve(
                    [_INDEX, _SIZES, _BYTES],
                    [name, now, now + self._ttl_ms, size, self._max_bytes],
                    client=pipe,
                )
                fields: dict[str, bytes | memoryview] = {_HEAD: entry.head}
                for number, part in enumerate(_parts(entry.payload)):
                    fields[f"{_PART}{number}"] = part
                pipe.hset(name, mapping=fields)
                pipe.pexpire(name, self._ttl_ms)
            return sum(pipe.execute()[::3])

    def load_cache(self, key: str, into: memoryview) -> bytes | None:
        name, parts = _ENTRY + key, [*_parts(into)]
        sizes = [each.nbytes for each in parts]
        fields = [_HEAD, *(f"{_PART}{number}" for number in range(len(parts)))]
        with self._translated("loading"):
            # What another has planted may be of any size, and a reply is read as a whole.
            with self._client.pipeline(transaction=False) as pipe:
                for field in fields:
                    pipe.hstrlen(name, field)
                found = pipe.execute()
            if not any(found):
                return None
            if not 0 < found[0] <= MAX_HEAD_BYTES or found[1:] != sizes:
                raise CorruptEntryError(
                    f"entry {key}: a head of {found[0]} bytes (1 to {MAX_HEAD_BYTES}) and parts of "
                    f"{found[1:]} (expected {sizes})"
                )
            # Together, so that both are of one writer.
            head: bytes | None
            head, *values = self._client.hmget(name, fields[:2])
            for field, part in zip(fields[1:], parts, strict=True):
                value = values.pop() if values else self._client.hget(name, field)
                if value is None or len(value) != part.nbytes:
                    raise CorruptEntryError(f"entry {key}: {field} has changed while it was read")
                part[:] = value
        return head

    def discard(self, key: str) -> None:
        with self._translated("removing"):
            self._client.unlink(_ENTRY + key)

    def check(self) -> str:
        with self._translated("looking"):
            info = self._client.info("server")
            used = int(self._client.get(_BYTES) or 0)
        version = info.get("valkey_version") or info.get("redis_version")
        return f"version {version}; {used >> 20} MiB of at most {self._max_bytes >> 20} MiB used"

    def close(self) -> None:
        self._client.close()
        self._client.connection_pool.disconnect()

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        errors = self._errors
        try:
            yield
        except errors.RedisError as error:
            if isinstance(error, errors.OutOfMemoryError) or "OOM" in str(error):
                raise StoreFullError(
                    f"{doing}, {self._where}: {error}; lower store.max_bytes below its maxmemory"
                ) from error
            raise StoreError(f"{doing}, {self._where}: {error}") from error
        except OSError as error:
            raise StoreError(f"{doing}, {self._where}: {error}") from error


def _parts(payload: memoryview) -> Iterator[memoryview]:
    for begin in range(0, payload.nbytes, PART_BYTES):
        yield payload[begin : begin + PART_BYTES]


def _now_ms() -> int:
    return int(time.time() * 1000)
