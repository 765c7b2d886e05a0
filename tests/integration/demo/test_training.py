from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from epd_portable.demo import MODEL_DIR
from epd_portable.demo.pictures import TRAINING_SEEDS, QuestionKind, draw
from epd_portable.platforms import torchvision_guard
from tools.demo_training.blueprint import IMAGE_MEAN, IMAGE_STD, MAX_PIXELS, MIN_PIXELS
from tools.demo_training.dialogues import IMAGE, Dialogue, canonical_question
from tools.demo_training.initial import TowerClassifier
from tools.demo_training.lessons import TOKENS_PER_PICTURE, Teacher, patchify, picture_grid
from tools.demo_training.train import Recipe, exact_match, lesson, train


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute as the command does: for tensors this small, threads wait more than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> transformers.Qwen2_5_VLForConditionalGeneration:
    torchvision_guard.install()
    return transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        MODEL_DIR, dtype=torch.float32, local_files_only=True
    ).eval()


@pytest.fixture(scope="module")
def teacher(model: transformers.Qwen2_5_VLForConditionalGeneration) -> Teacher:
    return Teacher(AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True), model)


def test_patches_equal_those_of_the_image_processor() -> None:
    torchvision_guard.install()
    processor = transformers.Qwen2VLImageProcessorPil(
        image_mean=list(IMAGE_MEAN),
        image_std=list(IMAGE_STD),
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    )
    images = [draw(seed).image for seed in range(3)]
    expected = processor(images, return_tensors="pt")
    torch.testing.assert_close(patchify(images), expected["pixel_values"])
    assert torch.equal(picture_grid(3), expected["image_grid_thw"])


@torch.no_grad()
def test_training_sees_the_logits_that_the_model_gives_when_called_directly(
    model: transformers.Qwen2_5_VLForConditionalGeneration, teacher: Teacher
) -> None:
    pictures = [draw(1), draw(2)]
    images = [picture.image for picture in pictures]
    dialogue = Dialogue(
        parts=("Look:", IMAGE, "and", IMAGE, "What is in each picture?"),
        answer="a red circle",
        pictures=(1, 0),
        system="Answer briefly.",
    )
    longer = canonical_question(0, pictures[0].scene, QuestionKind.DESCRIBE)
    batch = teacher.collate([dialogue, longer])
    logits = teacher.predict(batch, teacher.see(images))[batch.owners == 0]

    length = int(batch.predicts[0].nonzero().max()) + 1
    ids = batch.input_ids[:1, :length]
    shown = (ids == model.config.image_token_id).int()
    assert int(shown.sum()) == 2 * TOKENS_PER_PICTURE
    direct = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=shown,
        pixel_values=patchify(images[::-1]),
        image_grid_thw=picture_grid(2),
    ).logits[0, batch.predicts[0, :length]]
    torch.testing.assert_close(logits, direct, atol=1e-4, rtol=1e-4)


def test_the_bundled_model_answers_from_the_picture(teacher: Teacher) -> None:
    shares = exact_match(teacher, range(40))
    assert min(shares.values()) >= 0.95


def test_answers_change_when_the_pictures_are_swapped(teacher: Teacher) -> None:
    pictures = [draw(seed) for seed in range(2)]
    features = teacher.see([picture.image for picture in pictures])
    batch = teacher.collate(
        [canonical_question(i, p.scene, QuestionKind.DESCRIBE) for i, p in enumerate(pictures)]
    )
    right = teacher.predict(batch, features).argmax(-1) == batch.targets
    swapped = teacher.predict(batch, features.flip(0)).argmax(-1) == batch.targets
    assert right.all()
    assert not swapped.all()


def test_the_learning_rate_rises_then_falls_to_a_hundredth() -> None:
    recipe = Recipe(steps=1000, warmup_steps=100, peak_learning_rate=1.0)
    assert recipe.learning_rate(0) == pytest.approx(0.01)
    assert recipe.learning_rate(100) == pytest.approx(1.0)
    assert recipe.learning_rate(550) == pytest.approx(0.505)
    assert recipe.learning_rate(1000) == pytest.approx(0.01)


def test_lessons_use_training_seeds_only_and_never_the_same_picture_twice() -> None:
    recipe = Recipe()
    first, second = lesson(recipe, 0), lesson(recipe, 1)
    seeds = [picture.seed for picture in (*first[0], *second[0])]
    assert len(set(seeds)) == 2 * recipe.pictures
    assert all(seed in TRAINING_SEEDS for seed in seeds)
    assert len(first[1]) == recipe.pictures * recipe.questions
    assert len(first[2]) == recipe.several + recipe.chatter


def test_the_tower_classifier_learns_what_it_is_shown() -> None:
    torch.manual_seed(0)
    scenes = [draw(seed).scene for seed in range(8)]
    features = torch.randn(8, TOKENS_PER_PICTURE, 128)
    classifier = TowerClassifier(128)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=0.1)
    before = classifier.loss(features, scenes).item()
    for _ in range(30):
        optimizer.zero_grad()
        torch.autograd.backward(classifier.loss(features, scenes))
        optimizer.step()
    assert classifier.loss(features, scenes).item() < before / 10


def test_a_short_run_writes_a_complete_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchvision_guard.install()
    # A good start and a fair judgement take hundreds of pictures; this model is only written.
    monkeypatch.setattr(
        "tools.demo_training.train.exact_match",
        lambda teacher, seeds: exact_match(teacher, seeds[:4]),
    )
    monkeypatch.setattr("tools.demo_training.initial._WHITENING_PICTURES", 20)
    train(Recipe(steps=2, tower_steps=1, pictures=4), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {p.name for p in MODEL_DIR.iterdir()}
