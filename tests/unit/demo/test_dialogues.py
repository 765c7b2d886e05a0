from __future__ import annotations

import random

from epd_portable.demo.pictures import QUESTIONS, QuestionKind, draw
from tools.demo_training.dialogues import (
    IMAGE,
    NO_PICTURE,
    canonical_question,
    one_picture,
    several_pictures,
    without_picture,
)

SCENES = [draw(seed).scene for seed in range(8)]


def test_the_scored_question_shows_the_picture_first_and_uses_its_usual_words() -> None:
    dialogue = canonical_question(2, SCENES[2], QuestionKind.COUNT)
    assert dialogue.parts == (IMAGE, QUESTIONS[QuestionKind.COUNT])
    assert dialogue.pictures == (2,)
    assert dialogue.system is None
    assert dialogue.answer == SCENES[2].answer(QuestionKind.COUNT)


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


def test_a_question_about_one_of_several_pictures_names_its_place() -> None:
    rng = random.Random(2)
    dialogues = [several_pictures(SCENES, rng) for _ in range(50)]
    ordinals = ["first", "second", "third", "fourth"]
    single = [d for d in dialogues if ";" not in d.answer]
    assert single
    for dialogue in single:
        place = next(i for i, word in enumerate(ordinals) if word in dialogue.parts[-1])
        scene = SCENES[dialogue.pictures[place]]
        assert dialogue.answer == scene.answer(QuestionKind.DESCRIBE)


def test_a_picture_question_without_a_picture_is_told_so() -> None:
    rng = random.Random(3)
    asked = {d.parts[0]: d.answer for d in (without_picture(rng) for _ in range(500))}
    assert asked["What is in the picture?"] == NO_PICTURE
