"""Why a request went where it went, for who asks. Pure."""

from __future__ import annotations

import json

from epd_portable.router.choice.profile import Decision

HEADER = "x-epd-explain"
"""A client's ``x-epd-explain: 1`` is answered under the same name."""
MAX_BYTES = 6000
"""Of the answer: a line of a header that every client takes."""
_MORE_BYTES = 40
"""What says how many decisions are left out."""


class Explanation:
    """All decisions for one request, in their order.

    Attributes:
        decisions: See above.
    """

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def text(self) -> str:
        """Return all of it as JSON in ASCII; of too much, scores are left out, then decisions."""
        said = [each.shown() for each in self.decisions]
        brief = [_compact({k: v for k, v in each.items() if k != "scores"}) for each in said]
        left_bytes = MAX_BYTES - _MORE_BYTES
        shown: list[str] = []
        for each in brief:
            left_bytes -= len(each) + 1
            if left_bytes < 0:
                break
            shown.append(each)
        for index, whole in enumerate(map(_compact, said[: len(shown)])):
            more = len(whole) - len(shown[index])
            if 0 <= more <= left_bytes:
                left_bytes -= more
                shown[index] = whole
        if len(shown) < len(brief):
            shown.append(_compact({"left_out": len(brief) - len(shown)}))
        return f"[{','.join(shown)}]"


def _compact(said: dict[str, object]) -> str:
    return json.dumps(said, separators=(",", ":"))
