"""Messages about jobs: sizes of tensors, places of their bytes, and other versions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epd_portable.errors import ProtocolError
from epd_portable.wire import jobs
from epd_portable.wire.codec import Envelope
from epd_portable.wire.fingerprint import differences, join
from epd_portable.wire.jobs import ALIGNMENT, JOBS_VERSION, JobTensor


def of_version(version: int, message: Any) -> bytes:
    body = msgspec.Raw(msgspec.msgpack.encode(message))
    return msgspec.msgpack.encode(Envelope(protocol=version, session="s", body=body))


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (JobTensor(dtype="bool", shape=()), 1),
        (JobTensor(dtype="float32", shape=(2, 12), repeats=2, run=3), 48),
    ],
    ids=["scalar", "repeated"],
)
def test_tensor_has_the_bytes_that_are_sent(tensor: JobTensor, nbytes: int) -> None:
    assert tensor.nbytes == nbytes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": "complex64"}, "'complex64': one of bfloat16, bool"),
        ({"repeats": 2}, "no multiple of 2 x 0"),
        ({"repeats": 2, "run": 5}, "no multiple of 2 x 5"),
        ({"repeats": 2, "run": 3, "shape": ()}, "no multiple of 2 x 3"),
    ],
)
def test_invalid_tensor_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JobTensor(**{"dtype": "float32", "shape": (2, 12), **changed})


@pytest.mark.parametrize("first", [0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1])
def test_tensors_begin_at_multiples_of_the_alignment(first: int) -> None:
    tensors = [JobTensor(dtype="uint8", shape=(size,)) for size in (first, 3)]
    begin = {0: 0, 1: 64, 63: 64, 64: 64, 65: 128}[first]
    assert jobs.offsets(tensors) == ([0, begin], begin + 3)


def test_message_of_another_version_is_refused_by_its_version() -> None:
    later = of_version(JOBS_VERSION + 1, {"kind": "from a later release"})
    words = f"version {JOBS_VERSION + 1} of jobs at the sender, {JOBS_VERSION} at the receiver"
    for decode in (jobs.decode_from_front, jobs.decode_from_hub):
        with pytest.raises(jobs.OtherVersionError, match=words) as error:
            decode(later)
    refused = jobs.VersionRefused(version=jobs.JOBS_VERSION, reason=str(error.value))
    assert (refused.version, refused.reason) == (JOBS_VERSION, str(error.value))
    assert jobs.decode_from_hub(of_version(JOBS_VERSION + 1, refused)) == (refused, "s")


def test_message_of_this_version_has_its_session() -> None:
    assert jobs.decode_from_front(jobs.encode(jobs.Beat(front="f"), "s")) == (
        jobs.Beat(front="f"),
        "s",
    )
    with pytest.raises(ProtocolError, match="a front's message about jobs"):
        jobs.decode_from_front(of_version(JOBS_VERSION, {"kind": "unknown"}))


def test_head_of_a_job_is_checked_before_it_is_sent() -> None:
    job = jobs.KvJob(job="j", proof="p", tensors=(JobTensor(dtype="int32", shape=(4,)),))
    assert jobs.decode_from_front(jobs.encode_head(job, "s")) == (job, "s")
    for priority, words in (
        (1 << 31, "Expected `int` <= "),
        (1 << 70, "a job for another machine"),
    ):
        with pytest.raises(ProtocolError, match=words):
            jobs.encode_head(msgspec.structs.replace(job, priority=priority), "s")


@pytest.mark.parametrize(
    ("receiver", "sender", "words"),
    [
        ({"dtype": "float16", "model": "1"}, {"dtype": "float16", "model": "1"}, []),
        (
            {"dtype": "float16", "model": "1"},
            {"dtype": "bfloat16", "model": "2"},
            [
                "the dtype (--dtype): bfloat16 at the sender, float16 at the receiver",
                "the served model name (--served-model-name)",
            ],
        ),
        (
            {"revision": "main"},
            {"dtype": "half"},
            [
                "the dtype (--dtype): half at the sender, none at the receiver",
                "the revision (--revision): none at the sender, main at the receiver",
            ],
        ),
        ({"later": "1"}, {"later": "2"}, ["later"]),
        (
            {"model": "1"},
            {},
            ["the fingerprint: one of the two runs another release of epd-portable"],
        ),
    ],
    ids=["equal", "two parts", "missing parts", "unknown part", "older release"],
)
def test_differences_name_the_parts(
    receiver: dict[str, str], sender: dict[str, str], words: list[str]
) -> None:
    assert differences(join(receiver), join(sender)) == ", ".join(words)
