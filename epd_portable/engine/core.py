"""Engine without a server: ``python -m epd_portable.engine.core FRONT ARGUMENTS``.

``FRONT`` is a JSON list of the Unix sockets of the front's API servers
(`epd_portable.front.server`), and ``ARGUMENTS`` are those of vLLM's server. The engine sends
its name to each server, receives the address of its client, and performs vLLM's handshake with all
of these addresses, and runs until one of the servers is gone.
"""

from __future__ import annotations

from epd_portable.vllm_plugin import imports

# isort: split

import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import msgspec
import zmq
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses
from vllm.v1.executor import Executor

from epd_portable.config.instance import InstanceConfig
from epd_portable.transfer.stores.entry import namespace_of
from epd_portable.vllm_plugin import agreement, compat

logger = logging.getLogger(__name__)

FRONT_WITHIN_S = 600.0
"""The front binds its socket when vLLM's modules are imported, which takes a cold cache minutes."""
END_WITHIN_S = 5.0


def main() -> None:
    """Run one engine in this process until the front or the launcher ends it."""
    paths, *argv = sys.argv[1:]
    config, log_stats = configuration(argv)
    instance = InstanceConfig.parse(config.ec_transfer_config.ec_connector_extra_config)
    namespace = namespace_of(instance, lambda: agreement.stored_as(config))
    fronts = [_connect(path) for path in json.loads(paths)]
    places = [_meet(front, instance.instance) for front in fronts]
    threading.Thread(target=_end_with, args=(fronts,), name="epd-end", daemon=True).start()
    run(config, places, fronts, namespace, log_stats=log_stats)


def configuration(argv: Sequence[str]) -> tuple[VllmConfig, bool]:
    """Return vLLM's configuration of an engine by its arguments, and whether it logs statistics."""
    commands, startup = compat.server_commands()
    imports.done()
    startup.cli_env_setup()
    # Of a server: what only a server has a use for is among engine arguments of files.
    parser = commands.make_arg_parser(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(argv))
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    return config, not arguments.disable_log_stats


def run(
    config: VllmConfig,
    places: Sequence[str],
    fronts: Sequence[socket.socket] = (),
    namespace: str = "",
    *,
    log_stats: bool,
) -> None:
    """Run an engine in this thread, until a signal ends it.

    Args:
        places: Beginnings of the addresses at which its clients listen.
        fronts: Connections to servers that wait for it to be ready.
        namespace: Of the store's entries that it loads and writes; empty for none.
    """
    address = f"{places[0]}-handshake"
    shaken = (address, places, fronts, agreement.fingerprint(config), namespace)
    threading.Thread(target=_shake_hands, args=shaken, name="epd-front", daemon=True).start()
    EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address=address,
        executor_class=Executor.get_class(config),
        log_stats=log_stats,
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


def _meet(front: socket.socket, name: str) -> str:
    front.sendall(f"meet {name}\n".encode())
    with front.makefile() as lines:
        return lines.readline().strip()


def _shake_hands(
    address: str,
    places: Sequence[str],
    fronts: Sequence[socket.socket],
    fingerprint: str = "",
    namespace: str = "",
) -> None:
    """Give the engine its clients' addresses, and report to each server when it is ready."""
    addresses = EngineZmqAddresses(
        inputs=[f"{place}-in" for place in places], outputs=[f"{place}-out" for place in places]
    )
    welcome = EngineHandshakeMetadata(addresses=addresses, parallel_config={})
    with zmq.Context() as context, context.socket(zmq.ROUTER) as handshake:
        handshake.bind(address)
        identity, _ = handshake.recv_multipart()  # hello
        handshake.send_multipart([identity, msgspec.msgpack.encode(welcome)])
        handshake.recv_multipart()  # ready
    for front in fronts:
        front.sendall(f"ready {namespace or '-'} {fingerprint}\n".encode())


def _end_with(fronts: Sequence[socket.socket]) -> None:
    """End this process when a server of the front does: no other knows its requests."""
    select.select(fronts, (), ())
    logger.info("the front is gone: this engine ends, too")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_WITHIN_S)
    os._exit(1)


if __name__ == "__main__":
    main()
