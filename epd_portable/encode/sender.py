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
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from epd_portable.encode.producer import Actions, Finished, ProducerSession, TransferOrder
from epd_portable.encode.store_writer import StoreWriter
from epd_portable.encode.writers import EncoderOutput, WriteResult, Writers
from epd_portable.errors import EPDError, TransportError, UnsupportedError
from epd_portable.items.metrics import SenderMetrics
from epd_portable.log import trace
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
_OUTDATED = "the encoder cache was reset, and its output may be that of other weights"
"""Reason for which a transfer from before a reset fails."""


class Sender:
    """Delivers encoder outputs to consumers while the model runner's thread continues.

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
            self._writers = Writers(
                config, copies, keys, on_result=self._written, on_death=self._note_death
            )
            self._thread.start()

    # -- the model runner's thread ---------------------------------------------------------------

    def submit(
        self,
        order: TransferOrder,
        output: torch.Tensor | None,
        *,
        restored: bool = False,
        missing: bool = False,
    ) -> None:
        """Begin a transfer.

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
        source = "host" if restored else "encoder" if output is None else "cache"
        self._metrics.transfers.labels(source).inc()
        self._metrics.in_flight.inc()
        kept = None if output is None else self._keep(output)
        ready = missing or output is not None
        self._post(lambda now: self._session.submit(order, now=now, output=kept, ready=ready))

    def output_ready(self, mm_hash: str, output: torch.Tensor) -> None:
        """Send an item whose computation is queued, ``(num_tokens, width)``."""
        kept = self._keep(output, traced_as=mm_hash)
        self._inbox.append(lambda now: self._session.output_ready(mm_hash, kept))
        # What can be written at once leaves at once: the thread would have to be woken, and then
        # wait for Python's lock, which this one keeps.
        if not (self._writers.are_immediate and self._take_turn(blocking=False)):
            self._control.wake()

    def not_encoded(self, mm_hash: str) -> None:
        """Fail the transfers of an item that will have no output, when their consumers wait."""
        self._post(lambda now: self._session.output_ready(mm_hash))

    def preempt(self, transfer_ids: Collection[str]) -> None:
        """End these transfers unless their consumers have space for them."""
        self._post(lambda now: self._session.preempt(transfer_ids))

    def reset(self) -> None:
        """Forget all outputs: other weights made them. Transfers that have not ended fail.

        The engine has forgotten these transfers. None is reported, and they may be ordered again.
        """
        self._inbox.append(lambda now: self._session.reset(_OUTDATED))
        self._take_turn(blocking=True)
        self.progress.take_ended()
        if self._store is not None:
            self._store.reset()

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
        except Exception as error:  # It recurs in the sender's thread, which decides when to end.
            self._log_once(error)
        finally:
            self._turns.release()
        return True

    def _turn(self) -> None:
        now = time.monotonic()
        while self._inbox:
            with self._surviving():
                self._inbox.popleft()(now)
        for address, message in self._control.receive():
            with self._surviving(message.attempt):
                self._session.receive(address, message, now)
        actions = self._session.poll(now)
        writes = deque(actions.writes)
        self._act(actions)
        while writes and not self._is_over:  # After the end no thread waits for a write.
            write = writes.popleft()
            with self._surviving(write.attempt):
                result = self._writers.start(write)
                if result is not None:
                    self._finish_write(result, time.monotonic())
            self._act(self._session.take_actions())

    def _act(self, actions: Actions) -> None:
        """Send messages, and report what has ended; writes are begun by the caller."""
        for address, message in actions.messages:
            with self._surviving(message.attempt):
                try:
                    self._control.send(address, message)
                except TransportError as error:  # It is sent again; the address may yet be there.
                    logger.error("transfer %s: %s", message.transfer_id, error)
        for finished in actions.finished:
            with self._surviving():
                self._report(finished)

    def _report(self, finished: Finished) -> None:
        order, output = finished.order, finished.output
        if finished.problem:
            logger.warning("transfer %s ended: %s", order.transfer_id, finished.problem)
        if not finished.is_outdated:
            self.progress.transfer_ended(order.transfer_id)
        self._metrics.ended.labels("failed" if finished.problem else "settled").inc()
        self._metrics.in_flight.dec()
        if self._store is not None and order.item_uuid and output and output.fits(order.tensor):
            self._store.save_caches(order, partial(self._to_host, output))

    def _keep(self, tensor: torch.Tensor, *, traced_as: str = "") -> EncoderOutput:
        # The event is behind the computation, and behind the copy if that is not in one piece.
        whole = tensor.detach().contiguous()
        output = EncoderOutput(whole, self._copies.platform.record_event(), Future())

        def reached(at_s: float) -> None:
            output.computed_at.set_result(at_s)
            if traced_as:
                trace("output.ready", at_s=at_s, mm_hash=traced_as)

        self.clock.mark(reached, output.computed)
        return output

    def _to_host(self, output: EncoderOutput) -> torch.Tensor:
        self._copies.platform.set_device(self._copies.index)
        deadline_s = time.monotonic() + self._wait_timeout_s
        return self._copies.to_host(output.tensor, after=output.computed, deadline_s=deadline_s)

    def _finish_write(self, result: WriteResult, now: float) -> None:
        write, error = result.write, result.error
        path, transfer_id = write.path, write.order.transfer_id
        with self._surviving(write.attempt):
            if isinstance(error, UnsupportedError):
                logger.warning("path %s is not offered any more: %s", path, error)
                self._session.withdraw(path)
            problem = "" if error is None else str(error) or repr(error)
            self._session.write_ended(write.attempt, problem, now)
            self._act(self._session.take_actions())  # The consumer waits; what is counted can.
            if error is None:
                self._metrics.sent_bytes.labels(path).inc(write.slot.nbytes)
                self._metrics.write_s.labels(path).observe(result.write_s)
                return
            self._metrics.write_failures.labels(path).inc()
            if not isinstance(error, EPDError):
                logger.error("transfer %s: write failed", transfer_id, exc_info=error)

    @contextmanager
    def _surviving(self, attempt: int = -1) -> Iterator[None]:
        """End this attempt alone if something goes wrong that no part of the package foresaw."""
        try:
            yield
        except Exception as error:
            self._log_once(error)
            self._session.fail(attempt, str(error) or repr(error))

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
            "the sender continues after %r, without the transfer concerned; %s",
            error,
            remedy,
            exc_info=error,
        )
