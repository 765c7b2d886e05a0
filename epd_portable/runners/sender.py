"""Encode worker: announces items, writes them into granted slots and hears acks.

A thread does that in turns, and the model runner's takes one when it has put out an item. In such a
turn

- a short copy in host memory is made, and *written* said;
- a copy that a device makes by itself is queued behind the computation. One thread waits for the
  ends of these, which come in the order in which they were queued, and says *written*;
- whatever else may have to be waited for is left to a thread of a pool, which hands its end back.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from epd_portable.connector import registry
from epd_portable.connector.control import ControlClients, host_identity, new_session
from epd_portable.connector.copies import CHUNK_BYTES, QueuedCopy
from epd_portable.connector.curve import read_keys
from epd_portable.connector.digest import digest_of
from epd_portable.connector.producer import Actions, Finished, ProducerSession, TransferOrder, Write
from epd_portable.connector.transport import Transport
from epd_portable.envs import EPD_PAYLOAD_DIGEST
from epd_portable.errors import EPDError, TransportError, UnsupportedError
from epd_portable.log import trace
from epd_portable.runners.cores import on_all_cores
from epd_portable.runners.sender_metrics import SenderMetrics
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor

if TYPE_CHECKING:
    import torch

    from epd_portable.config.instance import InstanceConfig
    from epd_portable.connector.copies import DeviceCopies
    from epd_portable.platforms.base import DeviceEvent

logger = logging.getLogger(__name__)

_WRITERS = 4
_BUSY_POLL_S = 0.05
_IDLE_POLL_S = 1.0
_BACK_OFF_S = 0.01
_STUCK_AFTER_S = 30.0
"""A write that goes on for so long after its lease is told of; when closing, it is left alone."""


class Sender:
    """Delivers encoder outputs to consumers, beside the model runner's thread.

    Outputs are kept until every transfer of theirs has ended. An error ends the transfer that it
    concerns; should a thread end all the same, `submit` raises.

    Args:
        config: Of this instance.
        fingerprint: What consumers must agree with.
        copies: Of the worker's device.
        metrics: Counts what happens; ``None`` counts where nobody looks.
    """

    def __init__(
        self,
        config: InstanceConfig,
        fingerprint: str,
        copies: DeviceCopies,
        metrics: SenderMetrics | None = None,
    ) -> None:
        self._metrics = metrics or SenderMetrics()
        session = new_session()
        platform, index = copies.platform, copies.index
        paths = registry.offered_by(config)
        self._keys = read_keys(config.secret_file)
        peer = PeerDescriptor(
            instance=config.instance,
            session=session,
            host=host_identity(),
            device=f"{platform.name}:{index}",
            fingerprint=fingerprint,
            paths=tuple(PathEndpoint(path=path.name) for path in paths),
        )
        self._copies = copies
        self._digests = EPD_PAYLOAD_DIGEST.get()
        self._session = ProducerSession(peer, wait_timeout_s=config.wait_timeout_s)
        self._transports: dict[str, Transport] = {}
        self._in_place = frozenset(
            path.name for path in paths if registry.copies_in_place(path.name, platform.name)
        )
        self._queues = frozenset(
            path.name for path in paths if registry.queues_copies(path.name, platform.name)
        )
        self._writes: SimpleQueue[Write | None] = SimpleQueue()
        self._queued: SimpleQueue[tuple[Write, QueuedCopy, float] | None] = SimpleQueue()
        """Copies that the device makes, each with the time at which it was asked to."""
        self._writing: dict[str, Write] = {}
        """What is being written, those that are told to be stuck left out."""
        self._orders: dict[str, TransferOrder] = {}
        self._users: Counter[str] = Counter()
        self._outputs: dict[str, tuple[torch.Tensor, DeviceEvent]] = {}
        self._lock = threading.Lock()
        self._turns = threading.Lock()
        """Whoever has it exchanges messages and moves the session on."""
        self._inbox: deque[Callable[[float], None]] = deque()
        self._ended: set[str] = set()
        self._has_ended = threading.Event()
        self._told: set[tuple[type[Exception], int | None]] = set()
        self._wait_timeout_s = config.wait_timeout_s
        self._stop_s: float | None = None
        self._over = False
        self._death: tuple[str, BaseException] | None = None
        self._thread = threading.Thread(target=self._run, name="epd-sender", daemon=True)
        self._writers = [
            threading.Thread(target=self._write_aside, name=f"epd-writer-{number}", daemon=True)
            for number in range(_WRITERS)
        ]
        self._watchers = []
        if self._queues:
            watcher = threading.Thread(target=self._watch, name="epd-watcher", daemon=True)
            self._watchers.append(watcher)
        with on_all_cores():
            self._control = ControlClients(session, self._keys)
            for thread in (self._thread, *self._writers, *self._watchers):
                thread.start()

    # -- the model runner's thread ---------------------------------------------------------------

    def submit(self, order: TransferOrder, output: torch.Tensor | None) -> None:
        """Begin a transfer; one of that id that has not ended stays as it is.

        Args:
            order: What and where to.
            output: The item, if the engine has it from before: ``(num_tokens, width)`` on the
                worker's device.

        Raises:
            TransportError: The sender's thread has ended: nothing leaves this instance any more.
        """
        if self._death is not None:
            thread, error = self._death
            raise TransportError(
                f"transfer {order.transfer_id}: the thread {thread} ended with {error!r}, and no "
                "item leaves this encode instance; restart it"
            ) from error
        with self._lock:
            if order.transfer_id in self._orders:
                logger.warning("transfer %s is under way already", order.transfer_id)
                return
            self._orders[order.transfer_id] = order
            self._users[order.mm_hash] += 1
            if output is not None:
                self._keep(order.mm_hash, output)
            ready = order.mm_hash in self._outputs
        self._metrics.submitted(cached=ready)
        self._post(partial(self._submit, order, ready))

    def output_ready(self, mm_hash: str, output: torch.Tensor) -> None:
        """The encoder has queued the computation of an item, ``(num_tokens, width)``."""
        with self._lock:
            if not self._users[mm_hash]:
                return
            self._keep(mm_hash, output)
        trace("output.ready", mm_hash=mm_hash)
        self._inbox.append(lambda now: self._session.output_ready(mm_hash))
        # What can be written at once leaves at once: the thread would have to be woken, and then
        # wait for Python's lock, which this one keeps.
        if not ((self._in_place or self._queues) and self._turn_here(blocking=False)):
            self._control.wake()

    def take_ended(self) -> set[str]:
        """Return the ids of transfers that ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, set()
            self._has_ended.clear()
        return ended

    def rest(self, timeout_s: float) -> None:
        """Block until a transfer has ended since `take_ended`, but no longer than this."""
        self._has_ended.wait(timeout_s)

    def close(self, linger_s: float = 0.0) -> None:
        """Stop; writes that are under way end first.

        Args:
            linger_s: Transfers may end within so many seconds before.
        """
        with self._lock:
            self._stop_s = time.monotonic() + linger_s
        self._control.wake()
        self._thread.join()

    # -- the sender's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            failing_since_s: float | None = None
            self._copies.platform.set_device(self._copies.index)
            while not self._is_over():
                try:
                    self._control.wait(_BUSY_POLL_S if len(self._session) else _IDLE_POLL_S)
                    with self._turns:
                        self._turn()
                    failing_since_s = None
                except Exception as error:
                    now = time.monotonic()
                    failing_since_s = failing_since_s or now
                    if now - failing_since_s > self._wait_timeout_s:
                        raise  # Every transfer has missed its deadline; this does not get better.
                    self._tell(error)
                    time.sleep(_BACK_OFF_S)
        except BaseException as error:
            self._died(error)
            raise
        finally:
            with self._turns:
                self._over = True
            for _ in self._writers:
                self._writes.put(None)
            self._queued.put(None)
            stuck_s = time.monotonic() + _STUCK_AFTER_S
            others = [*self._writers, *self._watchers]
            for thread in others:
                thread.join(max(0.0, stuck_s - time.monotonic()))
            if not any(thread.is_alive() for thread in others):
                for transport in self._transports.values():
                    transport.close()
            with self._turns:
                self._control.close()

    def _is_over(self) -> bool:
        if self._stop_s is None:
            return False
        idle = not self._inbox and not len(self._session)
        return idle or time.monotonic() >= self._stop_s

    def _turn(self) -> None:
        received = self._control.receive()
        now = time.monotonic()
        while self._inbox:
            with self._surviving():
                self._inbox.popleft()(now)
        for address, message in received:
            with self._surviving(message.transfer_id):
                self._session.receive(address, message, now)
        actions = self._session.poll(now)
        writes = deque(actions.writes)
        self._act(actions)
        while writes:
            self._begin(writes.popleft())
            self._act(self._session.take())
        for write in [each for each in self._writing.values() if _is_stuck(each, now)]:
            del self._writing[write.transfer_id]
            logger.error(
                "transfer %s: its write has not ended %.0f s after its lease; item %s and its slot "
                "stay taken until it does; if its device is stuck restart the instance",
                write.transfer_id,
                _STUCK_AFTER_S,
                write.mm_hash,
            )

    def _turn_here(self, *, blocking: bool) -> bool:
        """Take a turn in a thread that is not the sender's, unless that has one."""
        if not self._turns.acquire(blocking=blocking):
            return False
        try:
            self._turn()
        except Exception as error:  # The sender's thread meets it again, and knows when to give up.
            self._tell(error)
        finally:
            self._turns.release()
        return True

    def _act(self, actions: Actions) -> None:
        """Send and forget what the session asks for; writes are begun by the caller."""
        for address, message in actions.messages:
            with self._surviving(message.transfer_id):
                try:
                    self._control.send(address, message)
                    self._metrics.sent(message)
                except TransportError as error:  # It is sent again; the address may yet be there.
                    logger.error("transfer %s: %s", message.transfer_id, error)
        for finished in actions.finished:
            with self._surviving():
                self._forget(finished)

    def _forget(self, finished: Finished) -> None:
        if finished.problem:
            logger.warning("transfer %s ended: %s", finished.transfer_id, finished.problem)
        with self._lock:
            del self._orders[finished.transfer_id]
            self._users[finished.mm_hash] -= 1
            if not self._users[finished.mm_hash]:
                del self._users[finished.mm_hash]
                output = self._outputs.pop(finished.mm_hash, None)
                if output is not None:
                    self._metrics.kept(-output[0].nbytes)
            self._ended.add(finished.transfer_id)
            self._has_ended.set()
        self._metrics.finished(finished)

    def _begin(self, write: Write) -> None:
        """Write here what takes about a millisecond at most, have the rest written elsewhere."""
        if self._over:
            return  # Nobody would wait for the end of it.
        with self._surviving(write.transfer_id):
            self._writing[write.transfer_id] = write
            if write.path in self._in_place and write.slot.nbytes <= CHUNK_BYTES:
                self._write(write)(time.monotonic())
            elif write.path not in self._queues or self._digests or not self._queue(write):
                self._writes.put(write)

    def _queue(self, write: Write) -> bool:
        """Let the device copy an item; do nothing if this thread would have to wait for it."""
        begin_s = time.monotonic()
        try:
            output, computed = self._output_of(write)
            copy = self._transport(write.path).queue(
                output,
                write.slot,
                computed=computed,
                address=write.address,
                deadline_s=write.deadline_s,
            )
        except Exception as error:
            self._write_failed(write, error, begin_s)
            return True
        if copy is None:
            return False
        try:
            _trace_begun(write)
        finally:  # Whatever happens: the end of it must be heard.
            self._queued.put((write, copy, begin_s))
        return True

    def _submit(self, order: TransferOrder, ready: bool, now: float) -> None:
        with self._surviving(order.transfer_id):
            self._session.submit(order, ready=ready, now=now)

    @contextmanager
    def _surviving(self, transfer_id: str = "") -> Iterator[None]:
        """End this transfer alone if something goes wrong that no part of the package foresaw."""
        try:
            yield
        except Exception as error:
            self._tell(error)
            self._session.fail(transfer_id, str(error) or repr(error))

    def _tell(self, error: Exception) -> None:
        """Log what kind of error it is; each kind once."""
        number = getattr(error, "errno", None)
        if (type(error), number) in self._told:
            return
        self._told.add((type(error), number))
        remedy = (
            "raise the limit of open files (ulimit -n)"
            if number in (errno.EMFILE, errno.ENFILE)
            else "report it with this trace"
        )
        logger.error(
            "the sender goes on after %r, without the transfer concerned; %s",
            error,
            remedy,
            exc_info=error,
        )

    def _died(self, error: BaseException) -> None:
        thread = threading.current_thread().name
        self._death = (thread, error)
        logger.critical("the thread %s ends: no item leaves this instance any more", thread)

    def _post(self, work: Callable[[float], None]) -> None:
        self._inbox.append(work)
        self._control.wake()

    def _keep(self, mm_hash: str, output: torch.Tensor) -> None:
        if mm_hash not in self._outputs:
            # Behind the computation, and behind the copy if that is not in one piece.
            whole = output.detach().contiguous()
            self._outputs[mm_hash] = (whole, self._copies.platform.record_event())
            self._metrics.kept(whole.nbytes)

    # -- the watcher's thread --------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait for copies that the device makes, and say *written* when each has ended.

        All are on one stream, so they end in the order in which they were queued.
        """
        try:
            self._copies.platform.set_device(self._copies.index)
            while (queued := self._queued.get()) is not None:
                self._inbox.append(self._end_of(*queued))
                self._turn_here(blocking=True)
        except BaseException as error:
            self._died(error)
            raise

    def _end_of(self, write: Write, copy: QueuedCopy, begin_s: float) -> Callable[[float], None]:
        """Wait until a copy has ended; return the report of it."""
        try:
            copy.finish()
            write_s = time.monotonic() - begin_s
            _trace_written(write, write_s)
        except Exception as error:
            return partial(self._write_failed, write, error)
        return partial(self._write_done, write, "", write_s)

    # -- a writer's thread, or the sender's ------------------------------------------------------

    def _write_aside(self) -> None:
        while (write := self._writes.get()) is not None:
            report = self._write(write)
            try:
                self._post(report)
            except Exception as error:  # Nobody was woken, but the report is found soon.
                self._tell(error)

    def _write(self, write: Write) -> Callable[[float], None]:
        """Write an item; return the report of it, which is for the sender's thread."""
        try:
            digest, write_s = self._carry_out(write)
        except Exception as error:
            return partial(self._write_failed, write, error)
        return partial(self._write_done, write, digest, write_s)

    def _write_done(self, write: Write, digest: str, write_s: float, now: float) -> None:
        self._writing.pop(write.transfer_id, None)
        with self._surviving(write.transfer_id):
            self._session.write_done(write.transfer_id, now, digest=digest)
            self._act(self._session.take())  # The consumer waits; what is counted can.
            self._metrics.written(write, write_s)

    def _write_failed(self, write: Write, error: Exception, now: float) -> None:
        self._writing.pop(write.transfer_id, None)
        self._metrics.write_failed(write)
        if not isinstance(error, EPDError):
            logger.error("transfer %s: write failed", write.transfer_id, exc_info=error)
        if isinstance(error, UnsupportedError):
            logger.warning("path %s is not offered any more: %s", write.path, error)
            self._session.withdraw(write.path)
        self._session.write_failed(write.transfer_id, str(error) or repr(error), now)

    def _carry_out(self, write: Write) -> tuple[str, float]:
        """Write an item; return its digest, if that is asked for, and the seconds that it took."""
        self._copies.platform.set_device(self._copies.index)
        output, computed = self._output_of(write)
        digest = ""
        if self._digests:
            deadline_s = write.deadline_s
            digest = digest_of(self._copies.to_host(output, after=computed, deadline_s=deadline_s))
        _trace_begun(write)
        begin_s = time.monotonic()
        self._transport(write.path).write(
            output,
            write.slot,
            computed=computed,
            address=write.address,
            deadline_s=write.deadline_s,
        )
        write_s = time.monotonic() - begin_s
        _trace_written(write, write_s)
        return digest, write_s

    def _output_of(self, write: Write) -> tuple[torch.Tensor, DeviceEvent]:
        """Return what the encoder put out, and the event behind its computation.

        Raises:
            TransportError: It is not what was announced.
        """
        with self._lock:
            order = self._orders[write.transfer_id]
            output, computed = self._outputs[write.mm_hash]
        shape, dtype = tuple(output.shape), str(output.dtype).removeprefix("torch.")
        if (shape, dtype) != (order.tensor.shape, order.tensor.dtype):
            raise TransportError(
                f"encoder put out {shape} {dtype}, announced was {order.tensor.shape} "
                f"{order.tensor.dtype}"
            )
        return output, computed

    def _transport(self, path: str) -> Transport:
        with self._lock:
            if path not in self._transports:
                self._transports[path] = registry.load_transport(path, self._copies, self._keys)
            return self._transports[path]


def _is_stuck(write: Write, now: float) -> bool:
    return now > write.deadline_s + _STUCK_AFTER_S


def _trace_begun(write: Write) -> None:
    trace("transfer.begun", transfer=write.transfer_id, mm_hash=write.mm_hash, path=write.path)


def _trace_written(write: Write, write_s: float) -> None:
    trace(
        "transfer.written",
        transfer=write.transfer_id,
        mm_hash=write.mm_hash,
        path=write.path,
        nbytes=write.slot.nbytes,
        write_s=write_s,
    )
