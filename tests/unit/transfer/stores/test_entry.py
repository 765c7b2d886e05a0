from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from epd_portable.config.instance import InstanceConfig
from epd_portable.config.secret import Secret, make_secret_file
from epd_portable.config.store import StoreSection
from epd_portable.errors import ConfigError, CorruptEntryError, StoreError
from epd_portable.transfer.stores.entry import Head, Seal, namespace_of
from epd_portable.transfer.stores.file import FileStore
from epd_portable.wire.descriptors import TensorSpec

SPEC = TensorSpec(shape=(4, 8), dtype="float32")
ITEM = "a" * 64


def seal(text: str = "s" * 40) -> Seal:
    return Seal(Secret(text))


def payload(first: int = 0) -> memoryview:
    data = bytearray(range(SPEC.nbytes))
    data[0] = first
    return memoryview(data)


def sealed(one: Seal, key: str, data: memoryview | None = None) -> bytes:
    return one.entry(data or payload(), key=key, mm_hash=ITEM, modality="image", tensor=SPEC).head


def test_key_depends_on_engines_modality_item_and_secret_only() -> None:
    one = seal()
    first, second = one.namespace("model a"), one.namespace("model b")
    keys = {
        one.key(first, ITEM, "image"),
        one.key(second, ITEM, "image"),
        one.key(first, ITEM, "video"),
        one.key(first, "b" * 64, "image"),
        one.key(first, "e" + ITEM, "imag"),
        seal("t" * 40).key(first, ITEM, "image"),
    }
    assert len(keys) == 6
    assert seal().key(seal().namespace("model a"), ITEM, "image") in keys
    assert seal("t" * 40).namespace("model a") != first


def test_missing_library_of_seals_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install 'epd-portable\[store\]'"):
        seal()


def changed(place: int) -> bytes:
    raw = bytearray(sealed(seal(), "key"))
    raw[place] ^= 1
    return bytes(raw)


@pytest.mark.parametrize(
    "raw",
    [
        *map(changed, (0, 10, 31, 32, 60, -1)),
        *(b"", b"x", b"0" * 32, b"0" * 32 + b"{}", b"\x80\x04N."),
        sealed(seal(), "other"),
        sealed(seal("t" * 40), "key"),
    ],
    ids=range(13),
)
def test_invalid_head_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptEntryError):
        seal().open(raw, "key")


@pytest.mark.parametrize("data", [payload(1), payload()[:-1], payload()[:0]])
def test_other_bytes_than_were_sealed_are_refused(data: memoryview) -> None:
    one = seal()
    head = one.open(sealed(one, "key"), "key")
    with pytest.raises(CorruptEntryError):
        one.check(head, data)


def test_a_payload_of_another_entry_is_refused() -> None:
    """Each has a key of its own, so a tag says nothing of the bytes of another."""
    one = seal()
    first, second = (one.open(sealed(one, "key"), "key") for _ in range(2))
    assert first.tag != second.tag
    mixed = Head(
        key="key", mm_hash=ITEM, modality="image", tensor=SPEC, nonce=first.nonce, tag=second.tag
    )
    with pytest.raises(CorruptEntryError):
        one.check(mixed, payload())


def test_a_payload_that_is_not_its_tensor_is_not_sealed() -> None:
    with pytest.raises(ValueError, match="128"):
        sealed(seal(), "key", payload()[:-4])


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "0" * 16 + "-" + "../" * 10, "A" * 49])
def test_a_key_of_another_form_leads_to_no_file(tmp_path: Path, key: str) -> None:
    store = FileStore(StoreSection(kind="file", path=str(tmp_path)))
    for use in (lambda: store.has_caches([key]), lambda: store.discard(key)):
        with pytest.raises(StoreError, match="no key of an entry"):
            use()


def test_platforms_have_namespaces_of_their_own(tmp_path: Path) -> None:
    make_secret_file(str(tmp_path / "secret"))

    def namespace(platform: Any, store: StoreSection | None) -> str:
        config = InstanceConfig(
            instance="e", platform=platform, store=store, secret_file=str(tmp_path / "secret")
        )
        return namespace_of(config, lambda: "model a")

    store = StoreSection(kind="file", path=str(tmp_path), max_bytes=1 << 30)
    assert len({namespace(each, store) for each in ("cpu", "cuda", "npu")}) == 3
    assert namespace("cpu", None) == ""
