from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from epd_portable.demo.pictures import (
    COLOURS,
    HELD_OUT_SEEDS,
    SHAPES,
    TRAINING_SEEDS,
    QuestionKind,
    Scene,
    draw,
)


def test_seed_always_gives_same_image_and_another_seed_another() -> None:
    assert draw(7).scene == draw(7).scene == draw(7, size=448).scene
    assert draw(7).image.tobytes() == draw(7).image.tobytes()
    assert draw(7, size=448).image.size == (448, 448)
    assert len({draw(seed).image.tobytes() for seed in range(50)}) == 50
    assert 0 in HELD_OUT_SEEDS and HELD_OUT_SEEDS.stop <= TRAINING_SEEDS.start


def test_every_shape_colour_background_and_count_comes_up() -> None:
    scenes = [draw(seed).scene for seed in range(400)]
    assert {scene.shape for scene in scenes} == set(SHAPES)
    assert {scene.colour for scene in scenes} == set(COLOURS)
    assert {scene.background for scene in scenes} == set(COLOURS)
    assert {scene.count for scene in scenes} == {1, 2, 3, 4}
    assert all(scene.colour != scene.background for scene in scenes)


def test_image_has_its_background_and_its_colour() -> None:
    def distance(pixel: tuple[int, ...], name: str) -> int:
        return max(abs(a - b) for a, b in zip(pixel, COLOURS[name], strict=True))

    for seed in range(100):
        picture = draw(seed)
        pixels = list(picture.image.resize((28, 28), Image.Resampling.NEAREST).get_flattened_data())
        assert distance(pixels[0], picture.scene.background) <= 15
        assert any(distance(pixel, picture.scene.colour) <= 15 for pixel in pixels)


def test_each_question_has_one_answer() -> None:
    scene = Scene(shape="cross", colour="orange", background="blue", count=1)
    answers = [scene.answer(kind) for kind in QuestionKind]
    assert answers == ["an orange cross on a blue background", "one", "cross", "orange", "blue"]
    scene = Scene(shape="cross", colour="red", background="orange", count=3)
    assert scene.answer(QuestionKind.DESCRIBE) == "three red crosses on an orange background"
    assert scene.answer(QuestionKind.COUNT) == "three"


def test_the_data_url_decodes_to_the_same_pixels() -> None:
    picture = draw(3)
    head, _, payload = picture.data_url().partition(",")
    assert head == "data:image/png;base64"
    decoded = Image.open(io.BytesIO(base64.b64decode(payload, validate=True)))
    assert decoded.format == "PNG"
    assert decoded.tobytes() == picture.image.tobytes()


@pytest.mark.parametrize(("seed", "size"), [(-1, 112), (0, 27)])
def test_a_seed_or_size_out_of_range_is_refused(seed: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"got {seed if seed < 0 else size}"):
        draw(seed, size=size)
