"""How the engine's owner ends."""

import asyncio

import pytest

from app.engine.gpu import Gpus
from app.engine.service import EXIT_DEAD, EngineService, EngineState
from app.engine.telemetry import Telemetry
from app.settings import load_settings


class Dead:
    """Stands for a loaded engine whose core has ended."""

    errored = True

    def shutdown(self) -> None:
        pass


async def test_a_signal_while_a_dead_engine_is_mourned_does_not_hide_the_death(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    service = EngineService(load_settings(), Telemetry(Gpus()), on_end=lambda code, line: ends.append(code))

    async def load() -> Dead:
        return Dead()

    monkeypatch.setattr(service, "_load", load)
    monkeypatch.setattr(service, "_watch", lambda loaded: asyncio.sleep(0))
    service.start()
    assert await service.settled() is EngineState.DEAD
    assert ends == []
    await service.drain()
    await service.stop()
    assert ends == [EXIT_DEAD]
