from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from epd_portable.demo.pictures import HELD_OUT_SEEDS, TRAINING_SEEDS, QuestionKind, Scene, draw


def test_seed_always_gives_same_image_and_another_seed_another() -> None:
    assert draw(7).scene == draw(7).scene == draw(7, size=448).scene
    assert draw(7).image.tobytes() == draw(7).image.tobytes()
    assert draw(7, size=448).image.size == (448, 448)
    assert len({draw(seed).image.tobytes() for seed in range(50)}) == 50
    assert 0 in HELD_OUT_SEEDS and HELD_OUT_SEEDS.stop <= TRAINING_SEEDS.start


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
