"""``python -m tests.forkserver.server SOCKET MODULES PADDING``: imports, then forks on demand.

Ends with its standard input. `tests.forkserver.client` starts it and asks it.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from tests.forkserver import processes

REQUEST_BYTES = 1 << 20


def serve(path: str) -> None:
    """Fork for everybody who asks; tell each the pid, and the exit status when it ended."""
    asked: dict[int, socket.socket] = {}
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            ready, _, _ = select.select([listener, woken, sys.stdin.buffer], [], [])
            if sys.stdin.buffer in ready:
                return
            if woken in ready:
                os.read(woken, 4096)
                _tell_ended(asked)
            if listener in ready:
                asker, _ = listener.accept()
                data, (*outputs,), _, _ = socket.recv_fds(asker, REQUEST_BYTES, 1)
                if not data:  # It wanted to know whether anybody is here.
                    asker.close()
                    continue
                [output] = outputs
                request = json.loads(data)
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    null = os.open(os.devnull, os.O_RDONLY)
                    processes.become(request["argv"], request["env"], [null, output, output])
                os.close(output)
                asker.send(str(pid).encode())
                asked[pid] = asker


def _tell_ended(asked: dict[int, socket.socket]) -> None:
    while asked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with asked.pop(pid) as asker:
            try:
                asker.send(str(os.waitstatus_to_exitcode(status)).encode())
            except BrokenPipeError:
                continue  # Nobody waits for it.


def main() -> None:
    path, modules = sys.argv[1:3]
    for name in modules.split(","):
        importlib.import_module(name)
    # A thread would be missing in whatever is forked, with the locks that it holds.
    threads = os.listdir("/proc/self/task")
    assert len(threads) == threading.active_count() == 1, (threads, threading.enumerate())
    processes.prepare()
    serve(path)
    Path(path).unlink()


if __name__ == "__main__":
    main()
