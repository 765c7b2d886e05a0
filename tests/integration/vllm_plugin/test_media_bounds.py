"""Hostile media at vLLM's own loaders, within the bounds of an instance's API server."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from epd_portable.config.front import MediaSection
from epd_portable.vllm_plugin import media_bounds
from epd_portable.vllm_plugin.media_bounds import IMAGE_FORMATS
from tests import warm

GOOD = ("good PNG", "good MP4", "good PNG at last")
MOST_CPU_MS = 300
"""Processor time of one file on a busy machine; without bounds some files take seconds."""
MOST_MIB = 64


@cache
def found() -> dict[str, Any]:
    """Return what each file cost, by its name."""
    command = ("-m", "tests.integration.vllm_plugin.hostile_media")
    run = warm.over_vllm().run(*command, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith('{"name"')]
    return {each["name"]: each for each in map(json.loads, lines)}


def test_hostile_files_are_refused_before_they_cost_anything() -> None:
    refused = [each for name, each in found().items() if name not in GOOD]
    assert len(refused) > 60
    for each in refused:
        assert each["outcome"].startswith("refused: "), each
    for each in refused[:-1]:
        assert each["cpu_ms"] < MOST_CPU_MS, each
        assert each["peak_mib"] < MOST_MIB, each


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("large PNG", "3000 × 3000 pixels: at most 1048576 .*front.media.max_item_pixels"),
        ("large PNG in an icon", "9000000 pixels.*front.media.max_item_pixels"),
        ("PNG in an ICNS", "unknown format.*PNG"),
        ("JPEG in a BLP", "unknown format.*PNG"),
        ("second icon of a request", "have 1000000 pixels or more: at most 10 "),
        ("TIFF of one large tile", "tiles of 169208064: .*front.media.max_item_pixels"),
        ("FLI as PNM", "unknown format.*PNG"),
        ("AVIF, 16 × 16 in its boxes", "memory and time for 256 pixels"),
        ("QOI", "8000000 pixels or more.*front.media.max_request_pixels"),
        ("DDS without pixels", "truncated|not enough image data"),
        ("JPEG of fill bytes", "more reads than"),
        ("MP4, 16 × 16 in its boxes", "6480000 pixels or more.*front.media.max_request_pixels"),
        ("MP4 that plays too long", "30.0 s: at most 10 .*front.media.max_seconds"),
        ("MP4 of too many frames", "700 frames: at most 600 .*front.media.max_seconds"),
        ("list of too many frames", "a list of 601 frames: at most 600 .*front.media.max_seconds"),
        ("list with a large frame", "3000 × 3000 pixels: at most 1048576 "),
        ("large MP4, 16 × 16 in its boxes", "1600x1600.*VLLM_MAX_IMAGE_PIXELS"),
        ("30 s of sound at 8000 Hz", "30.0s at 8000Hz.*VLLM_MAX_AUDIO_DECODE_DURATION_S"),
        (
            "more than there is memory for",
            "more memory than there is.*front.media.max_memory_bytes",
        ),
    ],
)
def test_refusal_names_the_limit(name: str, words: str) -> None:
    assert re.search(words, found()[name]["outcome"]), found()[name]


@cache
def formats() -> list[dict[str, str]]:
    """Return what vLLM's connector makes of files of each format, as it is and within bounds."""
    command = ("-m", "tests.integration.vllm_plugin.media_formats")
    run = warm.over_vllm().run(*command, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"name"')]


def test_images_of_each_format_are_read_as_by_plain_vllm() -> None:
    assert len(formats()) > 200
    for each in formats():
        expected = "refused" if each["name"].split()[0] in ("BLP", "ICNS") else each["plain"]
        assert each["bounded"] == expected, each


def test_formats_of_pillow_and_vllm_are_tried() -> None:
    read = {each["name"].split()[0] for each in formats() if each["plain"] != "refused"}
    assert read >= IMAGE_FORMATS | {"MPO"}
    refused = {each["name"].split()[0] for each in formats() if each["plain"] == "refused"}
    assert refused == {"EPS", "PALM", "PDF", "HEIC", "text", "nothing"}


def test_the_process_goes_on_with_files_within_its_limits() -> None:
    assert {name: found()[name]["outcome"] for name in GOOD} == dict.fromkeys(GOOD, "loaded")


def test_request_has_a_media_budget_of_its_own() -> None:
    seen: list[media_bounds.RequestBudget | None] = []
    for _ in range(2):
        media_bounds.begin_request(MediaSection(max_request_pixels=10))
        seen.append(media_bounds._budget.get())
    first, second = seen
    assert first is not None and second is not None and first is not second
    first.charge(10)
    second.charge(4)
    second.charge(6)
    with pytest.raises(ValueError, match="11 pixels or more: at most 10 "):
        first.charge(1)
