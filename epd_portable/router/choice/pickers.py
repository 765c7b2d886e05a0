"""Pickers: who it is, of those that were scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from epd_portable.router.choice.plugin import Parameters, read_parameters
from epd_portable.router.choice.situation import Contender, Need, place


class Picking(Parameters):
    """Of every picker.

    Attributes:
        maxNumOfEndpoints: Taken, and without effect: one is picked, and another one when it fails.
    """

    maxNumOfEndpoints: JsonValue = None


class MaxScorePicker:
    """``max-score-picker``: the best one; of equals, whom the need's key leads to.

    So many equal instances share what comes.
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        read_parameters(Picking, name, given)

    def pick(
        self, need: Need, contenders: Sequence[Contender], scores: Sequence[float]
    ) -> Contender:
        """See `ScorePicker`."""
        best = max(scores)
        equal = [each for each, score in zip(contenders, scores, strict=True) if score == best]
        return equal[0] if len(equal) == 1 else _near(need, equal, [1.0] * len(equal))


class WeightedRandomPicker:
    """``weighted-random-picker``: each as often as its score is high.

    The chance comes from the need's key, so the same need has the same answer.
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        read_parameters(Picking, name, given)

    def pick(
        self, need: Need, contenders: Sequence[Contender], scores: Sequence[float]
    ) -> Contender:
        """See `ScorePicker`."""
        weights = scores if max(scores) > 0 else [1.0] * len(scores)
        return _near(need, contenders, weights)


class RandomPicker:
    """``random-picker``: each as often as its weight says."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        read_parameters(Picking, name, given)

    def pick(
        self, need: Need, contenders: Sequence[Contender], scores: Sequence[float]
    ) -> Contender:
        """See `ScorePicker`."""
        return _near(need, contenders, [1.0] * len(contenders))


def _near(need: Need, contenders: Sequence[Contender], weights: Sequence[float]) -> Contender:
    # An item's own key, so that the items of one request do not go the same way.
    key = f"{need.key}\0{need.item.mm_hash}" if need.item else need.key
    near = [place(key, each) * one for each, one in zip(contenders, weights, strict=True)]
    return contenders[max(range(len(near)), key=near.__getitem__)]
