"""Servers inside a test's own event loop."""

from __future__ import annotations

import asyncio


async def stop_listening(server: asyncio.Server) -> None:
    """Close a listening server, with nobody half accepted: asyncio would forget their sockets.

    They would be collected during another test, which would fail for them.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(3):
        await asyncio.sleep(0)
    server.close()
