"""Shared by all tests: one real server, on the demo model, for the whole session."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from support import ROOT, START_SECONDS, answers, serve, wait_for

# Taken out of the environment: the service refuses ASKIMAGE_ variables it does not know.
TEST_MODEL = Path(os.environ.pop("ASKIMAGE_TEST_MODEL", ROOT / "demo_model"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with engines of their own come first: the session's server starts after them, and no two run at once."""
    items.sort(key=lambda item: "server" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The checkpoint that the tests run on; ASKIMAGE_TEST_MODEL names another than the demo model."""
    return TEST_MODEL


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a service that is ready, with the real engine on the test model."""
    log = tmp_path_factory.mktemp("server") / "log"
    limits = {
        "ASKIMAGE_IMAGES__MAX_BYTES": "2000000",
        "ASKIMAGE_IMAGES__MAX_PER_REQUEST": "3",
        "ASKIMAGE_SERVER__MAX_BODY_BYTES": "8000000",
        "ASKIMAGE_ENGINE__MAX_MODEL_LEN": "2048",
        "ASKIMAGE_ADMISSION__MAX_WAITING_BATCH": "50",
    }
    with serve(model_dir, log, **limits) as (address, process):

        def ready() -> bool:
            if process.poll() is not None:
                pytest.fail(f"the server ended:\n{log.read_text()}")
            return answers(f"{address}/readyz", 200)

        wait_for(ready, START_SECONDS, "the server is ready")
        yield address


@pytest.fixture
async def client(server: str) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the session's server."""
    async with httpx.AsyncClient(base_url=server, timeout=60) as http:
        yield http
