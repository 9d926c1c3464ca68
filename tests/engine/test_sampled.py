"""Readings in the background: whoever asks never waits."""

import threading
import time

import pytest

from app.engine import sampled
from app.engine.sampled import Sampled, resident_memory
from support import wait_for


def test_a_reading_is_taken_again_and_again_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "SAMPLE_SECONDS", 0.01)
    taken: list[int] = []

    def read() -> int:
        taken.append(len(taken))
        return taken[-1]

    reading = Sampled(read, stale=-1)
    assert reading.latest == 0
    reading.start()
    wait_for(lambda: reading.latest > 2, 5, "it is repeated")
    reading.stop()
    time.sleep(0.05)
    seen = len(taken)
    time.sleep(0.05)
    assert len(taken) == seen


@pytest.mark.parametrize("ends", ["hangs", "fails"])
def test_a_driver_that_hangs_or_fails_leaves_no_old_figures(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    monkeypatch.setattr(sampled, "SAMPLE_SECONDS", 0.01)
    monkeypatch.setattr(sampled, "STALE_SECONDS", 0.1)
    hung, release, readings = threading.Event(), threading.Event(), iter([1])

    def read() -> int:
        for each in readings:
            return each
        hung.set()
        if ends == "fails":
            raise OSError("no such device")
        release.wait(10)
        return 2

    reading = Sampled(read, stale=0)
    reading.start()
    assert hung.wait(5)
    assert reading.latest in {1, 0}
    wait_for(lambda: reading.latest == 0, 5, "the old figure is gone")
    reading.stop()
    release.set()


def test_memory_is_this_process_and_its_children() -> None:
    memory = resident_memory()
    assert memory["service"] > 50e6
    assert memory.keys() == {"service", "engine"}
