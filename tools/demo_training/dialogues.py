"""Training data of the demo model: dialogues about images, and small talk without any."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from epd_portable.demo.pictures import (
    COLOURS,
    COUNT_WORDS,
    PLURALS,
    QUESTIONS,
    SHAPES,
    QuestionKind,
    Scene,
)

IMAGE = "<image>"
"""Stands for one picture in ``Dialogue.parts``."""

MAX_PICTURES = 4
"""Most pictures in one training dialogue."""

ORDINALS = ("first", "second", "third", "fourth")

_WORDINGS: dict[QuestionKind, tuple[str, ...]] = {
    QuestionKind.DESCRIBE: (
        "What is in the picture?",
        "What is in this image?",
        "What do you see?",
        "What is this?",
        "Describe the picture.",
        "Describe this image.",
    ),
    QuestionKind.COUNT: (
        "How many shapes are there?",
        "How many shapes are in the picture?",
        "How many?",
    ),
    QuestionKind.SHAPE: ("Which shape is it?", "What shape is it?", "Which shape is this?"),
    QuestionKind.COLOUR: (
        "What colour is the shape?",
        "What color is the shape?",
        "Which colour is it?",
        "What color is it?",
    ),
    QuestionKind.BACKGROUND: (
        "What colour is the background?",
        "What color is the background?",
        "Which colour is the background?",
    ),
}
_EACH_WORDINGS = (
    "What is in each picture?",
    "Describe the pictures.",
    "What is in these images?",
)

NO_PICTURE = "I see no picture."
OFF_TOPIC = "I only know about shapes in pictures."
_GREETING = "Hello! Show me a picture."
_IDENTITY = "I am a tiny demo model that looks at pictures."
_SMALL_TALK: dict[str, str] = {
    **dict.fromkeys(("hello", "Hello", "Hello!", "hi", "Hi", "Hi!", "hello there"), _GREETING),
    **dict.fromkeys(("Who are you?", "What are you?", "who are you"), _IDENTITY),
    "What can you do?": "I name shapes, their colours and the background.",
    "Thank you": "You are welcome.",
    "Thank you!": "You are welcome.",
    "Thanks": "You are welcome.",
}
_SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You are an assistant.")
_CHATTER = (
    "the", "a", "is", "of", "and", "to", "please", "tell", "me", "about", "why", "when", "where",
    "who", "how", "write", "story", "weather", "today", "city", "music", "number", "one", "two",
    "three", "long", "short", "explain", "code", "list", "count", "from", "name", "time", "day",
    "people", "world", "system", "data", "user", "fox", "dog", "jumps", "over", "lazy", "quick",
    "brown", "poem", "good", "my", "your", "can", "will", "do", "not",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialogue:
    """A user turn and the answer to it.

    ``parts`` is the user's content in order; each ``IMAGE`` in it stands for the next of
    ``pictures``, which index the batch's scenes.
    """

    parts: tuple[str, ...]
    answer: str
    pictures: tuple[int, ...] = ()
    system: str | None = None


def canonical_question(index: int, scene: Scene, kind: QuestionKind) -> Dialogue:
    """Return the dialogue that scoring uses: picture first, then the question's usual words."""
    return Dialogue(parts=(IMAGE, QUESTIONS[kind]), answer=scene.answer(kind), pictures=(index,))


def one_picture(index: int, scene: Scene, kind: QuestionKind, rng: random.Random) -> Dialogue:
    """Ask about a single picture, mostly in the usual words and order."""
    question = QUESTIONS[kind] if rng.random() < 0.5 else rng.choice(_WORDINGS[kind])
    parts = (IMAGE, question) if rng.random() < 0.8 else (question, IMAGE)
    return Dialogue(
        parts=parts, answer=scene.answer(kind), pictures=(index,), system=_maybe_system(rng)
    )


def several_pictures(scenes: Sequence[Scene], rng: random.Random) -> Dialogue:
    """Show two or more of the batch's pictures; ask about one of them or about each."""
    chosen = tuple(rng.sample(range(len(scenes)), rng.randint(2, MAX_PICTURES)))
    images = [IMAGE] * len(chosen)
    if rng.random() < 0.5:
        answer = "; ".join(scenes[i].answer(QuestionKind.DESCRIBE) for i in chosen)
        question = rng.choice(_EACH_WORDINGS)
    else:
        which = rng.randrange(len(chosen))
        answer = scenes[chosen[which]].answer(QuestionKind.DESCRIBE)
        question = f"What is in the {ORDINALS[which]} picture?"
    return Dialogue(
        parts=(*images, question), answer=answer, pictures=chosen, system=_maybe_system(rng)
    )


def without_picture(rng: random.Random) -> Dialogue:
    """Greet, ask about a picture that is not there, or talk about something else."""
    draw = rng.random()
    if draw < 0.5:
        text, answer = rng.choice(sorted(_SMALL_TALK.items()))
    elif draw < 0.75:
        text, answer = rng.choice(_WORDINGS[rng.choice(list(QuestionKind))]), NO_PICTURE
    else:
        text = " ".join(rng.choices(_CHATTER, k=rng.randint(1, 24))) + rng.choice(["", ".", "?"])
        answer = OFF_TOPIC
    return Dialogue(parts=(text,), answer=answer, system=_maybe_system(rng))


def vocabulary_corpus() -> list[str]:
    """Return the texts whose words become tokens; words of answers come up most often."""
    answers = [
        *COLOURS, *SHAPES, *PLURALS.values(), *COUNT_WORDS,
        "a red circle on a blue background; two green stars on an orange background",
    ]  # fmt: skip
    spoken = [*_SMALL_TALK, *_SMALL_TALK.values(), *_SYSTEM_PROMPTS, NO_PICTURE, OFF_TOPIC]
    asked = [*(w for ws in _WORDINGS.values() for w in ws), *_EACH_WORDINGS]
    asked += [f"What is in the {ordinal} picture?" for ordinal in ORDINALS]
    spaced = [f" {text}" for text in answers]
    return (answers + spaced) * 50 + (spoken + asked + ["system", "user", "assistant"]) * 10


def _maybe_system(rng: random.Random) -> str | None:
    return rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.15 else None
