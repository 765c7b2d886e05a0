"""Trains the demo model from scratch: ``python -m tools.demo_training.train --out DIR``.

One CPU core is enough. The same seed and number of steps give the same data; weights agree up to
the floating-point behaviour of the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import Qwen2Tokenizer

from epd_portable.demo.pictures import (
    HELD_OUT_SEEDS,
    TRAINING_SEEDS,
    Picture,
    QuestionKind,
    draw,
)
from epd_portable.platforms import torchvision_guard
from tools.demo_training.blueprint import (
    build_config,
    build_tokenizer,
    use_published_spelling,
    write_preprocessing,
)
from tools.demo_training.dialogues import (
    Dialogue,
    canonical_question,
    one_picture,
    several_pictures,
    without_picture,
)
from tools.demo_training.initial import TowerClassifier, new_model
from tools.demo_training.lessons import Teacher

_REPORT_EVERY = 50
_EVALUATE_EVERY = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides a training run."""

    steps: int = 3000
    seed: int = 0
    tower_steps: int = 500
    """First steps, in which only the vision tower learns, from its classifier."""
    classifier_weight: float = 0.3
    """Weight of the classifier's loss once the language model learns as well."""
    pictures: int = 32
    """Pictures drawn for each step; each is asked about ``questions`` times."""
    questions: int = 2
    several: int = 5
    """Dialogues with two to four of the step's pictures."""
    chatter: int = 3
    """Dialogues without a picture."""
    peak_learning_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.02
    gradient_norm: float = 1.0

    def learning_rate(self, step: int) -> float:
        """Rise linearly, then fall along a cosine to a hundredth of the peak."""
        if step < self.warmup_steps:
            return self.peak_learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def lesson(recipe: Recipe, step: int) -> tuple[list[Picture], list[Dialogue], list[Dialogue]]:
    """Return a step's pictures and its dialogues, short and long ones apart to save padding."""
    first = TRAINING_SEEDS.start + recipe.seed * 10_000_000 + step * recipe.pictures
    pictures = [draw(seed) for seed in range(first, first + recipe.pictures)]
    scenes = [picture.scene for picture in pictures]
    rng = random.Random(first)
    others = [kind for kind in QuestionKind if kind is not QuestionKind.DESCRIBE]
    short = [
        one_picture(i, scene, kind, rng)
        for i, scene in enumerate(scenes)
        for kind in (QuestionKind.DESCRIBE, *rng.sample(others, recipe.questions - 1))
    ]
    long = [several_pictures(scenes, rng) for _ in range(recipe.several)]
    long += [without_picture(rng) for _ in range(recipe.chatter)]
    return pictures, short, long


@torch.no_grad()
def exact_match(teacher: Teacher, seeds: Sequence[int]) -> dict[str, float]:
    """Return by kind of question the share of pictures whose greedy answer is exactly right.

    A greedy answer is right if and only if each of its tokens is the most likely one after the
    right tokens before it, so that no answer needs to be generated.
    """
    pictures = [draw(seed) for seed in seeds]
    features = teacher.see([picture.image for picture in pictures])
    shares = {}
    for kind in QuestionKind:
        batch = teacher.collate(
            [canonical_question(i, picture.scene, kind) for i, picture in enumerate(pictures)]
        )
        wrong = teacher.predict(batch, features).argmax(-1) != batch.targets
        shares[kind.value] = 1.0 - len(set(batch.owners[wrong].tolist())) / len(pictures)
    return shares


def train(recipe: Recipe, out: Path) -> None:
    """Run ``recipe`` and write the model and ``training.json`` into ``out``.

    A checkpoint is written at each evaluation, so that an interrupted run is not lost.
    """
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, recipe.seed)
    teacher = Teacher(tokenizer, model)
    classifier = TowerClassifier(model.config.text_config.hidden_size)
    parameters = [*model.parameters(), *classifier.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in parameters if p.dim() >= 2],
                "weight_decay": recipe.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    history: list[dict[str, object]] = []
    running_loss, started = 0.0, time.monotonic()
    for step in range(recipe.steps):
        pictures, short, long = lesson(recipe, step)
        features = teacher.see([picture.image for picture in pictures])
        loss = classifier.loss(features, [picture.scene for picture in pictures])
        if step >= recipe.tower_steps:
            batches = [teacher.collate(dialogues) for dialogues in (short, long)]
            loss = recipe.classifier_weight * loss + torch.nn.functional.cross_entropy(
                torch.cat([teacher.predict(batch, features) for batch in batches]),
                torch.cat([batch.targets for batch in batches]),
            )
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, recipe.gradient_norm)
        optimizer.step()
        running_loss += loss.item()

        done = step + 1
        if done % _REPORT_EVERY == 0:
            elapsed_s = time.monotonic() - started
            left_s = elapsed_s / done * (recipe.steps - done)
            print(
                f"step {done}/{recipe.steps}  loss {running_loss / _REPORT_EVERY:.4f}  "
                f"{elapsed_s:.0f} s elapsed, {left_s:.0f} s left",
                flush=True,
            )
        if done % _EVALUATE_EVERY == 0 or done == recipe.steps:
            scores = exact_match(teacher, HELD_OUT_SEEDS[500_000:500_200])
            history.append(
                {
                    "step": done,
                    "loss": round(running_loss / _REPORT_EVERY, 5),
                    "elapsed_s": round(time.monotonic() - started),
                    "exact_match": {kind: round(share, 4) for kind, share in scores.items()},
                }
            )
            print("exactly right on 200 held-out pictures:", scores, flush=True)
            _write(model, tokenizer, recipe, history, out)
        if done % _REPORT_EVERY == 0:
            running_loss = 0.0


def _write(
    model: transformers.Qwen2_5_VLForConditionalGeneration,
    tokenizer: Qwen2Tokenizer,
    recipe: Recipe,
    history: list[dict[str, object]],
    out: Path,
) -> None:
    """Save a bfloat16 copy of ``model`` with all that an engine needs beside it."""
    out.mkdir(parents=True, exist_ok=True)
    config = build_config(tokenizer)
    copy = transformers.Qwen2_5_VLForConditionalGeneration(config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    use_published_spelling(out)
    write_preprocessing(out, config)
    record = {
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "history": history,
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and train on one thread."""
    usual = Recipe()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=usual.steps, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of weights and pictures")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torchvision_guard.install()
    train(Recipe(steps=arguments.steps, seed=arguments.seed), arguments.out)


if __name__ == "__main__":
    main()
