from __future__ import annotations

import re

import pytest

from epd_portable import errors
from epd_portable.errors import ConfigError, EPDError, RequestError

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception)
}


def drawn() -> dict[str, str]:
    """Return the tree of the module's docstring as name -> name of its base."""
    bases: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"[\s│├└─]*([A-Z]\w*Error)\b", line)
        if found is None:
            continue
        indent = found.start(1)
        while path and path[-1][0] >= indent:
            path.pop()
        if path:
            bases[found[1]] = path[-1][1]
        path.append((indent, found[1]))
    return bases


def test_every_error_is_in_tree_of_docstring_below_its_base() -> None:
    real = {name: cls.__base__.__name__ for name, cls in CLASSES.items() if cls is not EPDError}
    assert drawn() == real


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("redis://:pw@h", "redis://:***@h"),
        ("--set url=redis://me:p@s:s/w0rd@h:6379/0 is", "--set url=redis://me:***@h:6379/0 is"),
        ("redis://:my pass@h", "redis://:***@h"),
        ("a http://u:p@h:1, b http://u:q@i:2", "a http://u:***@h:1, b http://u:***@i:2"),
        ("redis://me@h:6379", "redis://me@h:6379"),
        ("'http://10.0.0.1:8000' names b@c", "'http://10.0.0.1:8000' names b@c"),
        ("http://h:80/a@b", "http://h:80/a@b"),
        ("front http://h:80: 'encode-0@pair-0' is", "front http://h:80: 'encode-0@pair-0' is"),
        ("write it as http://10.0.0.1:8000", "write it as http://10.0.0.1:8000"),
    ],
)
def test_a_message_shows_no_password_of_a_url(said: str, shown: str) -> None:
    assert str(ConfigError(said)) == shown


def test_a_refused_request_carries_its_answer() -> None:
    error = RequestError("no", status=503, code="busy", retry_after_s=5)
    assert (str(error), error.status, error.code, error.retry_after_s) == ("no", 503, "busy", 5)
    assert RequestError("no", status=400, code="bad").retry_after_s is None
