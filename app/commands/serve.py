"""`askimage serve`: the HTTP server around the application."""

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Annotated, NoReturn

import psutil
import typer
import uvicorn

from app.settings import ServerSettings, Settings, SettingsError, load_settings

logger = logging.getLogger("app.serve")

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def serve(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder or model name; default: ASKIMAGE_MODEL__PATH.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: ASKIMAGE_SERVER__HOST.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default: ASKIMAGE_SERVER__PORT.")] = None,
) -> None:
    """Start the service.

    Everything else is set by `ASKIMAGE_…` variables or a `.env` file; `.env.example` lists them all. The server answers
    at once, `/readyz` says when the model is loaded.

    Try: `askimage serve --port 9000`, then `curl -F image=@sign.png -F question="What does the sign say?"
    localhost:9000/v1/ask`
    """
    for name, value in (("MODEL__PATH", model), ("SERVER__HOST", host), ("SERVER__PORT", port)):
        if value is not None:
            os.environ[f"ASKIMAGE_{name}"] = str(value)
    try:
        settings = load_settings()
        listener = _listen(settings.server)
    except SettingsError as error:
        sys.exit(f"askimage: {error}")
    configure_environment(settings)
    _run(settings, listener)


def _listen(server: ServerSettings) -> socket.socket:
    """Take the port before anything else, so that one in use is one clear line."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        return socket.create_server((server.host, server.port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise SettingsError(f"cannot listen on {server.host}, port {server.port}: {reason}") from error


def configure_environment(settings: Settings) -> None:
    """What vLLM reads from the environment, and how this process logs."""
    level = settings.server.log_level
    # vLLM's start-up fills a screen in every process; log level `debug` shows it.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if level == "debug" else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # for vLLM's processes
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)


class _Server(uvicorn.Server):
    """uvicorn ends by raising the signal again, which makes a clean stop look like a crash; this one returns."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _run(settings: Settings, listener: socket.socket) -> NoReturn:
    """Serve until a signal or until the model cannot be loaded, then end the process."""
    from app.main import create_app

    failures: list[str] = []

    def fail(reason: str) -> None:
        failures.append(reason)
        server.should_exit = True

    server = _Server(
        uvicorn.Config(
            create_app(settings, fail),
            log_config=None,
            log_level=settings.server.log_level,
            access_log=settings.server.log_level == "debug",
            timeout_graceful_shutdown=int(settings.server.drain_timeout),
        )
    )
    host, port = listener.getsockname()[:2]
    logger.info("loading model %s; http://%s:%d/docs", settings.model.path, host, port)
    server.run(sockets=[listener])
    if failures:
        print(f"askimage: {failures[0]}", file=sys.stderr)
    code = 1 if failures or not server.started else 0
    # The engine is shut down by now, or was still starting: then its processes, which put off a polite signal until
    # they are up, end here, and the thread that waits for them must not keep this one.
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
