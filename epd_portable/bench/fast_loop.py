"""The event loop of processes beside what is measured, and commands that come as lines.

What such a process takes must be little and even: the loop is the fast one, and the collector runs
between commands only.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec


def install_fast_loop() -> None:
    """Use the event loop that servers with vLLM have, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


def carry_out_commands(kind: Any, carry_out: Callable[[Any], Awaitable[object]]) -> None:
    """Answer each line of standard input, a command, with a line of JSON, until the input ends.

    Args:
        kind: Type of commands, as msgspec decodes it.
        carry_out: Returns what came of a command.

    Raises:
        msgspec.DecodeError: A line is no command.
    """
    install_fast_loop()
    loop = asyncio.new_event_loop()
    gc.freeze()
    gc.disable()
    for line in sys.stdin.buffer:
        command = msgspec.json.decode(line, type=kind)
        done = loop.run_until_complete(carry_out(command))
        sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
        sys.stdout.buffer.flush()
        gc.collect()
