"""Images, videos and audio clips as parts of a message, different for every seed."""

from __future__ import annotations

import base64
import io
import math
import random
import struct
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FRAMES_PER_SECOND = 4
SAMPLE_RATE = 16_000


def image(seed: int, width: int = 56, height: int = 56) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": _data_url("image/png", _png(seed, width, height))},
    }


def video(seed: int, frames: int = 8, side: int = 64) -> dict[str, Any]:
    """Return an MP4 file as a part."""
    import cv2

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        writer = cv2.VideoWriter(
            str(path), cv2.VideoWriter.fourcc(*"mp4v"), FRAMES_PER_SECOND, (side, side)
        )
        for frame in range(frames):
            writer.write(_noise(1000 * seed + frame, side, side))
        writer.release()
        data = path.read_bytes()
    return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", data)}}


def frames(seed: int, count: int = 4, side: int = 64) -> dict[str, Any]:
    """Return a video as a part that lists its frames."""
    texts = []
    for frame in range(count):
        file = io.BytesIO()
        Image.fromarray(_noise(1000 * seed + frame, side, side)).save(file, "JPEG")
        texts.append(base64.b64encode(file.getvalue()).decode())
    return {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(texts)}}


def input_audio(seed: int, seconds: float = 1.0) -> dict[str, Any]:
    data = base64.b64encode(_wav(seed, seconds)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def audio_url(seed: int, seconds: float = 1.0) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": _data_url("audio/wav", _wav(seed, seconds))}}


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _noise(seed: int, width: int, height: int) -> np.ndarray[Any, Any]:
    """Return ``(height, width, 3)`` uint8: blocks of 8 pixels in random colours."""
    rows, columns = math.ceil(height / 8), math.ceil(width / 8)
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    return blocks.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]


def _png(seed: int, width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(_noise(seed, width, height)).save(file, "PNG")
    return file.getvalue()


def _wav(seed: int, seconds: float) -> bytes:
    """Return a tone that changes its pitch every tenth of a second."""
    pitches = random.Random(seed)
    samples = bytearray()
    step = SAMPLE_RATE // 10
    for _ in range(round(10 * seconds)):
        pitch = pitches.uniform(100, 4000)
        for index in range(step):
            value = math.sin(2 * math.pi * pitch * index / SAMPLE_RATE)
            samples += struct.pack("<h", int(20_000 * value))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes(bytes(samples))
    return file.getvalue()
