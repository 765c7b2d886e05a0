"""Open files: what every connection takes one of, and how many this process may have.

A service manager allows 1024 by default, for the sake of programs that use ``select``; a router
that streams has a connection to its client, one to its instance and one for each encode job.
"""

from __future__ import annotations

import errno
import logging
import resource

logger = logging.getLogger(__name__)

WANTED = 65_536
"""What this process takes of what it is allowed."""
ENOUGH = 8192
"""With fewer the log says how far they go."""
PER_REQUEST = 3
USED_UP = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of a connection that say nothing of its other end: this process, or this
machine, has no file, memory or port left."""


def raise_limit() -> int:
    """Let this process, and those that it starts, have `WANTED` files open if the system allows it.

    Returns:
        How many it may have open now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # No limit at all is none that Linux takes for open files.
    allowed = max(soft, min(hard, WANTED))
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def warn_of_few(allowed: int) -> None:
    """Say how many requests at a time so many files are enough for, if these are not many."""
    if allowed < ENOUGH:
        logger.warning(
            "this process may have %d files open: about %d requests at a time; raise the hard "
            "limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)",
            allowed,
            allowed // PER_REQUEST,
        )
