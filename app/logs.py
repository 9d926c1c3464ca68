"""One format for every line that this process and vLLM's processes log: JSON lines, or short ones on a terminal.

Code logs with the standard library, `logging.getLogger(__name__).info("text", extra={…})`; so do uvicorn and vLLM, and
Python's warnings are routed there. What a middleware bound in structlog's context variables (the request's id) is in
every line that is logged meanwhile, whoever logs it. Text may come from clients, so that nothing of it starts a line.
"""

import json
import logging
import logging.config
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from structlog.contextvars import merge_contextvars
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, WrappedLogger

from app.settings import LogSettings

Style = Literal["json", "pretty"]

# Attributes of a record that are no `extra`, or one that its library means for its own formatter.
_NO_EXTRAS = {*vars(logging.makeLogRecord({})), "asctime", "message", "taskName", "color_message", "vllm_process_name"}
_NO_CONTEXT = {"event", "exc_info", "_record", "_from_structlog"}
_FIXED = ("time", "level", "logger", "message", "exception")
_COLOURS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "1;31"}
_FILE_PREFIX = "askimage-vllm-logging-"
_MARK = "_askimage_logged"

_encode = json.JSONEncoder(default=str, allow_nan=False).encode


def configure_logging(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Send every line of this process to `stream` (standard error), in one format."""
    stream = stream or sys.stderr
    logging.config.dictConfig(_configuration(settings, stream, stream))


def configure_vllm_logging(settings: LogSettings) -> None:
    """Give vLLM this format, in our process and in those that it starts; before vLLM is imported.

    vLLM applies the file named by VLLM_LOGGING_CONFIG_PATH in each of them, instead of a configuration of its own that
    would log in another format, to standard output. Its least severe level is VLLM_LOGGING_LEVEL, by default WARNING.
    An operator's own choice in the environment is left as it is. `remove_vllm_logging` removes the file.
    """
    if "VLLM_LOGGING_CONFIG_PATH" in os.environ or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0":
        return
    # Only this user may write it: what it names is imported and called.
    descriptor, name = tempfile.mkstemp(prefix=_FILE_PREFIX, suffix=".json")
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(_configuration(settings, sys.stderr, "ext://sys.stderr"), file)
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = name


def remove_vllm_logging() -> None:
    """Remove the file of `configure_vllm_logging`, when no process of vLLM's is to start any more."""
    path = Path(os.environ.get("VLLM_LOGGING_CONFIG_PATH", ""))
    if path.name.startswith(_FILE_PREFIX):
        path.unlink(missing_ok=True)


def mark_logged(error: BaseException) -> None:
    """Say that this exception is in the log, so that the server, which logs what escapes too, does not repeat it."""
    setattr(error, _MARK, True)


class NotLoggedBefore(logging.Filter):
    """Drops records of exceptions that `mark_logged` has seen."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and hasattr(record.exc_info[1], _MARK))


def make_formatter(style: Style, colours: bool = False) -> logging.Formatter:
    """The formatter of all handlers; also reached by its dotted path, in vLLM's processes."""
    logging.captureWarnings(True)  # no logging configuration can say it
    return ProcessorFormatter(
        foreign_pre_chain=[merge_contextvars], processors=[_collect, _pretty(colours) if style == "pretty" else _json]
    )


def _configuration(settings: LogSettings, terminal: TextIO, stream: Any) -> dict[str, Any]:
    """A `logging.config` dictionary. vLLM applies it once more in this process, so that it must do no harm twice."""
    is_terminal = terminal.isatty()
    style = settings.format if settings.format != "auto" else "pretty" if is_terminal else "json"
    level = settings.level.upper()
    to_root = {"propagate": True}  # handlers that others have set are taken away, from child loggers too
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "askimage": {"()": f"{__name__}.make_formatter", "style": style, "colours": is_terminal},
        },
        "filters": {"once": {"()": f"{__name__}.NotLoggedBefore"}},
        "handlers": {
            "askimage": {"class": "logging.StreamHandler", "formatter": "askimage", "stream": stream},
        },
        # Libraries at debug level log each piece of a body (multipart) and each event of the loop: not even then.
        "root": {"handlers": ["askimage"], "level": "INFO" if level == "DEBUG" else level},
        "loggers": {
            "app": {"level": level},
            "httpx": {"level": "WARNING"},
            "transformers": to_root,
            "uvicorn": to_root,
            "uvicorn.access": {"propagate": False},  # app.middleware.access_log knows more
            "uvicorn.error": to_root | {"filters": ["once"]},
            "vllm": to_root | {"level": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING").upper()},
        },
    }


def _collect(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """What one line says: the fixed fields, then context and extras, then the exception."""
    record: logging.LogRecord = event["_record"]
    line: EventDict = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": event["event"],
    }
    process = getattr(record, "vllm_process_name", record.processName)
    if process != "MainProcess":
        line["process"] = process
    for name, value in event.items():
        if name not in _NO_CONTEXT and name not in _FIXED:
            line[name] = value
    for name, value in vars(record).items():
        if name not in _NO_EXTRAS and name not in _FIXED:
            line[name] = value
    exc_info = event.get("exc_info")
    if exc_info and exc_info[1] is not None:
        line["exception"] = "".join(traceback.format_exception(exc_info[1])).rstrip()
    return line


def _json(_: WrappedLogger, __: str, line: EventDict) -> str:
    try:
        return _encode(line)
    except (TypeError, ValueError):  # keys that are no text, NaN, circles
        return _encode({name: value if isinstance(value, str | int) else repr(value) for name, value in line.items()})


def _pretty(colours: bool) -> Callable[[WrappedLogger, str, EventDict], str]:
    def coloured(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if colours else text

    def render(_: WrappedLogger, __: str, line: EventDict) -> str:
        level, exception = line["level"], line.pop("exception", None)
        parts = [
            coloured(line["time"][11:-1], "2"),
            coloured(f"{level:<8}", _COLOURS.get(level, "0")),
            f"{_printable(line['logger'])}: {_printable(line['message'])}",
        ]
        for name, value in line.items():
            if name not in _FIXED:
                parts.append(coloured(f"{_printable(name)}=", "36") + _value(value))
        text = " ".join(parts)
        if exception is not None:  # indented, so that no line of an exception's text looks like one of ours
            text += "".join(f"\n    {_printable(each)}" for each in exception.split("\n"))
        return text

    return render


def _value(value: object) -> str:
    text = _printable(str(value))
    return f'"{text}"' if " " in text or not text else text


def _printable(text: str) -> str:
    """The text with escapes for what moves a terminal's cursor, ends a line or turns the direction of writing."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
