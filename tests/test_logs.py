"""What a line of the log looks like, whoever wrote it and whatever a client put into it."""

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from structlog.contextvars import bound_contextvars

from app.logs import configure_logging, configure_vllm_logging, mark_logged
from app.settings import LogSettings
from support import ROOT

HOSTILE = "\n{}\r\n\x1b[2J\x00\x85\u2028\u202e\ud800 end"
logger = logging.getLogger("app.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    named = [logging.getLogger(name) for name in ("app", "httpx", "uvicorn", "uvicorn.access", "uvicorn.error", "vllm")]
    before = [(each, each.handlers[:], each.filters[:], each.level) for each in (logging.getLogger(), *named)]
    yield
    logging.captureWarnings(False)
    for each, handlers, filters, level in before:
        each.handlers[:], each.filters[:] = handlers, filters
        each.setLevel(level)


def configured(stream: io.StringIO | None = None, **settings: Any) -> io.StringIO:
    stream = stream or io.StringIO()
    configure_logging(LogSettings(**settings), stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """Each physical line as JSON, whichever characters a reader takes for the end of one."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("it failed")


def test_a_line_has_the_fixed_fields_first_then_context_then_extras() -> None:
    stream = configured(format="json")
    with bound_contextvars(request_id="abc"):
        logger.info("asked %d times", 2, extra={"tokens": 3})
    (line,) = lines(stream)
    assert list(line) == ["time", "level", "logger", "message", "request_id", "tokens"]
    time_of_line = datetime.fromisoformat(line.pop("time"))
    assert line == {
        "level": "info",
        "logger": "app.test",
        "message": "asked 2 times",
        "request_id": "abc",
        "tokens": 3,
    }
    assert abs((datetime.now(UTC) - time_of_line).total_seconds()) < 10


def test_the_time_is_utc_with_milliseconds() -> None:
    stream = configured(format="json")
    record = logger.makeRecord("app.test", logging.INFO, "", 0, "text", (), None)
    record.created = 1.5
    logger.handle(record)
    assert lines(stream)[0]["time"] == "1970-01-01T00:00:01.500Z"


def test_a_traceback_is_one_field_of_one_line() -> None:
    stream = configured(format="json")
    fail(HOSTILE)
    (line,) = lines(stream)
    assert line["message"] == "it failed"
    assert line["exception"].startswith("Traceback")
    assert "ValueError" in line["exception"]


def test_hostile_text_stays_within_its_line_of_json() -> None:
    stream = configured(format="json")
    logger.info("got %s", HOSTILE, extra={"path": HOSTILE})
    (line,) = lines(stream)
    assert line["message"] == f"got {HOSTILE}"
    assert line["path"] == HOSTILE
    assert stream.getvalue().isascii()


@pytest.mark.parametrize("value", [float("nan"), {(1, 2): 3}, object(), b"bytes", Path("/x")])
def test_a_value_that_is_no_json_is_written_as_text(value: object) -> None:
    stream = configured(format="json")
    logger.info("text", extra={"value": value, "other": 1})
    (line,) = lines(stream)
    assert isinstance(line["value"], str)
    assert line["other"] == 1


def test_an_extra_does_not_replace_a_fixed_field() -> None:
    stream = configured(format="json")
    with bound_contextvars(logger="forged"):
        logger.info("text", extra={"level": "forged", "time": "forged"})
    assert "forged" not in stream.getvalue()


async def test_lines_of_other_tasks_and_libraries_carry_the_context_they_run_in() -> None:
    stream = configured(format="json")

    async def request(name: str) -> None:
        with bound_contextvars(request_id=name):
            await asyncio.sleep(0)
            logging.getLogger("uvicorn.error").info("of %s", name)
            await asyncio.to_thread(logging.getLogger("library").info, "of %s", name)

    await asyncio.gather(request("a"), request("b"))
    logger.info("of nobody")
    assert {(line["message"], line.get("request_id")) for line in lines(stream)} == {
        ("of a", "a"),
        ("of b", "b"),
        ("of nobody", None),
    }


def test_lines_of_libraries_and_warnings_come_once_in_the_same_format() -> None:
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "vllm"):
        logging.getLogger(name).addHandler(logging.StreamHandler(stream := io.StringIO()))
        logging.getLogger(name).propagate = False
    stream = configured(format="json")
    configured(stream, format="json")  # vLLM applies the configuration once more
    logging.getLogger("uvicorn.error").info("started", extra={"color_message": "started, in colour"})
    logging.getLogger("uvicorn.access").info('%s - "%s"', "192.0.2.1", "GET /")
    logging.getLogger("vllm.engine").warning("slow")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    # not uvicorn's access lines: the service writes its own, one for each request
    assert [line["logger"] for line in lines(stream)] == ["uvicorn.error", "vllm.engine", "py.warnings"]
    assert "color_message" not in stream.getvalue()


def test_httpx_and_vllm_log_warnings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    stream = configured(format="json", level="debug")
    for name in ("httpx", "vllm"):
        logging.getLogger(name).info("chatter")
        logging.getLogger(name).warning("news")
    assert [(line["logger"], line["message"]) for line in lines(stream)] == [("httpx", "news"), ("vllm", "news")]


def test_debug_is_for_our_lines_since_libraries_would_log_bodies() -> None:
    stream = configured(format="json", level="debug")
    logger.debug("ours")
    logging.getLogger("python_multipart.multipart").debug("a piece of the body")
    assert [line["message"] for line in lines(stream)] == ["ours"]


def test_less_severe_lines_are_left_out() -> None:
    stream = configured(format="json", level="error")
    logger.warning("no")
    logging.getLogger("library").warning("no")
    logger.error("yes")
    assert [line["message"] for line in lines(stream)] == ["yes"]


def test_an_exception_that_is_marked_as_logged_is_not_logged_by_the_server_too() -> None:
    stream = configured(format="json")
    seen, unseen = ValueError("seen"), ValueError("unseen")
    mark_logged(seen)
    for error in (seen, unseen):
        logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=error)
    (line,) = lines(stream)
    assert line["exception"].endswith("unseen")


def test_auto_is_pretty_on_a_terminal_and_json_elsewhere() -> None:
    elsewhere, terminal = configured(), io.StringIO()
    logger.info("text")
    assert lines(elsewhere)[0]["message"] == "text"
    terminal = configured(Terminal())
    logger.info("text")
    assert "app.test: text" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()


def test_pretty_has_colours_on_a_terminal_alone() -> None:
    stream = configured(format="pretty")
    with bound_contextvars(request_id="abc"):
        logger.warning("text", extra={"empty": "", "two": "a b", "number": 1.5})
    assert stream.getvalue()[12:] == ' warning  app.test: text request_id=abc empty="" two="a b" number=1.5\n'


def test_pretty_writes_no_control_characters_of_clients() -> None:
    stream = configured(format="pretty")
    logger.info("got %s", HOSTILE, extra={"path": HOSTILE, "parts": [HOSTILE]})
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert not [each for each in text[:-1] if unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert "\\x1b[2J" in text


def test_pretty_indents_a_traceback_so_that_no_text_looks_like_a_line() -> None:
    stream = configured(format="pretty")
    fail(f"\n12:00:00.000 info     app.access: forged{HOSTILE}")
    first, *rest = stream.getvalue()[:-1].split("\n")
    assert first.endswith("it failed")
    assert "ValueError" in stream.getvalue()
    assert all(each.startswith("    ") and each.isprintable() for each in rest)


VLLM_SCRIPT = """
import logging, multiprocessing
from app.logs import configure_logging, configure_vllm_logging, remove_vllm_logging
from app.settings import LogSettings

def child(config):
    from vllm.logger import configure_logging, init_logger
    configure_logging(config)
    init_logger("vllm.x").warning("of the\\nchild")
    logging.getLogger("library").warning("of the child's library")

if __name__ == "__main__":
    configure_vllm_logging(LogSettings())
    configure_logging(LogSettings())
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed, init_logger
    init_logger("vllm.x").warning("before the engine")
    configure_logging_if_needed(LoggingConfig())  # AsyncLLM does
    init_logger("vllm.x").warning("of our process")
    init_logger("vllm.x").info("left out")
    logging.getLogger("app.x").info("ours")
    process = multiprocessing.get_context("spawn").Process(target=child, args=(LoggingConfig(),), name="EngineCore")
    process.start()
    process.join()
    remove_vllm_logging()
"""


def test_vllm_logs_in_our_format_in_our_process_and_in_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(VLLM_SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_LOGGING")}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [(line["message"], line.get("process")) for line in found if line["logger"] != "py.warnings"] == [
        ("before the engine", None),
        ("of our process", None),
        ("ours", None),
        ("of the\nchild", "EngineCore"),
        ("of the child's library", "EngineCore"),
    ]
    assert ended.stdout == ""
    assert list(tmp_path.glob("askimage-*")) == []


def test_an_operators_own_vllm_logging_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "/etc/vllm-logging.json")
    configure_vllm_logging(LogSettings())
    assert os.environ["VLLM_LOGGING_CONFIG_PATH"] == "/etc/vllm-logging.json"


def test_vllm_is_left_alone_where_its_logging_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    configure_vllm_logging(LogSettings())
    assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ
