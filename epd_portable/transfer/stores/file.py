"""A store in a folder that all hosts share: a safetensors file for each entry.

Files appear whole, by rename; the seal in each shows whether it is valid. All writers share one
small file, locked while they count bytes and remove the least recently used entries. Only the
engines' user can write in the folder; links and devices in it are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from epd_portable.config.folders import expanded
from epd_portable.config.store import StoreSection
from epd_portable.errors import CorruptEntryError, StoreError, StoreFullError
from epd_portable.transfer.stores.base import Entry, Store
from epd_portable.transfer.stores.entry import MAX_HEAD_BYTES

FOLDER = "epd-store-1"
TENSOR = "ec_cache"
_HEAD = "epd_head"
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_KEY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}", re.ASCII)
_MAX_HEADER_BYTES = 2 * MAX_HEAD_BYTES
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LEFT_AFTER_S = 600.0
"""Age at which unfinished files of dead writers are removed."""
_SPARE = 0.05
"""Part of the capacity that is freed at once, so that not every write scans the folder."""
_LOOK_EVERY_S = 0.005


class FileStore(Store):
    """Entries as files of a folder."""

    def __init__(self, section: StoreSection) -> None:
        assert section.path is not None
        self._root = expanded(section.path)
        self._folder = self._root / FOLDER
        self._max_bytes = section.max_bytes
        self._ttl_s = section.ttl_s
        self._timeout_s = section.timeout_s

    def has_caches(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._head(key) for key in keys]

    def save_caches(self, entries: Sequence[Entry]) -> int:
        return sum(map(self._save, entries))

    def load_cache(self, key: str, into: memoryview) -> bytes | None:
        with _translated(f"entry {key} cannot be read"), self._opened(key) as file:
            if file is None:
                return None
            begin, header = _read_header(file, key)
            nbytes = os.fstat(file).st_size - begin
            if nbytes != into.nbytes:
                raise CorruptEntryError(f"entry {key}: {nbytes} bytes, expected {into.nbytes}")
            done = 0
            while done < into.nbytes:
                count = os.preadv(file, [into[done:]], begin + done)
                if not count:
                    raise CorruptEntryError(f"entry {key} ends after {done} bytes")
                done += count
            return _head_in(header)

    def discard(self, key: str) -> None:
        with _translated(f"entry {key} cannot be removed"):
            self._path(key).unlink(missing_ok=True)

    def check(self) -> str:
        with _translated(f"store.path {self._root} cannot be used"):
            with self._counting() as usage:
                total = _read_usage(usage)
            return f"{total >> 20} MiB of at most {self._max_bytes >> 20} MiB are used"

    def close(self) -> None:
        """Close nothing: no file is open between calls."""

    # --------------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise StoreError(f"{key!r} is no key of an entry")
        return self._folder / key[:16] / key[17:19] / f"{key}.safetensors"

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int | None]:
        path = self._path(key)
        with _regular(path) as file:
            if file is not None:
                if time.time() - os.fstat(file).st_mtime > self._ttl_s:
                    yield None
                    return
                with contextlib.suppress(PermissionError):
                    os.utime(file)
            yield file

    def _head(self, key: str) -> bytes | None:
        try:
            with _translated(f"entry {key} cannot be read"), self._opened(key) as file:
                return None if file is None else _head_in(_read_header(file, key)[1])
        except CorruptEntryError:
            return b""  # No valid seal: the caller removes it.

    def _save(self, entry: Entry) -> int:
        path = self._path(entry.key)
        with _translated(f"entry {entry.key} cannot be written"):
            header = _header(entry)
            nbytes = len(header) + entry.payload.nbytes
            if nbytes > self._max_bytes:
                raise StoreFullError(
                    f"an entry of {nbytes} bytes: store.max_bytes is {self._max_bytes}"
                )
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                nbytes -= path.lstat().st_size  # It takes this one's place.
            gone = self._make_room(nbytes)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._write(path, header, entry)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                # The disk is smaller than store.max_bytes, or others use it, too.
                gone += self._make_room(nbytes, free_bytes=2 * (len(header) + entry.payload.nbytes))
                self._write(path, header, entry)
            return gone

    def _write(self, path: Path, header: bytes, entry: Entry) -> None:
        draft = self._folder / "drafts" / f"{secrets.token_hex(12)}"
        draft.parent.mkdir(exist_ok=True)
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write_all(file, memoryview(header))
                _write_all(file, entry.payload)
            finally:
                os.close(file)
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def _make_room(self, nbytes: int, *, free_bytes: int = 0) -> int:
        """Count bytes that will be written; evict entries until they fit, and return how many.

        With ``free_bytes`` so many are freed although the count allows more: the disk is full.
        """
        with self._counting() as usage:
            total = _read_usage(usage)
            if not free_bytes and total + nbytes <= self._max_bytes:
                _write_usage(usage, total + nbytes)
                return 0
            entries = sorted(self._scan(), key=lambda each: each[0])
            total = sum(size for _, size, _ in entries)
            limit = min(self._max_bytes * (1 - _SPARE), total - free_bytes + nbytes)
            now, gone = time.time(), 0
            for used_s, size, path in entries:
                if total + nbytes <= limit and now - used_s <= self._ttl_s:
                    break
                path.unlink(missing_ok=True)
                total -= size
                gone += 1
            _write_usage(usage, total + nbytes)
            return gone

    def _scan(self) -> Iterator[tuple[float, int, Path]]:
        """Yield ``(used_s, nbytes, path)`` of entries; remove unfinished files of dead writers."""
        for folder, _, names in os.walk(self._folder):
            for name in names:
                path = Path(folder, name)
                try:
                    found = path.lstat()
                except FileNotFoundError:
                    continue
                if path.parent.name == "drafts":
                    if time.time() - found.st_mtime > _LEFT_AFTER_S:
                        path.unlink(missing_ok=True)
                elif name.endswith(".safetensors"):
                    yield found.st_mtime, found.st_size, path

    @contextlib.contextmanager
    def _counting(self) -> Iterator[int]:
        """Lock the file that counts bytes, and yield it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder, path = self._folder.lstat(), self._folder / "usage"
        if not stat.S_ISDIR(folder.st_mode) or folder.st_mode & 0o002:
            raise StoreError(
                f"{self._folder} is a link, or other users may write to it: make it a folder that "
                "only the engines' user can enter (chmod 700)"
            )
        file = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o600)
        try:
            if os.fstat(file).st_uid != folder.st_uid:
                raise StoreError(f"{self._folder} and {path} have different owners")
            end_s = time.monotonic() + self._timeout_s
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end_s:
                        raise StoreError(
                            f"{path} is locked by another process for more than "
                            f"{self._timeout_s:g} s (store.timeout_ms)"
                        ) from None
                    time.sleep(_LOOK_EVERY_S)
            yield file
        finally:
            os.close(file)


def _read_usage(file: int) -> int:
    text = os.pread(file, 32, 0)
    return int(text) if text.strip().isdigit() else 0


def _write_usage(file: int, total: int) -> None:
    os.pwrite(file, f"{max(0, total):<32d}".encode(), 0)


def _header(entry: Entry) -> bytes:
    """Return the header of a safetensors file, with its length before it."""
    text = json.dumps(
        {
            "__metadata__": {_HEAD: entry.head.decode()},
            TENSOR: {
                "dtype": _DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [0, entry.payload.nbytes],
            },
        }
    ).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: int, name: str) -> tuple[int, dict[str, Any]]:
    """Return the offset of the payload, and the header."""
    size = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 2 <= size <= _MAX_HEADER_BYTES:
        raise CorruptEntryError(f"entry {name}: its header has {size} bytes")
    text = os.pread(file, size, 8)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptEntryError(f"entry {name}: its header cannot be read") from error
    if len(text) != size or not isinstance(header, dict):
        raise CorruptEntryError(f"entry {name}: its header is incomplete")
    return 8 + size, header


def _head_in(header: dict[str, Any]) -> bytes:
    metadata = header.get("__metadata__")
    head = metadata.get(_HEAD, "") if isinstance(metadata, dict) else ""
    return head.encode("utf-8", "replace") if isinstance(head, str) else b""


def _write_all(file: int, data: memoryview) -> None:
    done = 0
    while done < data.nbytes:
        done += os.write(file, data[done:])


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[int | None]:
    """Open a file to read; ``None`` if there is none. Links and devices are no entries."""
    try:
        file = os.open(path, os.O_RDONLY | _NO_LINK)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CorruptEntryError(f"{path} is a link") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise CorruptEntryError(f"{path} is no regular file")
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(
                f"{what}: {error.strerror}; enlarge the disk, or lower store.max_bytes"
            ) from error
        raise StoreError(f"{what}: {error}") from error
