"""`askimage serve`: the HTTP server around the application."""

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import psutil
import typer
import uvicorn

from app.keys import KeyStore, check_exposure
from app.logs import configure_logging, configure_vllm_logging, remove_vllm_logging
from app.protocol import ImpatientProtocol
from app.settings import ServerSettings, Settings, SettingsError, load_settings

if TYPE_CHECKING:
    from app.engine.service import EngineService

logger = logging.getLogger("app.serve")

LAST_BYTES_SECONDS = 3  # for replies on their way when the listener closes


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
        keys = KeyStore(settings.auth)
        check_exposure(settings, keys)
        listeners = _listen(settings.server)
        configure_environment(settings)
        _run(settings, keys, listeners)
    except SettingsError as error:
        sys.exit(f"askimage: {error}")


def _listen(server: ServerSettings) -> list[socket.socket]:
    """Take the ports before anything else, so that one in use is one clear line."""
    ports = [server.port] + ([server.operations_port] if server.operations_port is not None else [])
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listeners = []
    for port in ports:
        try:
            listeners.append(socket.create_server((server.host, port), family=family, backlog=2048))
        except OSError as error:
            reason = str(error.strerror).partition(" (while")[0]
            raise SettingsError(f"cannot listen on {server.host}, port {port}: {reason}") from error
    return listeners


def configure_environment(settings: Settings) -> None:
    """What vLLM reads from the environment, and how this process logs."""
    # vLLM's start-up fills a screen in every process; log level `debug` shows it.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if settings.log.level == "debug" else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # for vLLM's processes
    if settings.tracing.endpoint is not None:
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")  # vLLM's own choice is gRPC
        os.environ.setdefault("OTEL_SERVICE_NAME", "askimage")
    configure_vllm_logging(settings.log)
    configure_logging(settings.log)


class _Server(uvicorn.Server):
    """Signals are ours. The first one lets running requests finish while the listener stays open and answers 503, where
    uvicorn would close it at once; the second one ends the process now."""

    signals = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again at the end, which makes a clean stop look like a crash; this does not."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals > 1:
            _end(128 + sig)
        if self.started:
            self._loop.call_soon_threadsafe(self._begin_drain)
        else:
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def _begin_drain(self) -> None:
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        service: EngineService = self.lifespan.state["service"]
        try:
            await service.drain()
        finally:
            self.should_exit = True


def _run(settings: Settings, keys: KeyStore, listeners: list[socket.socket]) -> NoReturn:
    """Serve until a signal, or until the engine has no more use, then end the process."""
    from app.main import create_app

    ends: list[tuple[int, str]] = []

    def on_end(code: int, line: str) -> None:
        ends.append((code, line))
        server.should_exit = True

    host, port = listeners[0].getsockname()[:2]
    if settings.server.operations_port == 0:  # it is known by the port that was free
        taken = settings.server.model_copy(update={"operations_port": listeners[1].getsockname()[1]})
        settings = settings.model_copy(update={"server": taken})
    server = _Server(
        uvicorn.Config(
            create_app(settings, keys, on_end),
            http=ImpatientProtocol,
            log_config=None,
            log_level=settings.log.level,
            access_log=False,  # app.middleware.access_log knows more
            proxy_headers=False,  # so does app.middleware.address
            server_header=False,
            timeout_keep_alive=math.ceil(settings.server.idle_timeout),
            timeout_graceful_shutdown=LAST_BYTES_SECONDS,
        )
    )
    raise_descriptor_limit()
    operations_port = settings.server.operations_port or port
    logger.info("loading model %s; port %d; http://%s:%d/docs", settings.model.path, port, host, operations_port)
    server.run(sockets=listeners)
    code, line = ends[0] if ends else (0 if server.started else 1, "")
    if line:
        print(f"askimage: {line}", file=sys.stderr)
    _end(code)


def raise_descriptor_limit() -> None:
    """Every connection is a file descriptor; shells often allow a thousand where the system allows far more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end(code: int) -> NoReturn:
    """End now. The engine is shut down by now, or was still starting: then its processes, which put off a polite signal
    until they are up, end here, and the thread that waits for them must not keep this one."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    remove_vllm_logging()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
