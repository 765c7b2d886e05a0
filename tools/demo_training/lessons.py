"""Turns dialogues and pictures into the tensors of one training batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image
from transformers import Qwen2Tokenizer

from epd_portable.demo.pictures import PICTURE_SIZE
from tools.demo_training.blueprint import (
    IMAGE_MEAN,
    IMAGE_STD,
    MERGE_SIZE,
    PATCH_SIZE,
    TEMPORAL_PATCH_SIZE,
)
from tools.demo_training.dialogues import IMAGE, Dialogue

PATCHES_PER_SIDE = PICTURE_SIZE // PATCH_SIZE
TOKENS_PER_PICTURE = (PATCHES_PER_SIDE // MERGE_SIZE) ** 2
_IMAGE_PAD = "<|image_pad|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Right-padded sequences; ``S`` dialogues of at most ``T`` tokens.

    ``pictures`` lists, in order of their placeholders in ``input_ids``, the picture that each
    placeholder run belongs to. ``predicts`` marks the positions whose next token is part of an
    answer; ``targets`` holds those next tokens in the same order.
    """

    input_ids: torch.Tensor
    """``(S, T)`` int64."""
    position_ids: torch.Tensor
    """``(3, S, T)`` int64: time, height and width."""
    pictures: torch.Tensor
    """``(P,)`` int64, one for each picture shown."""
    predicts: torch.Tensor
    """``(S, T)`` bool."""
    targets: torch.Tensor
    """``(predicts.sum(),)`` int64."""
    owners: torch.Tensor
    """``(predicts.sum(),)`` int64: the dialogue that each target belongs to."""


def patchify(images: Sequence[Image.Image]) -> torch.Tensor:
    """Return what the Qwen2-VL image processor makes of pictures that need no resizing.

    Args:
        images: RGB, each of ``PICTURE_SIZE`` squared.

    Returns:
        Float32 ``(len(images) * patches, 3 * TEMPORAL_PATCH_SIZE * PATCH_SIZE ** 2)``; patches
        come in groups of ``MERGE_SIZE`` squared that become one token.
    """
    pixels: npt.NDArray[np.float32] = np.stack([np.asarray(i, dtype=np.float32) for i in images])
    mean = np.asarray(IMAGE_MEAN, dtype=np.float32)
    std = np.asarray(IMAGE_STD, dtype=np.float32)
    pixels = (pixels / 255.0 - mean) / std
    groups = PATCHES_PER_SIDE // MERGE_SIZE
    blocks = pixels.reshape(
        len(images), groups, MERGE_SIZE, PATCH_SIZE, groups, MERGE_SIZE, PATCH_SIZE, 3
    ).transpose(0, 1, 4, 2, 5, 7, 3, 6)
    frames = np.repeat(blocks[:, :, :, :, :, :, None], TEMPORAL_PATCH_SIZE, axis=6)
    return torch.from_numpy(frames.reshape(len(images) * PATCHES_PER_SIDE**2, -1))


def picture_grid(count: int) -> torch.Tensor:
    """Return ``(count, 3)``: time, height and width of each picture in patches."""
    return torch.tensor([[1, PATCHES_PER_SIDE, PATCHES_PER_SIDE]] * count)


class Teacher:
    """Collates dialogues with the tokenizer and the positions of one model."""

    def __init__(
        self,
        tokenizer: Qwen2Tokenizer,
        model: transformers.Qwen2_5_VLForConditionalGeneration,
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._image_id = tokenizer.convert_tokens_to_ids(_IMAGE_PAD)
        self._end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
        # The same few prompts come up again and again.
        self._prompt = lru_cache(maxsize=4096)(self._make_prompt)
        self._answer = lru_cache(maxsize=8192)(self._make_answer)

    def collate(self, dialogues: Sequence[Dialogue]) -> Batch:
        """Tokenize and pad ``dialogues``; the loss covers the answers and their end token."""
        prompts = [self._prompt(d.parts, d.system) for d in dialogues]
        answers = [self._answer(d.answer) for d in dialogues]
        lengths = [len(p[0]) + len(a) for p, a in zip(prompts, answers, strict=True)]
        shape = (len(dialogues), max(lengths))
        input_ids = torch.full(shape, self._end_id)
        position_ids = torch.zeros((3, *shape), dtype=torch.int64)
        predicts = torch.zeros(shape, dtype=torch.bool)
        rows = zip(prompts, answers, lengths, strict=True)
        for row, ((ids, positions), answer, length) in enumerate(rows):
            start = len(ids)
            input_ids[row, :start] = ids
            input_ids[row, start:length] = answer
            position_ids[:, row, :start] = positions
            position_ids[:, row, start:length] = torch.arange(len(answer)) + positions.max() + 1
            predicts[row, start - 1 : length - 1] = True
        return Batch(
            input_ids=input_ids,
            position_ids=position_ids,
            pictures=torch.tensor([p for d in dialogues for p in d.pictures], dtype=torch.int64),
            predicts=predicts,
            targets=torch.cat(answers),
            owners=torch.repeat_interleave(
                torch.arange(len(answers)), torch.tensor([len(a) for a in answers])
            ),
        )

    def see(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Encode pictures; returns ``(len(images), TOKENS_PER_PICTURE, hidden_size)``."""
        features = self._model.model.get_image_features(
            patchify(images), picture_grid(len(images))
        ).pooler_output
        return torch.stack(list(features))

    def predict(self, batch: Batch, features: torch.Tensor) -> torch.Tensor:
        """Return the logits ``(predicts.sum(), vocabulary)`` of the answers' tokens."""
        embeddings = self._model.get_input_embeddings()(batch.input_ids)
        shown = (batch.input_ids == self._image_id).unsqueeze(-1)
        embeddings = embeddings.masked_scatter(shown, features[batch.pictures])
        hidden = self._model.model.language_model(
            inputs_embeds=embeddings, position_ids=batch.position_ids, use_cache=False
        ).last_hidden_state
        logits: torch.Tensor = self._model.lm_head(hidden[batch.predicts])
        return logits

    def _make_prompt(
        self, parts: tuple[str, ...], system: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        content = [
            {"type": "image"} if part == IMAGE else {"type": "text", "text": part} for part in parts
        ]
        messages: list[dict[str, object]] = [{"role": "user", "content": content}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        text = text.replace(_IMAGE_PAD, _IMAGE_PAD * TOKENS_PER_PICTURE)
        ids = torch.tensor([self._tokenizer(text).input_ids])
        positions, _ = self._model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self._image_id).int(),
            image_grid_thw=picture_grid(parts.count(IMAGE)) if IMAGE in parts else None,
        )
        return ids[0], positions[:, 0]

    def _make_answer(self, answer: str) -> torch.Tensor:
        return torch.tensor([*self._tokenizer(answer).input_ids, self._end_id])
