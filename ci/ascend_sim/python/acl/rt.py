"""Stands for ``acl.rt``: vllm-ascend imports it for its sleep mode, which is not modelled."""

from __future__ import annotations

from typing import NoReturn


def memcpy(*_: object) -> NoReturn:
    """Refuse.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("ascend_sim does not model acl.rt.memcpy (sleep mode)")
