"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The checkpoint the tests run on: the demo model, or the folder named by ASKIMAGE_TEST_MODEL."""
    return Path(os.environ.get("ASKIMAGE_TEST_MODEL", Path(__file__).parent.parent / "demo_model")).resolve()
