from __future__ import annotations

import re

from epd_portable import errors
from epd_portable.errors import EPDError, RequestError

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


def test_every_error_is_in_the_tree_of_the_docstring_below_its_base() -> None:
    real = {name: cls.__base__.__name__ for name, cls in CLASSES.items() if cls is not EPDError}
    assert drawn() == real


def test_every_error_says_what_it_means() -> None:
    assert [name for name, cls in CLASSES.items() if not cls.__doc__] == []


def test_a_refused_request_carries_its_answer() -> None:
    error = RequestError("no", status=503, code="busy", retry_after_s=5)
    assert (str(error), error.status, error.code, error.retry_after_s) == ("no", 503, "busy", 5)
    assert RequestError("no", status=400, code="bad").retry_after_s is None
