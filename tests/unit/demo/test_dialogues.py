from __future__ import annotations

import random

from epd_portable.demo.pictures import QuestionKind, draw
from tools.demo_training.dialogues import (
    IMAGE,
    one_picture,
    several_pictures,
    without_picture,
)

SCENES = [draw(seed).scene for seed in range(8)]


def test_placeholders_and_pictures_agree_in_every_dialogue() -> None:
    rng = random.Random(0)
    dialogues = [
        *(one_picture(1, SCENES[1], kind, rng) for kind in QuestionKind for _ in range(20)),
        *(several_pictures(SCENES, rng) for _ in range(50)),
        *(without_picture(rng) for _ in range(50)),
    ]
    for dialogue in dialogues:
        assert dialogue.parts.count(IMAGE) == len(dialogue.pictures)
        assert dialogue.answer


def test_a_question_about_each_picture_is_answered_in_their_order() -> None:
    rng = random.Random(1)
    dialogues = [several_pictures(SCENES, rng) for _ in range(50)]
    each = [d for d in dialogues if ";" in d.answer]
    assert each
    for dialogue in each:
        expected = [SCENES[i].answer(QuestionKind.DESCRIBE) for i in dialogue.pictures]
        assert dialogue.answer.split("; ") == expected
