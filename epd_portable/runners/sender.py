"""Encode worker: announces items, writes them into granted slots and hears acks.

A thread does that in turns, and the model runner's takes one when it has put out an item. In such a
turn

- a short copy in host memory is made, and *written* said;
- a copy that a device makes by itself is queued behind the computation. One thread waits for the
  ends of these, which come in the order in which they were queued, and says *written*;
- whatever else may have to be waited for is left to a thread of a pool, which hands its end back.

What was queued is not computed yet: `StreamClock` tells when it is.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from epd_portable.connector import registry
from epd_portable.connector.control import ControlClients, host_identity, new_session
from epd_portable.connector.copies import CHUNK_BYTES, QueuedCopy
from epd_portable.connector.curve import read_keys
from epd_portable.connector.digest import digest_of
from epd_portable.connector.producer import Actions, Finished, ProducerSession, TransferOrder, Write
from epd_portable.connector.stores.writer import Output, StoreWriter
from epd_portable.connector.transport import Transport
from epd_portable.envs import EPD_PAYLOAD_DIGEST
from epd_portable.errors import EPDError, TransportError, UnsupportedError
from epd_portable.log import trace
from epd_portable.runners.cores import on_all_cores
from epd_portable.runners.sender_metrics import SenderMetrics
from epd_portable.runners.stream_clock import Moment, StreamClock
from epd_portable.wire.descriptors import PathEndpoint, PeerDescriptor, TensorSpec

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
_STEPS_AHEAD = 1
"""A step is queued while so many before it are not computed: the device never waits for the next,
and what is encoded next is decided as late as can be."""
_HEARD_S = 1.0
"""Longest time from the end of a copy until the computation before it is heard to have ended."""


@dataclass(frozen=True, slots=True)
class _Output:
    """What the encoder put out.

    Attributes:
        tensor: ``(num_tokens, width)``, contiguous.
        computed: Event behind it.
        computed_at: When that passed.
    """

    tensor: torch.Tensor
    computed: DeviceEvent
    computed_at: Moment


class Sender:
    """Delivers encoder outputs to consumers, beside the model runner's thread.

    Outputs are kept until every transfer of theirs has ended. An error ends the transfer that it
    concerns; should a thread end all the same, `submit` raises.

    Args:
        config: Of this instance.
        fingerprint: What consumers must agree with.
        copies: Of the worker's device.
        metrics: Counts what happens; ``None`` counts where nobody looks.
        store: Gets each output when its transfers have ended; ``None`` for nobody.
    """

    def __init__(
        self,
        config: InstanceConfig,
        fingerprint: str,
        copies: DeviceCopies,
        metrics: SenderMetrics | None = None,
        store: StoreWriter | None = None,
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
        self._store = store
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
        self._queued: SimpleQueue[tuple[Write, QueuedCopy, Moment, float] | None] = SimpleQueue()
        """Copies that the device makes, each with the times at which its output was computed, and
        at which it was asked to."""
        self._writing: dict[str, Write] = {}
        """What is being written, those that are told to be stuck left out."""
        self._orders: dict[str, TransferOrder] = {}
        self._users: Counter[str] = Counter()
        self._outputs: dict[str, _Output] = {}
        self._lock = threading.Lock()
        self._turns = threading.Lock()
        """Whoever has it exchanges messages and moves the session on."""
        self._inbox: deque[Callable[[float], None]] = deque()
        self._ended: set[str] = set()
        self._computed_step = self._told_step = 0
        self._news = threading.Condition(self._lock)
        """A transfer has ended, or a step is computed."""
        self._clock = StreamClock(copies, "epd-computed")
        self._copied_s = 0.0
        """When the copy stream ended the last copy that was heard of."""
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
            order: What and where to.
            output: The item, if the engine has it from before: ``(num_tokens, width)`` on the
                worker's device.
            restored: It comes from its copy in host memory.
            missing: It was to come from there and did not: the transfer fails when the consumer
                waits for it, unless the item is encoded before.

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
                self._keep(order.mm_hash, output, lambda at_s: None)
            ready = order.mm_hash in self._outputs
        self._metrics.submitted("host" if restored else "cache" if ready else "encoder")
        self._post(partial(self._submit, order, ready or missing))

    def output_ready(self, mm_hash: str, output: torch.Tensor) -> None:
        """The encoder has queued the computation of an item, ``(num_tokens, width)``."""
        with self._lock:
            if not self._users[mm_hash]:
                return
            ready = partial(_trace_ready, mm_hash)
            self._keep(mm_hash, output, ready)
        self._inbox.append(lambda now: self._session.output_ready(mm_hash))
        # What can be written at once leaves at once: the thread would have to be woken, and then
        # wait for Python's lock, which this one keeps.
        if not ((self._in_place or self._queues) and self._turn_here(blocking=False)):
            self._control.wake()

    def take_ended(self) -> set[str]:
        """Return the ids of transfers that ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, set()
        return ended

    def step_queued(self, step: int) -> None:
        """All work of a step has been queued; blocks while too many are not computed.

        Args:
            step: Its number; they grow by one, from 1.

        Raises:
            PlatformError: The device has failed.
        """
        self._clock.mark(partial(self._step_computed, step))
        with self._news:
            while self._computed_step < step - _STEPS_AHEAD:
                self._clock.check()
                self._news.wait(_BUSY_POLL_S)

    def take_computed(self) -> int | None:
        """Return the last step that is computed, if there is a new one since the last call.

        Raises:
            PlatformError: The device has failed.
        """
        self._clock.check()
        with self._lock:
            if self._told_step == self._computed_step:
                return None
            self._told_step = self._computed_step
            return self._told_step

    def trace(self, event: str, **fields: Any) -> None:
        """Record an event of the trace when what was queued before is computed."""
        self._clock.trace(event, **fields)

    def rest(self, timeout_s: float) -> None:
        """Block until there is something to take, but no longer than this."""
        with self._news:
            self._news.wait_for(
                lambda: self._ended or self._told_step != self._computed_step, timeout_s
            )

    def close(self, linger_s: float = 0.0) -> None:
        """Stop; writes that are under way end first.

        Args:
            linger_s: Transfers may end within so many seconds before.
        """
        with self._lock:
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
            self._clock.close()
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
            order = self._orders.pop(finished.transfer_id)
            self._users[finished.mm_hash] -= 1
            if not self._users[finished.mm_hash]:
                del self._users[finished.mm_hash]
                output = self._outputs.pop(finished.mm_hash, None)
                if output is not None:
                    self._metrics.kept(-output.tensor.nbytes)
                    self._store_output(order, output)
            self._ended.add(finished.transfer_id)
            self._news.notify_all()
        self._metrics.finished(finished)

    def _store_output(self, order: TransferOrder, output: _Output) -> None:
        """Let an output be written into the store, now that nobody waits for it any more."""
        if self._store is None or not order.item or not _is_of(order.tensor, output.tensor):
            return
        self._store.save_caches(
            Output(
                item=order.item,
                kind=order.kind,
                mm_hash=order.mm_hash,
                modality=order.modality,
                metadata=order.metadata,
                tensor=order.tensor,
                nbytes=output.tensor.nbytes,
                to_host=partial(self._to_host, output),
            )
        )

    def _to_host(self, output: _Output) -> torch.Tensor:
        self._copies.platform.set_device(self._copies.index)
        deadline_s = time.monotonic() + self._wait_timeout_s
        return self._copies.to_host(output.tensor, after=output.computed, deadline_s=deadline_s)

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
            output = self._output_of(write)
            copy = self._transport(write.path).queue(
                output.tensor,
                write.slot,
                computed=output.computed,
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
            self._queued.put((write, copy, output.computed_at, begin_s))
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

    def _keep(self, mm_hash: str, output: torch.Tensor, ready: Callable[[float], None]) -> None:
        """Keep an output for its transfers; tell when it is computed."""
        if mm_hash in self._outputs:
            ready(time.monotonic())
            return
        # Behind the computation, and behind the copy if that is not in one piece.
        whole = output.detach().contiguous()
        computed = self._copies.platform.record_event()
        computed_at = Moment()
        self._outputs[mm_hash] = _Output(whole, computed, computed_at)
        self._metrics.kept(whole.nbytes)

        def reached(at_s: float) -> None:
            computed_at.set(at_s)
            ready(at_s)

        self._clock.mark(reached, computed)

    def _step_computed(self, step: int, at_s: float) -> None:
        with self._news:
            self._computed_step = step
            self._news.notify_all()

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

    def _end_of(
        self, write: Write, copy: QueuedCopy, computed_at: Moment, begin_s: float
    ) -> Callable[[float], None]:
        """Wait until a copy has ended; return the report of it."""
        try:
            copy.finish()
            # It was queued behind the computation, and behind the copies before it.
            write_s, self._copied_s = _times(computed_at, max(begin_s, self._copied_s))
            _trace_written(write, write_s, self._copied_s)
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
        output = self._output_of(write)
        digest = ""
        if self._digests:
            host = self._copies.to_host(
                output.tensor, after=output.computed, deadline_s=write.deadline_s
            )
            digest = digest_of(host)
        _trace_begun(write)
        begin_s = time.monotonic()
        self._transport(write.path).write(
            output.tensor,
            write.slot,
            computed=output.computed,
            address=write.address,
            deadline_s=write.deadline_s,
        )
        write_s, end_s = _times(output.computed_at, begin_s)
        _trace_written(write, write_s, end_s)
        return digest, write_s

    def _output_of(self, write: Write) -> _Output:
        """Return what the encoder put out.

        Raises:
            TransportError: It is not what was announced, or is not there.
        """
        with self._lock:
            order = self._orders[write.transfer_id]
            output = self._outputs.get(write.mm_hash)
        if output is None:
            raise TransportError(f"item {write.mm_hash}: its copy in host memory is not there")
        tensor = output.tensor
        if not _is_of(order.tensor, tensor):
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            raise TransportError(
                f"encoder put out {shape} {dtype}, announced was {order.tensor.shape} "
                f"{order.tensor.dtype}"
            )
        return output

    def _transport(self, path: str) -> Transport:
        with self._lock:
            if path not in self._transports:
                self._transports[path] = registry.load_transport(path, self._copies, self._keys)
            return self._transports[path]


def _is_of(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    return (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}")


def _is_stuck(write: Write, now: float) -> bool:
    return now > write.deadline_s + _STUCK_AFTER_S


def _times(computed_at: Moment, asked_s: float) -> tuple[float, float]:
    """Return how long a write took that has ended just now, and when that was.

    Args:
        computed_at: When what was written was there; another thread hears it, perhaps a little
            later than this one heard of the end.
        asked_s: When the write could have begun otherwise.
    """
    end_s = time.monotonic()
    begin_s = max(asked_s, computed_at.wait(_HEARD_S) or asked_s)
    end_s = max(begin_s, end_s)
    return end_s - begin_s, end_s


def _trace_ready(mm_hash: str, at_s: float) -> None:
    trace("output.ready", at_s=at_s, mm_hash=mm_hash)


def _trace_begun(write: Write) -> None:
    trace("transfer.begun", transfer=write.transfer_id, mm_hash=write.mm_hash, path=write.path)


def _trace_written(write: Write, write_s: float, end_s: float) -> None:
    trace(
        "transfer.written",
        at_s=end_s,
        transfer=write.transfer_id,
        mm_hash=write.mm_hash,
        path=write.path,
        nbytes=write.slot.nbytes,
        write_s=write_s,
    )
