"""One engine without a server: ``python -m epd_portable.vllm_plugin.engine_core FRONT ARGUMENTS``.

``FRONT`` is the Unix socket of the engine front (`epd_portable.vllm_plugin.front`), and
``ARGUMENTS`` are those of vLLM's server. The engine says its name there, is told where the front
answers vLLM's handshake, and runs until the front is gone.
"""

from __future__ import annotations

from epd_portable.vllm_plugin import imports

# isort: split

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor import Executor

from epd_portable.config.instance import InstanceConfig
from epd_portable.vllm_plugin import compat

logger = logging.getLogger(__name__)

FRONT_WITHIN_S = 600.0
"""The front binds its socket when vLLM's modules are imported, which takes a cold cache minutes."""
END_WITHIN_S = 5.0


def main() -> None:
    """Run one engine in this process until the front or the launcher ends it."""
    commands, startup = compat.server_commands()
    imports.done()
    startup.cli_env_setup()
    path, *argv = sys.argv[1:]
    # Of a server: what only a server has a use for is among engine arguments of files.
    parser = commands.make_arg_parser(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(argv))
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    name = InstanceConfig.parse(config.ec_transfer_config.ec_connector_extra_config).instance
    front = _connect(path)
    front.sendall(f"{name}\n".encode())
    address = front.makefile("r").readline().strip()
    threading.Thread(target=_end_with, args=(front,), name="epd-front", daemon=True).start()
    EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address=address,
        executor_class=Executor.get_class(config),
        log_stats=not arguments.disable_log_stats,
    )


def _connect(path: str) -> socket.socket:
    deadline = time.monotonic() + FRONT_WITHIN_S
    while True:
        front = socket.socket(socket.AF_UNIX)
        try:
            front.connect(path)
            return front
        except (FileNotFoundError, ConnectionRefusedError):
            front.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _end_with(front: socket.socket) -> None:
    """End this process when the front does: no other knows its requests."""
    with contextlib.suppress(OSError):
        front.recv(1)
    logger.info("the front is gone: this engine ends, too")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_WITHIN_S)
    os._exit(1)


if __name__ == "__main__":
    main()
