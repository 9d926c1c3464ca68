"""Admission on a simulated clock, by properties; and its asyncio face on the real one."""

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.engine.admission import CLASSES, AdmissionController, Ticket, TicketState
from app.errors import DeadlineExceeded, Evicted, QueueFull, QueueTimeout
from app.settings import AdmissionSettings


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def controller(capacity: int, clock: Clock | None = None, **bounds: Any) -> AdmissionController:
    admission = AdmissionController(AdmissionSettings(**bounds), clock or Clock())
    admission.open(capacity)
    return admission


class Admission(RuleBasedStateMachine):
    """Any order of coming, leaving (served, cancelled or timed out) and passing time."""

    @initialize(
        capacity=st.integers(1, 6),
        reserved=st.integers(0, 3),
        max_waiting=st.integers(0, 8),
        each=st.integers(0, 5),
        interval=st.integers(2, 4),
    )
    def build(self, capacity: int, reserved: int, max_waiting: int, each: int, interval: int) -> None:
        self.clock = Clock()
        self.interval = interval
        self.bounds = AdmissionSettings(
            reserved_realtime=reserved,
            max_waiting=max_waiting,
            max_waiting_realtime=each,
            max_waiting_normal=each,
            max_waiting_batch=each,
            starvation_interval=interval,
        )
        self.admission = AdmissionController(self.bounds, self.clock)
        self.admission.open(capacity)
        self.tickets: list[Ticket] = []

    def held(self, state: TicketState, *classes: str) -> list[Ticket]:
        return [each for each in self.tickets if each.state is state and (not classes or each.priority in classes)]

    @rule(priority=st.sampled_from(CLASSES), patience=st.none() | st.floats(0, 20))
    def come(self, priority: Any, patience: float | None) -> None:
        before = self.held(TicketState.WAITING)
        try:
            ticket = self.admission.enter(priority, None if patience is None else self.clock.now + patience)
        except QueueFull:
            own = self.admission.waiting(priority)
            lower = [each for each in before if CLASSES.index(each.priority) > CLASSES.index(priority)]
            own_is_full = own == self.bounds.max_waiting_batch
            assert own_is_full or (len(before) == self.bounds.max_waiting and not lower)
            assert 1 <= self.admission.retry_after(priority) <= 300
        except DeadlineExceeded:
            assert patience is not None
        else:
            self.tickets.append(ticket)
            self.clock.now += 1e-6  # no two come at once
        evicted = [each for each in before if each.state is TicketState.EVICTED]
        assert len(evicted) <= 1
        for victim in evicted:  # the newest of the lowest class, and lower than the one who came
            assert CLASSES.index(victim.priority) > CLASSES.index(priority)
            assert all(CLASSES.index(each.priority) <= CLASSES.index(victim.priority) for each in before)
            assert victim is [each for each in before if each.priority == victim.priority][-1]

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        running = sum(map(self.admission.running, CLASSES))
        held = ticket.state is TicketState.RUNNING
        waiting = len(self.held(TicketState.WAITING)) - (ticket.state is TicketState.WAITING)
        self.admission.leave(ticket)
        self.admission.leave(ticket)  # releases once, however often it is called
        assert sum(map(self.admission.running, CLASSES)) >= running - held
        if waiting == 0:
            assert sum(map(self.admission.running, CLASSES)) == running - held
        if ticket.state is TicketState.LEFT:
            self.tickets.remove(ticket)

    @rule(seconds=st.floats(0, 10))
    def tick(self, seconds: float) -> None:
        self.clock.now += seconds  # nothing happens until someone comes or goes

    @invariant()
    def counts_are_the_tickets(self) -> None:
        for each in CLASSES:
            assert self.admission.running(each) == len(self.held(TicketState.RUNNING, each))
            assert self.admission.waiting(each) == len(self.held(TicketState.WAITING, each))

    @invariant()
    def never_above_the_limits(self) -> None:
        others = self.admission.running("normal") + self.admission.running("batch")
        assert others + self.admission.running("realtime") <= self.admission.capacity
        assert others <= self.admission.capacity - self.admission.reserved
        assert sum(map(self.admission.waiting, CLASSES)) <= self.bounds.max_waiting
        assert all(self.admission.waiting(each) <= self.bounds.max_waiting_batch for each in CLASSES)

    @invariant()
    def nobody_waits_for_a_slot_that_is_free(self) -> None:
        running = sum(map(self.admission.running, CLASSES))
        if running < self.admission.capacity:
            assert self.admission.waiting("realtime") == 0
        others = running - self.admission.running("realtime")
        if running < self.admission.capacity and others < self.admission.capacity - self.admission.reserved:
            assert self.admission.waiting("normal") == 0
            assert self.admission.waiting("batch") == 0 or self.admission.running("batch") > 0  # beside realtime

    @invariant()
    def first_come_is_first_served_within_a_class(self) -> None:
        for each in CLASSES:
            waiting, running = self.held(TicketState.WAITING, each), self.held(TicketState.RUNNING, each)
            if waiting and running:
                assert max(ticket.entered for ticket in running) < min(ticket.entered for ticket in waiting)


Admission.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestAdmission = Admission.TestCase


@pytest.mark.parametrize("starved", ["normal", "batch"])
def test_under_an_endless_realtime_flood_every_class_moves(starved: Any) -> None:
    admission = controller(2, starvation_interval=4)
    running = [admission.enter("realtime"), admission.enter("realtime")]
    waiter = admission.enter(starved)
    flood = [admission.enter("realtime") for _ in range(20)]
    for slots_given in range(1, 21):
        admission.leave(running.pop(0))
        if waiter.state is TicketState.RUNNING:
            assert slots_given <= 4
            return
        running.append(
            next(ticket for ticket in flood if ticket.state is TicketState.RUNNING and ticket not in running)
        )
    pytest.fail("never")


