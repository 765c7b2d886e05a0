"""Encode worker: announces items, writes them into granted slots and takes in acknowledgements.

A thread does that in turns, and the model runner's takes one when it has put out an item. In a turn
messages are exchanged, `ProducerSession` is moved on, and writes are begun; `Writers` carries them
out, and hands each result back to a turn.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from epd_portable.encode.outputs import OUTDATED, KeptOutputs, WriteResult, Writers
from epd_portable.encode.producer import Actions, Finished, ProducerSession, TransferOrder
from epd_portable.encode.store_writer import StoreWriter
from epd_portable.errors import EPDError, TransportError, UnsupportedError
from epd_portable.items.metrics import SenderMetrics
from epd_portable.transfer import registry
from epd_portable.transfer.control import ControlClients
from epd_portable.transfer.cores import on_all_cores
from epd_portable.transfer.curve import read_keys
from epd_portable.transfer.sessions import host_identity, new_session
from epd_portable.transfer.stream_clock import StepProgress, StreamClock
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor

if TYPE_CHECKING:
    import torch

    from epd_portable.config.instance import InstanceConfig
    from epd_portable.transfer.copies import DeviceCopies

logger = logging.getLogger(__name__)

_BUSY_POLL_S = 0.05
_IDLE_POLL_S = 1.0
_BACK_OFF_S = 0.01


class Sender:
    """Delivers encoder outputs to consumers while the model runner's thread goes on.

    An error ends the transfer that it concerns; should a thread end all the same, `submit` raises.

    Args:
        fingerprint: Compatibility fingerprint, which consumers compare with theirs.
        metrics: ``None`` counts without publishing.
        store: Gets each output when its transfers have ended; ``None`` without a store.

    Attributes:
        clock: Of the stream that computes.
        progress: What has ended, for the engine.
    """

    def __init__(
        self,
        config: InstanceConfig,
        fingerprint: str,
        copies: DeviceCopies,
        metrics: SenderMetrics | None = None,
        store: StoreWriter | None = None,
    ) -> None:
        session, keys = new_session(), read_keys(config.secret_file)
        peer = PeerDescriptor(
            instance=config.instance,
            session=session,
            host=host_identity(),
            device=f"{copies.platform.name}:{copies.index}",
            fingerprint=fingerprint,
            paths=tuple(PathEndpoint(path=path.name) for path in registry.offered_by(config)),
        )
        self._copies = copies
        self._metrics = metrics or SenderMetrics()
        self._store = store
        self._wait_timeout_s = config.wait_timeout_s
        self.clock = StreamClock(copies, "epd-computed")
        self.progress = StepProgress(self.clock)
        self._outputs = KeptOutputs(copies, self.clock, self._metrics, store, config.wait_timeout_s)
        self._writers = Writers(
            config,
            copies,
            keys,
            self._outputs,
            on_result=self._written,
            on_death=self._note_death,
        )
        self._session = ProducerSession(peer, wait_timeout_s=config.wait_timeout_s)
        self._turns = threading.Lock()
        """Held by the thread that exchanges messages and moves the session on."""
        self._inbox: deque[Callable[[float], None]] = deque()
        """Work for the next turn; each is called with the time."""
        self._stop_s: float | None = None
        self._is_over = False
        self._death: tuple[str, BaseException] | None = None
        self._logged: set[tuple[type[Exception], int | None]] = set()
        self._thread = threading.Thread(target=self._run, name="epd-sender", daemon=True)
        with on_all_cores():
            self._control = ControlClients(session, keys)
            self._thread.start()
            self._writers.open()

    # -- the model runner's thread ---------------------------------------------------------------

    def submit(
        self,
        order: TransferOrder,
        output: torch.Tensor | None,
        *,
        restored: bool = False,
        missing: bool = False,
    ) -> None:
        """Begin a transfer; one of that id that has not ended stays as it is.

        Args:
            output: The item, if the engine has it from before: ``(num_tokens, width)`` on the
                worker's device.
            restored: It comes from its copy in host memory.
            missing: The scheduler counts on it, and it is not there: the transfer fails when the
                consumer waits for it, unless the item is encoded before.

        Raises:
            TransportError: The sender's thread has ended: nothing leaves this instance any more.
        """
        if self._death is not None:
            thread, error = self._death
            raise TransportError(
                f"transfer {order.transfer_id}: the thread {thread} ended with {error!r}, and no "
                "item leaves this encode instance; restart it"
            ) from error
        if order.transfer_id in self._outputs.orders:
            logger.warning("transfer %s is under way already", order.transfer_id)
            return
        ready = self._outputs.add_order(order, output)
        source = "host" if restored else "cache" if ready else "encoder"
        self._metrics.transfers.labels(source).inc()
        self._metrics.in_flight.inc()
        self._post(lambda now: self._session.submit(order, ready=ready or missing, now=now))

    def output_ready(self, mm_hash: str, output: torch.Tensor) -> None:
        """Send an item whose computation is queued, ``(num_tokens, width)``."""
        if not self._outputs.add(mm_hash, output):
            return
        self._inbox.append(lambda now: self._session.output_ready(mm_hash))
        # What can be written at once leaves at once: the thread would have to be woken, and then
        # wait for Python's lock, which this one keeps.
        if not (self._writers.are_immediate and self._take_turn(blocking=False)):
            self._control.wake()

    def not_encoded(self, mm_hash: str) -> None:
        """Fail the transfers of an item that will have no output, when their consumers wait."""
        self._post(lambda now: self._session.output_ready(mm_hash))

    def reset(self) -> None:
        """Forget all outputs: other weights made them. Transfers that have not ended fail.

        When this returns no write of such an output begins any more, and what is granted from then
        on is written for none. The engine has forgotten these transfers, and hears of none; they
        may be ordered again.
        """
        transfer_ids = list(self._outputs.orders)
        self._outputs.reset()
        self.progress.take_ended()

        def fail(now: float) -> None:
            for transfer_id in transfer_ids:
                self._session.fail(transfer_id, OUTDATED)

        self._post(fail)

    def close(self, linger_s: float = 0.0) -> None:
        """Stop; writes that are under way end first.

        Args:
            linger_s: Transfers may end within so many seconds before.
        """
        self._stop_s = time.monotonic() + linger_s
        self._control.wake()
        self._thread.join()
        if self._store is not None:
            self._store.close(linger_s)

    # -- the sender's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            failing_since_s: float | None = None
            self._copies.platform.set_device(self._copies.index)
            while not self._may_stop():
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
                    self._log_once(error)
                    time.sleep(_BACK_OFF_S)
        except BaseException as error:
            self._note_death(error)
            raise
        finally:
            with self._turns:
                self._is_over = True
            self._writers.close()
            self.clock.close()
            with self._turns:
                self._control.close()

    def _may_stop(self) -> bool:
        if self._stop_s is None:
            return False
        idle = not self._inbox and not len(self._session)
        return idle or time.monotonic() >= self._stop_s

    def _note_death(self, error: BaseException) -> None:
        thread = threading.current_thread().name
        self._death = (thread, error)
        logger.critical("the thread %s ends: no item leaves this instance any more", thread)

    # -- the writers' threads --------------------------------------------------------------------

    def _written(self, result: WriteResult) -> None:
        self._inbox.append(partial(self._finish_write, result))
        self._take_turn(blocking=True)

    # -- turns, in any of these threads ----------------------------------------------------------

    def _post(self, work: Callable[[float], None]) -> None:
        self._inbox.append(work)
        self._control.wake()

    def _take_turn(self, *, blocking: bool) -> bool:
        """Take a turn in a thread that is not the sender's; ``False`` if another one has it."""
        if not self._turns.acquire(blocking=blocking):
            return False
        try:
            self._turn()
        except Exception as error:  # The sender's thread meets it again, and knows when to give up.
            self._log_once(error)
        finally:
            self._turns.release()
        return True

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
        while writes and not self._is_over:  # After the end no thread waits for a write.
            write = writes.popleft()
            with self._surviving(write.transfer_id):
                result = self._writers.start(write)
                if result is not None:
                    self._finish_write(result, time.monotonic())
            self._act(self._session.take_actions())

    def _act(self, actions: Actions) -> None:
        """Send messages, and forget what has ended; writes are begun by the caller."""
        for address, message in actions.messages:
            with self._surviving(message.transfer_id):
                try:
                    self._control.send(address, message)
                except TransportError as error:  # It is sent again; the address may yet be there.
                    logger.error("transfer %s: %s", message.transfer_id, error)
        for finished in actions.finished:
            with self._surviving():
                self._forget(finished)

    def _forget(self, finished: Finished) -> None:
        if finished.problem:
            logger.warning("transfer %s ended: %s", finished.transfer_id, finished.problem)
        if self._outputs.end_order(finished.transfer_id):
            self.progress.transfer_ended(finished.transfer_id)
        self._metrics.ended.labels("failed" if finished.problem else "settled").inc()
        self._metrics.in_flight.dec()

    def _finish_write(self, result: WriteResult, now: float) -> None:
        write, error = result.write, result.error
        if error is None:
            with self._surviving(write.transfer_id):
                self._session.write_done(write.transfer_id, now)
                self._act(self._session.take_actions())  # The consumer waits; what is counted can.
                self._metrics.sent_bytes.labels(write.path).inc(write.slot.nbytes)
                self._metrics.write_s.labels(write.path).observe(result.write_s)
            return
        self._metrics.write_failures.labels(write.path).inc()
        if not isinstance(error, EPDError):
            logger.error("transfer %s: write failed", write.transfer_id, exc_info=error)
        if isinstance(error, UnsupportedError):
            logger.warning("path %s is not offered any more: %s", write.path, error)
            self._session.withdraw(write.path)
        self._session.write_failed(write.transfer_id, str(error) or repr(error), now)

    @contextmanager
    def _surviving(self, transfer_id: str = "") -> Iterator[None]:
        """End this transfer alone if something goes wrong that no part of the package foresaw."""
        try:
            yield
        except Exception as error:
            self._log_once(error)
            self._session.fail(transfer_id, str(error) or repr(error))

    def _log_once(self, error: Exception) -> None:
        """Log an error that is survived; each kind once."""
        number = getattr(error, "errno", None)
        if (type(error), number) in self._logged:
            return
        self._logged.add((type(error), number))
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
