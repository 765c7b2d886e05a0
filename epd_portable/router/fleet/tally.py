"""What the processes of a router count together, in a memory that all of them see."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

MAX_INSTANCES = 10_000

ROWS = MAX_INSTANCES + 64
"""More than instances: the row of one that has left may be in use still."""
_UNSEEN = 0
_NOBODY = (1 << 63) - 1
_IN_FLIGHT, _HELD, _COMPUTING, _OWED_MS, _TOKENS = _COUNTS = range(5)
"""What is counted of each instance by each process, in the order in which it lies in the memory."""
_ROWS_AT_ONCE = 32
"""Are compared first, to find what has changed."""


class Tally:
    """What the processes of a router count: a column for each, and a row for each instance.

    Each process writes its own column only, so nobody needs a lock. Times are those of
    ``time.monotonic``, which is one clock for all processes of a machine.

    Args:
        memory: At least `nbytes` bytes, zero at first; of this process alone unless given.
        columns: Processes.
        column: That of this process.

    Attributes:
        rows: The part of the memory with what is counted of instances, in equal parts.
    """

    def __init__(
        self, memory: memoryview | None = None, *, columns: int = 1, column: int = 0
    ) -> None:
        if memory is None:
            memory = memoryview(bytearray(self.nbytes(columns)))
        self._columns, self._column = columns, column
        row_bytes = 4 * len(_COUNTS) * columns
        parts = (*3 * (8 * columns,), *2 * (8 * ROWS,), row_bytes * ROWS)
        ends = list(itertools.accumulate(parts, initial=0))
        part = [memory[begin:end] for begin, end in itertools.pairwise(ends)]
        self._seen = part[0].cast("q")
        self._body_bytes = part[1].cast("q")
        self._alive = part[2].cast("d")
        self._answered = part[3].cast("d")
        self._heard = part[4].cast("d")
        self.rows = part[5]
        self._counts = part[5].cast("i")

    @staticmethod
    def nbytes(columns: int) -> int:
        """Return how much memory a tally of so many columns takes."""
        return 3 * 8 * columns + 2 * 8 * ROWS + 4 * len(_COUNTS) * columns * ROWS

    def work(self, row: int, change: int) -> None:
        """Count requests or jobs of this process."""
        self._counts[self._at(row, _IN_FLIGHT) + self._column] += change

    def hold(self, row: int, change: int) -> None:
        """Count reasons of this process for which an instance must not leave."""
        self._counts[self._at(row, _HELD) + self._column] += change

    def compute(self, row: int, change: int) -> None:
        """Count requests of this process that an instance computes for: they wait for no item."""
        self._counts[self._at(row, _COMPUTING) + self._column] += change

    def owe(self, row: int, ms: int) -> None:
        """Count milliseconds of encoding that this process has given to an instance."""
        self._counts[self._at(row, _OWED_MS) + self._column] += ms

    def prompt(self, row: int, tokens: int) -> None:
        """Count tokens of prompts that an instance computes for this process."""
        self._counts[self._at(row, _TOKENS) + self._column] += tokens

    def load(self, row: int) -> int:
        """Return what is in flight in all processes."""
        return self._sum(row, _IN_FLIGHT)

    def held(self, row: int) -> int:
        """Return how many reasons all processes have for which an instance must not leave."""
        return self._sum(row, _HELD)

    def computing(self, row: int) -> int:
        """Return for how many requests of all processes an instance computes."""
        return self._sum(row, _COMPUTING)

    def owed_ms(self, row: int) -> int:
        """Return how many milliseconds of encoding all processes wait for."""
        return self._sum(row, _OWED_MS)

    def tokens(self, row: int) -> int:
        """Return of how many tokens the prompts are that an instance computes for all processes."""
        return self._sum(row, _TOKENS)

    def answered(self, row: int, at: float) -> None:
        """Note when an instance has answered last, to any process."""
        self._answered[row] = at

    def answered_at(self, row: int) -> float:
        """Return when an instance has answered last, to any process; 0 for never."""
        return self._answered[row]

    def heard(self, row: int, at: float) -> None:
        """Note when bytes of an answer have come from an instance last, to any process."""
        self._heard[row] = at

    def heard_at(self, row: int) -> float:
        """Return when bytes of an answer have come from an instance last; 0 for never."""
        return self._heard[row]

    def hold_body(self, nbytes: int) -> None:
        """Count bytes of request bodies that this process holds."""
        self._body_bytes[self._column] += nbytes

    def body_bytes(self) -> int:
        """Return how many bytes of request bodies all processes hold."""
        return sum(self._body_bytes)

    def is_alive(self) -> None:
        """Note that this process serves."""
        self._alive[self._column] = time.monotonic()

    def alive_at(self, column: int) -> float:
        """Return when a process has served last."""
        return self._alive[column]

    def saw(self, version: int) -> None:
        """Note up to which change this process knows the instances."""
        self._seen[self._column] = version

    def all_saw(self, version: int) -> bool:
        """Tell whether every other process knows a change."""
        return all(
            seen >= version for column, seen in enumerate(self._seen) if column != self._column
        )

    def open_column(self, column: int) -> None:
        """Begin to wait for a process that has been started, which knows nothing yet."""
        self._seen[column] = _UNSEEN
        self._alive[column] = time.monotonic()

    def clear_column(self, column: int) -> None:
        """Forget what a process had in flight: it has ended."""
        for at in range(column, len(self._counts), self._columns):
            self._counts[at] = 0
        self._body_bytes[column] = 0
        self._seen[column] = _NOBODY

    def _at(self, row: int, count: int) -> int:
        return (row * len(_COUNTS) + count) * self._columns

    def _sum(self, row: int, count: int) -> int:
        begin = self._at(row, count)
        if self._columns == 1:
            return self._counts[begin]
        return sum(self._counts[begin : begin + self._columns])


class RowChanges:
    """Which rows of a tally were written since they were looked at, whichever process did it.

    Args:
        tally: In which is counted.
        rows: That are looked at; others beside them, too.
    """

    def __init__(self, tally: Tally, rows: Iterable[int]) -> None:
        self._memory = tally.rows
        self._size = len(tally.rows) // ROWS
        self._seen = dict.fromkeys((row // _ROWS_AT_ONCE for row in rows), b"")

    def take(self) -> Iterator[int]:
        """Yield each row that was written since; all of them at first."""
        memory, size = self._memory, self._size
        for part, before in self._seen.items():
            begin = part * _ROWS_AT_ONCE * size
            after = bytes(memory[begin : begin + _ROWS_AT_ONCE * size])
            if after != before:
                self._seen[part] = after
                for at in range(0, len(after), size):
                    if after[at : at + size] != before[at : at + size]:
                        yield (begin + at) // size
