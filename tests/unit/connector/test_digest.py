from __future__ import annotations

import pytest
import torch

from epd_portable.connector.digest import check_digest, digest_of
from epd_portable.errors import CorruptPayloadError


def test_a_digest_depends_on_bytes_alone() -> None:
    numbers = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert digest_of(numbers) == digest_of(numbers.view(torch.uint8).view(-1).clone())
    assert len(digest_of(numbers)) == 32


@pytest.mark.parametrize("place", [0, 23, 47])
def test_one_changed_byte_anywhere_is_refused_with_both_digests(place: int) -> None:
    sent = torch.arange(12, dtype=torch.float32).view(torch.uint8)
    arrived = sent.clone()
    check_digest(arrived, digest_of(sent), "item cat")
    arrived[place] ^= 1
    with pytest.raises(CorruptPayloadError, match="item cat: 48 bytes") as caught:
        check_digest(arrived, digest_of(sent), "item cat")
    assert digest_of(sent) in str(caught.value)
    assert digest_of(arrived) in str(caught.value)