def test_batch_moves_between_a_flood_of_normal_and_one_of_realtime() -> None:
    clock = Clock()
    admission = controller(4, clock, reserved_realtime=2, starvation_interval=4)
    batch = admission.enter("batch"), admission.enter("batch"), admission.enter("batch")
    clock.now = 1.0
    tickets = [admission.enter(each) for _ in range(100) for each in ("realtime", "normal")]
    for _ in range(60):
        leaving = next(each for each in (*batch[:2], *tickets) if each.state is TicketState.RUNNING)
        admission.leave(leaving)
    assert batch[2].state is TicketState.RUNNING


def test_a_flood_leaves_the_reserved_slots_to_realtime() -> None:
    admission = controller(16)
    for _ in range(100):
        admission.enter("batch")
    assert admission.running("batch") == 14
    assert admission.enter("realtime").state is TicketState.RUNNING


def test_the_wait_is_estimated_from_what_was_served() -> None:
    clock = Clock()
    admission = controller(2, clock, reserved_realtime=0)
    assert admission.estimated_wait("normal") == 0
    first, second = admission.enter("normal"), admission.enter("normal")
    assert admission.estimated_wait("normal") is None
    clock.now = 10.0
    admission.leave(first)
    third = admission.enter("normal")
    assert third.state is TicketState.RUNNING
    assert admission.estimated_wait("normal") == pytest.approx(5.0)  # two slots, ten seconds each
    admission.enter("batch")
    assert admission.estimated_wait("realtime") == pytest.approx(5.0)
    assert admission.estimated_wait("batch") == pytest.approx(10.0)
    with pytest.raises(DeadlineExceeded, match=r"about 10\.0 s") as refused:
        admission.enter("batch", deadline=clock.now + 9)
    assert refused.value.retry_after == 10
    assert admission.waiting("batch") == 1
    assert admission.enter("batch", deadline=clock.now + 11).state is TicketState.WAITING
    admission.leave(second)


def test_the_newest_of_the_lowest_class_is_evicted() -> None:
    admission = controller(1, max_waiting=3)
    admission.enter("normal")
    oldest, newest, normal = admission.enter("batch"), admission.enter("batch"), admission.enter("normal")
    admission.enter("realtime")
    assert (oldest.state, newest.state) == (TicketState.WAITING, TicketState.EVICTED)
    admission.enter("normal")
    assert (oldest.state, normal.state) == (TicketState.EVICTED, TicketState.WAITING)
    with pytest.raises(QueueFull):
        admission.enter("batch")
    with pytest.raises(QueueFull):
        admission.enter("normal")


async def test_a_slot_is_waited_for_and_given_back() -> None:
    admission = AdmissionController(AdmissionSettings())
    admission.open(1)
    order = []

    async def ask(name: str) -> None:
        async with admission.slot("normal") as ticket:
            order.append(name)
            assert ticket.waited >= 0
            await asyncio.sleep(0.01)

    await asyncio.gather(*(ask(name) for name in "abc"))
    assert order == ["a", "b", "c"]
    assert admission.running("normal") == admission.waiting("normal") == 0


async def test_a_wait_ends_with_the_timeout_of_its_class() -> None:
    admission = AdmissionController(AdmissionSettings(queue_timeout_batch=0.05))
    admission.open(1)
    async with admission.slot("batch"):
        with pytest.raises(QueueTimeout):
            async with admission.slot("batch"):
                pass
        assert admission.waiting("batch") == 0


async def test_an_evicted_request_learns_of_it() -> None:
    admission = AdmissionController(AdmissionSettings(max_waiting=1))
    admission.open(1)
    async with admission.slot("normal"):

        async def ask() -> None:
            async with admission.slot("batch"):
                pass

        waiting = asyncio.create_task(ask())
        await asyncio.sleep(0)
        ticket = admission.enter("realtime")
        with pytest.raises(Evicted):
            await waiting
        admission.leave(ticket)


@pytest.mark.parametrize("steps", range(4))
async def test_a_waiter_that_is_cancelled_at_any_step_leaves_nothing(steps: int) -> None:
    admission = AdmissionController(AdmissionSettings())
    admission.open(1)
    holder = admission.enter("normal")

    async def ask() -> None:
        async with admission.slot("normal"):
            await asyncio.sleep(60)

    task = asyncio.create_task(ask())
    for step in range(steps):
        if step == 1:
            admission.leave(holder)  # the slot is granted; the waiter may not know yet
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    admission.leave(holder)
    assert admission.running("normal") == admission.waiting("normal") == 0


def test_beside_realtime_traffic_batch_gets_few_slots_and_all_when_it_is_over() -> None:
    clock = Clock()
    admission = controller(32, clock)
    realtime = admission.enter("realtime")
    batch = [admission.enter("batch") for _ in range(40)]
    assert admission.running("batch") == 2
    assert [admission.enter("normal").state for _ in range(3)] == [TicketState.RUNNING] * 3
    admission.leave(realtime)
    clock.now += 1.9
    admission.leave(batch[0])
    assert admission.running("batch") == 2  # the next realtime request is expected
    clock.now += 0.2
    admission.leave(batch[1])
    assert admission.running("batch") == 25  # 32, less 4 reserved, less 3 normal
