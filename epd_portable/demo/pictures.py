"""Drawn images with questions and exact responses, each made from one integer seed.

An image shows one to four shapes of the same kind and colour on a plain background. The same
seed always gives the same scene; training and scoring use disjoint ranges of seeds.
"""

from __future__ import annotations

import base64
import io
import math
import random
from dataclasses import dataclass
from enum import StrEnum

from PIL import Image, ImageDraw

PICTURE_SIZE = 112
"""Side in pixels of the images the model was trained on (16 image tokens)."""

HELD_OUT_SEEDS = range(0, 1_000_000)
TRAINING_SEEDS = range(1_000_000, 1 << 31)

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 40, 40),
    "orange": (245, 140, 20),
    "yellow": (245, 225, 50),
    "green": (40, 160, 70),
    "blue": (40, 80, 210),
    "purple": (140, 60, 180),
    "white": (240, 240, 240),
    "black": (18, 18, 18),
}
PLURALS: dict[str, str] = {
    "circle": "circles",
    "square": "squares",
    "triangle": "triangles",
    "star": "stars",
    "cross": "crosses",
}
SHAPES = tuple(PLURALS)
COUNT_WORDS = ("one", "two", "three", "four")

_SHADE_JITTER = 15
_SUPERSAMPLING = 4
_Point = tuple[float, float]


class QuestionKind(StrEnum):
    """Subject of a question about an image."""

    DESCRIBE = "describe"
    COUNT = "count"
    SHAPE = "shape"
    COLOUR = "colour"
    BACKGROUND = "background"


QUESTIONS: dict[QuestionKind, str] = {
    QuestionKind.DESCRIBE: "What is in the picture?",
    QuestionKind.COUNT: "How many shapes are there?",
    QuestionKind.SHAPE: "Which shape is it?",
    QuestionKind.COLOUR: "What colour is the shape?",
    QuestionKind.BACKGROUND: "What colour is the background?",
}


def article(word: str) -> str:
    """Return the indefinite article that ``word`` takes."""
    return "an" if word[0] in "aeiou" else "a"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Content of an image; every response follows from it."""

    shape: str
    colour: str
    background: str
    count: int

    def answer(self, kind: QuestionKind) -> str:
        """Return the one right response to the question of this kind."""
        number = COUNT_WORDS[self.count - 1]
        subject = f"{number} {self.colour} {PLURALS[self.shape]}"
        if self.count == 1:
            subject = f"{article(self.colour)} {self.colour} {self.shape}"
        return {
            QuestionKind.DESCRIBE: f"{subject} on {article(self.background)} "
            f"{self.background} background",
            QuestionKind.COUNT: number,
            QuestionKind.SHAPE: self.shape,
            QuestionKind.COLOUR: self.colour,
            QuestionKind.BACKGROUND: self.background,
        }[kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A drawn RGB image and the scene it shows."""

    seed: int
    scene: Scene
    image: Image.Image

    def data_url(self) -> str:
        """Return the image, without loss, as a ``data:image/png;base64,`` URL."""
        buffer = io.BytesIO()
        self.image.save(buffer, format="PNG")
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def draw(seed: int, size: int = PICTURE_SIZE) -> Picture:
    """Draw the image that belongs to ``seed``, a square of ``size`` pixels a side.

    Raises:
        ValueError: ``seed`` is negative or ``size`` is below 28, one image token.
    """
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    if size < 28:
        raise ValueError(f"size must be at least 28 pixels (one image token), got {size}")
    rng = random.Random(seed)
    colour, background = rng.sample(sorted(COLOURS), 2)
    count = 1 if rng.random() < 0.5 else rng.randint(2, len(COUNT_WORDS))
    scene = Scene(shape=rng.choice(SHAPES), colour=colour, background=background, count=count)

    canvas_size = size * _SUPERSAMPLING
    canvas = Image.new("RGB", (canvas_size, canvas_size), _shade(background, rng))
    pen = ImageDraw.Draw(canvas)
    ink = _shade(colour, rng)
    for x, y, radius in _places(count, rng):
        turn = rng.uniform(-0.1, 0.1)
        outline = [
            ((x + radius * dx) * canvas_size, (y + radius * dy) * canvas_size)
            for dx, dy in (_rotate(point, turn) for point in _OUTLINES[scene.shape])
        ]
        pen.polygon(outline, fill=ink)
    return Picture(seed=seed, scene=scene, image=canvas.reduce(_SUPERSAMPLING))


def _shade(colour: str, rng: random.Random) -> tuple[int, int, int]:
    """Vary a named colour a little, so that the model cannot rely on exact values."""
    red, green, blue = (
        min(255, max(0, channel + rng.randint(-_SHADE_JITTER, _SHADE_JITTER)))
        for channel in COLOURS[colour]
    )
    return red, green, blue


def _places(count: int, rng: random.Random) -> list[tuple[float, float, float]]:
    """Return centre and radius of each shape, in fractions of the image's side.

    One shape may be large and stand anywhere; several keep to a quarter of the image each, so
    that they never touch.
    """
    if count == 1:
        radius = rng.uniform(0.22, 0.40)
        reach = 0.48 - radius
        return [(0.5 + rng.uniform(-reach, reach), 0.5 + rng.uniform(-reach, reach), radius)]
    radius = rng.uniform(0.17, 0.21)
    reach = 0.24 - radius
    quarters = rng.sample([(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)], count)
    return [
        (x + rng.uniform(-reach, reach), y + rng.uniform(-reach, reach), radius)
        for x, y in quarters
    ]


def _rotate(point: _Point, angle: float) -> _Point:
    x, y = point
    cos, sin = math.cos(angle), math.sin(angle)
    return x * cos - y * sin, x * sin + y * cos


def _ring(corners: int, *radii: float) -> list[_Point]:
    """Return points around the origin, the first one straight up; radii alternate."""
    step = 2 * math.pi / corners
    return [
        (radii[i % len(radii)] * math.sin(i * step), -radii[i % len(radii)] * math.cos(i * step))
        for i in range(corners)
    ]


_ARM = 0.3
_OUTLINES: dict[str, list[_Point]] = {
    "circle": _ring(48, 0.95),
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "triangle": _ring(3, 1.0),
    "star": _ring(10, 1.0, 0.42),
    "cross": [
        (-_ARM, -1.0), (_ARM, -1.0), (_ARM, -_ARM), (1.0, -_ARM), (1.0, _ARM), (_ARM, _ARM),
        (_ARM, 1.0), (-_ARM, 1.0), (-_ARM, _ARM), (-1.0, _ARM), (-1.0, -_ARM), (-_ARM, -_ARM),
    ],
}  # fmt: skip
