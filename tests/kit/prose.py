"""Rules of prose that pages and comments share: docs/glossary.md has the terms."""

from __future__ import annotations

import re

STOP_WORDS = "What|How|Where|Why|When|Who|Whoever|Which|That|Those|As|Of|If|It|There|This"
BANNED = re.compile(
    r"\b(?:pictures?|anew|whoever|whatever|nobody|beside|asks?|asked|tells?|told|says?|said|room|"
    r"answers?|answered|hears?|heard|parked|stand-ins?|by itself|goes on|gives? (?:up|back)|"
    r"lets? go|so does|the latter|alike)\b",
    re.IGNORECASE,
)
"""Everyday verbs and private words in place of terms of the field."""
LONGEST_SENTENCE = 25
"""Words, also of a table cell."""


def _bare(text: str) -> str:
    """Return a page without blocks, comments, code and addresses of links."""
    text = re.sub(r"^ *```\w*\n.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|^- Status:.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`([^`\n]+)`", "X", text))


def _cells(text: str) -> list[str]:
    rows = re.findall(r"^\|(.*)\|$", _bare(text), re.MULTILINE)
    return [cell for row in rows for cell in row.split("|")]


def semicolons_in_tables(text: str) -> int:
    return sum(cell.count(";") for cell in _cells(text))


def faults_of_prose(text: str) -> list[str]:
    """Return headings that begin with a stop word, and sentences and cells against the rules."""
    headings = re.findall(r"^#+ (?:\d+\. )?(.*)$", _bare(text), re.MULTILINE)
    plain = re.sub(r"^[|#].*$", "", _bare(text), flags=re.MULTILINE)
    sentences = re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*- |\n\s*\d+\. ", plain)
    return [
        *(each for each in headings if re.match(rf"(?:{STOP_WORDS})\b", each)),
        *(each for each in sentences if ";" in each),
        *(
            each
            for each in (*sentences, *_cells(text))
            if len(each.split()) > LONGEST_SENTENCE or BANNED.search(each)
        ),
    ]
