"""Who uses the engine now, who waits, and who is turned away.

The engine runs a bounded number of requests and overtakes only among those that wait inside it, so a class that has
filled it would shut out the others. Requests therefore wait here, a queue for each class, and enter the engine when a
slot is theirs. A plain state machine on a clock that it is given; `slot` is its face in asyncio.
"""

import asyncio
import enum
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import get_args

from app.engine.request import PriorityClass
from app.errors import DeadlineExceeded, Evicted, QueueFull, QueueTimeout
from app.settings import AdmissionSettings

CLASSES: tuple[PriorityClass, ...] = get_args(PriorityClass)
"""Highest first."""

_SMOOTHING = 0.1  # weight of the newest service time in the mean
_LINGER_SECONDS = 2.0  # for which more realtime traffic is expected after the last
_UNKNOWN_RETRY_SECONDS = 5  # before anything was served
_LONGEST_RETRY_SECONDS = 300


class TicketState(enum.Enum):
    """Life of a ticket; `left` is its end, whatever it was before."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    EVICTED = enum.auto()
    LEFT = enum.auto()


class Ticket:
    """The place of one request.

    Attributes:
        priority: Its class.
        entered: Clock when it came.
        granted: Clock when it got its slot; equal to `entered` until then.
        state: Where it is.
        on_change: Called when a waiting ticket gets a slot or is evicted.
    """

    __slots__ = ("entered", "granted", "on_change", "priority", "state")

    def __init__(self, priority: PriorityClass, entered: float) -> None:
        self.priority = priority
        self.entered = self.granted = entered
        self.state = TicketState.WAITING
        self.on_change: Callable[[], None] = lambda: None

    @property
    def waited(self) -> float:
        """Seconds from coming to the slot."""
        return self.granted - self.entered


class AdmissionController:
    """Gives out the engine's slots.

    - Higher classes go first, and first come is first served within a class.
    - Some slots are for realtime alone, so that it finds one free under a flood of anything else.
    - While there is realtime traffic, batch gets few slots: all that run share the engine's steps, and a step with a
      full house takes several times as long.
    - One slot in `starvation_interval` goes to the lower class that has waited longest, so that every class moves.
    - Queues are bounded. When all of them together are full, the newest waiter of the lowest class has to go.

    Args:
        settings: Bounds and times.
        clock: Monotonic seconds.
    """

    def __init__(self, settings: AdmissionSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._most_waiting = {each: getattr(settings, f"max_waiting_{each}") for each in CLASSES}
        self._queue_timeout = {each: getattr(settings, f"queue_timeout_{each}") for each in CLASSES}
        self._waiting: dict[PriorityClass, OrderedDict[Ticket, None]] = {each: OrderedDict() for each in CLASSES}
        self._running = dict.fromkeys(CLASSES, 0)
        self._capacity = 0
        self._reserved = 0
        self._batch_beside = 0
        self._passed_over = 0
        self._last_realtime = -math.inf
        self._mean_service: float | None = None

    def open(self, capacity: int) -> None:
        """Say how many requests the engine runs at once; until then all wait."""
        self._capacity = min(capacity, self._settings.max_running or capacity)
        asked = self._settings.reserved_realtime
        reserved = self._capacity // 8 if asked is None else asked
        self._reserved = min(reserved, self._capacity - 1)  # the others have to move
        self._batch_beside = self._settings.batch_beside_realtime or max(1, self._capacity // 16)
        self._dispatch()

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self._capacity

    @property
    def reserved(self) -> int:
        """Slots that only realtime gets."""
        return self._reserved

    def running(self, priority: PriorityClass) -> int:
        """Requests of a class that hold a slot."""
        return self._running[priority]

    def waiting(self, priority: PriorityClass) -> int:
        """Requests of a class that wait for one."""
        return len(self._waiting[priority])

    def enter(self, priority: PriorityClass, deadline: float | None = None) -> Ticket:
        """Take a place; the ticket runs at once or waits. Every ticket has to `leave`.

        Args:
            priority: The class.
            deadline: Clock at which an answer is of no use any more.

        Raises:
            QueueFull: No room to wait.
            DeadlineExceeded: By the rate observed so far the wait would be longer than the deadline allows.
        """
        now = self._clock()
        wait = self.estimated_wait(priority)
        ticket = Ticket(priority, now)
        self._note_realtime(ticket)
        self._waiting[priority][ticket] = None
        self._dispatch()
        if ticket.state is not TicketState.WAITING:
            return ticket
        if deadline is not None and now + (wait or 0.0) > deadline:
            self.leave(ticket)
            raise DeadlineExceeded(
                f"about {wait or 0.0:.1f} s of waiting would pass deadline_ms; allow more, or try again later",
                field="deadline_ms",
                retry_after=self.retry_after(priority),
            )
        self._make_room(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give the place back, running or waiting. Calling it again does nothing."""
        if ticket.state is TicketState.RUNNING:
            self._running[ticket.priority] -= 1
            self._observe(self._clock() - ticket.granted)
        elif ticket.state is TicketState.WAITING:
            del self._waiting[ticket.priority][ticket]
        ticket.state = TicketState.LEFT
        self._note_realtime(ticket)
        self._dispatch()

    @asynccontextmanager
    async def slot(self, priority: PriorityClass, deadline: float | None = None) -> AsyncIterator[Ticket]:
        """Hold a slot of the engine; waits for one.

        Raises:
            QueueFull, DeadlineExceeded: See `enter`.
            Evicted: A request of a higher class needed the room to wait.
            QueueTimeout: No slot within the class's queue timeout.
        """
        ticket = self.enter(priority, deadline)
        try:
            if ticket.state is TicketState.WAITING:
                changed = asyncio.Event()
                ticket.on_change = changed.set
                timeout = self._queue_timeout[priority]
                try:
                    async with asyncio.timeout(timeout):
                        await changed.wait()
                except TimeoutError:
                    raise QueueTimeout(
                        f"the request waited {timeout:g} s without getting its turn",
                        limit=timeout,
                        retry_after=self.retry_after(priority),
                    ) from None
            if ticket.state is TicketState.EVICTED:
                raise Evicted(
                    "the queue is full, and requests of a higher class go first", retry_after=self.retry_after(priority)
                )
            yield ticket
        finally:
            self.leave(ticket)

    def refuse_early(self, priority: PriorityClass) -> None:
        """Before a request body is read: is there any use in reading it?

        Raises:
            QueueFull: There is no room to wait in.
        """
        waiting, lower = len(self._waiting[priority]), CLASSES[CLASSES.index(priority) + 1 :]
        is_full = sum(map(len, self._waiting.values())) >= self._settings.max_waiting
        nobody_to_evict = not any(self._waiting[each] for each in lower)
        if waiting and (waiting >= self._most_waiting[priority] or (is_full and nobody_to_evict)):
            raise self._queue_full(priority)

    def estimated_wait(self, priority: PriorityClass) -> float | None:
        """Seconds until a request that comes now gets a slot; None before anything was served.

        Requests leave at the rate of slots divided by the mean time a slot is held, which is observed.
        """
        if self._has_slot(priority) and not self._waiting[priority]:
            return 0.0
        if self._mean_service is None:
            return None
        ahead = sum(len(self._waiting[each]) for each in CLASSES[: CLASSES.index(priority) + 1])
        return (ahead + 1) * self._mean_service / max(1, self._slots(priority))

    def retry_after(self, priority: PriorityClass) -> int:
        """Whole seconds after which a request of this class is likely to get through."""
        wait = self.estimated_wait(priority)
        if wait is None:
            return _UNKNOWN_RETRY_SECONDS
        return min(_LONGEST_RETRY_SECONDS, max(1, math.ceil(wait)))

    @property
    def realtime_traffic(self) -> bool:
        """Whether a realtime request is here, or was a moment ago: the next one is then likely."""
        here = self._running["realtime"] or self._waiting["realtime"]
        return bool(here) or self._clock() - self._last_realtime < _LINGER_SECONDS

    def _note_realtime(self, ticket: Ticket) -> None:
        if ticket.priority == "realtime":
            self._last_realtime = self._clock()

    def _slots(self, priority: PriorityClass) -> int:
        """The most that a class and those below it may hold now."""
        if priority == "realtime":
            return self._capacity
        others = self._capacity - self._reserved
        return min(others, self._batch_beside) if priority == "batch" and self.realtime_traffic else others

    def _has_slot(self, priority: PriorityClass) -> bool:
        """Whether a class may take one slot more: there is one, and those for the classes above stay free."""
        for index, each in enumerate(CLASSES[: CLASSES.index(priority) + 1]):
            if sum(self._running[below] for below in CLASSES[index:]) >= self._slots(each):
                return False
        return True

    def _dispatch(self) -> None:
        while (ticket := self._next()) is not None:
            del self._waiting[ticket.priority][ticket]
            self._running[ticket.priority] += 1
            ticket.state, ticket.granted = TicketState.RUNNING, self._clock()
            ticket.on_change()

    def _next(self) -> Ticket | None:
        """The waiter whose turn it is; None when nobody can go."""
        heads = [next(iter(queue)) for each, queue in self._waiting.items() if queue and self._has_slot(each)]
        if len(heads) < 2:
            return heads[0] if heads else None
        self._passed_over += 1
        if self._passed_over < self._settings.starvation_interval:
            return heads[0]
        self._passed_over = 0
        return min(heads[1:], key=lambda ticket: ticket.entered)

    def _make_room(self, newcomer: Ticket) -> None:
        own = newcomer.priority
        too_many = sum(map(len, self._waiting.values())) > self._settings.max_waiting
        lowest = next(each for each in reversed(CLASSES) if self._waiting[each])
        if len(self._waiting[own]) > self._most_waiting[own] or (too_many and lowest == own):
            self.leave(newcomer)
            raise self._queue_full(own)
        if too_many:
            victim, _ = self._waiting[lowest].popitem(last=True)
            victim.state = TicketState.EVICTED
            victim.on_change()

    def _queue_full(self, priority: PriorityClass) -> QueueFull:
        return QueueFull(
            f"{self.waiting(priority)} requests of class {priority} wait for the engine, and no more may",
            retry_after=self.retry_after(priority),
        )

    def _observe(self, seconds: float) -> None:
        mean = self._mean_service
        self._mean_service = seconds if mean is None else mean + _SMOOTHING * (seconds - mean)
