"""What a measurement without an engine says to a receiver in place of vLLM's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd_portable.scheduling.items import PromptItem
from epd_portable.wire.descriptors import TensorSpec


@dataclass(frozen=True, slots=True)
class StandInFeature:
    """An item of a request, by the name that vLLM's has for it."""

    identifier: str


@dataclass(eq=False)
class StandInRequest:
    """What the receiver and the encoder cache read of vLLM's ``Request``.

    Attributes:
        request_id: Its name.
        mm_features: Its items, in the order of the prompt; nothing is between them.
        tensor: What the encoder puts out for each.
        num_computed_tokens: Tokens whose KV would be there.
    """

    request_id: str
    mm_features: Sequence[StandInFeature]
    tensor: TensorSpec
    num_computed_tokens: int = 0

    @classmethod
    def of(cls, request_id: str, mm_hashes: Sequence[str], tensor: TensorSpec) -> StandInRequest:
        """Return a request for items of these names."""
        return cls(request_id, [StandInFeature(each) for each in mm_hashes], tensor)

    @property
    def num_tokens(self) -> int:
        """Embeddings of one item."""
        return self.tensor.shape[0]

    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Return the embeddings of an item."""
        return self.num_tokens

    def prompt(self) -> list[PromptItem]:
        """Return its items as the receiver is told of them."""
        return [
            PromptItem(
                input_id=index,
                mm_hash=feature.identifier,
                begin=index * self.num_tokens,
                end=(index + 1) * self.num_tokens,
                num_embeds=self.num_tokens,
                tensor=self.tensor,
            )
            for index, feature in enumerate(self.mm_features)
        ]
