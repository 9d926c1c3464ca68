"""The one line that each request leaves."""

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import Overloaded
from app.logs import NotLoggedBefore, make_formatter
from app.middleware.access_log import AccessLogMiddleware
from app.middleware.request_id import RequestIdMiddleware

SECRET = "a-secret-of-the-client"


class Lines:
    """What was logged, read as JSON."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(make_formatter("json"))

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def access(self) -> list[dict[str, Any]]:
        return [line for line in self.all if line["logger"] == "app.access"]


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines = Lines()
    root, app = logging.getLogger(), logging.getLogger("app")
    before = app.level
    root.addHandler(lines.handler)
    app.setLevel(logging.DEBUG)
    yield lines
    root.removeHandler(lines.handler)
    app.setLevel(before)
    logging.captureWarnings(False)


async def _echo(request: Request) -> Response:
    logging.getLogger("library").warning("inside")
    request.state.log |= {"key": "someone", "class": "batch", "status": "inner layers do not decide this"}
    return PlainTextResponse(f"{len(await request.body())} bytes", status_code=201)


async def _status(request: Request) -> Response:
    return Response(status_code=request.path_params["status"])


async def _refuse(request: Request) -> Response:
    return Overloaded("too much").response(request.scope)


async def _bug(request: Request) -> Response:
    raise ValueError("a bug\nof ours")


async def _gone(request: Request) -> Response:
    async for _ in request.stream():
        pass
    raise AssertionError("the body was complete")


async def _status_200(request: Request) -> Response:
    return Response()


async def _left() -> Message:
    return {"type": "http.disconnect"}


async def _nowhere(message: Message) -> None:
    pass


async def _probe(request: Request) -> Response:
    return Response(status_code=503)


async def _stream(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"part"
            await asyncio.sleep(0)
        request.state.log["outcome"] = "stop"

    return StreamingResponse(parts())


ROUTES = [
    Route("/v1/ask", _echo, methods=["GET", "POST"]),
    Route("/status/{status:int}", _status),
    Route("/refuse", _refuse),
    Route("/bug", _bug),
    Route("/gone", _gone, methods=["POST"]),
    Route("/stream", _stream),
    *[Route(path, _probe) for path in ("/livez", "/readyz", "/healthz", "/health", "/metrics")],
]


def counter() -> Counter:
    return Counter("requests", "As in Telemetry.", ["route", "class", "outcome"], registry=CollectorRegistry())


def logged(app: ASGIApp, requests: Counter | None = None) -> ASGIApp:
    inner = RequestIdMiddleware(AccessLogMiddleware(app, slow_seconds=1.0))
    service = SimpleNamespace(telemetry=SimpleNamespace(requests=requests or counter()))
    service.telemetry.rejections = Counter("rejections", "As there.", ["reason"], registry=CollectorRegistry())

    async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"service": service}
        await inner(scope, receive, send)

    return with_state


def counted(requests: Counter) -> list[tuple[str, str, str, float]]:
    samples = [sample for family in requests.collect() for sample in family.samples]
    return [(*sample.labels.values(), sample.value) for sample in samples if sample.name == "requests_total"]  # type: ignore[misc]


async def send(method: str, path: str, requests: Counter | None = None, **request: Any) -> httpx.Response:
    transport = httpx.ASGITransport(logged(Starlette(routes=ROUTES), requests))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.request(method, path, **request)


def post(path: str = "/v1/ask") -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [],
    }


async def talk(app: ASGIApp, *messages: Message, path: str = "/v1/ask") -> list[Message]:
    """Run one request whose client sends these messages; returns what was sent to it."""
    coming, sent = iter(messages), []

    async def receive() -> Message:
        return next(coming)

    async def send(message: Message) -> None:
        sent.append(message)

    await logged(app)(post(path), receive, send)
    return sent


async def test_a_request_leaves_one_line_with_what_is_known_of_it(lines: Lines) -> None:
    await send("POST", "/v1/ask", content=b"12345", headers={"X-Request-ID": "abc"})
    (line,) = lines.access
    assert line.pop("duration_ms") >= 0
    assert line.pop("time")
    assert line == {
        "level": "info",
        "logger": "app.access",
        "message": "request",
        "request_id": "abc",
        "method": "POST",
        "path": "/v1/ask",
        "status": 201,
        "request_bytes": 5,
        "response_bytes": len("5 bytes"),
        "key": "someone",
        "class": "batch",
    }


async def test_the_duration_is_in_milliseconds(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=iter([100.0, 100.25]).__next__)
    monkeypatch.setattr("app.middleware.access_log.time", clock)
    await talk(Starlette(routes=ROUTES), {"type": "http.request"}, path="/v1/ask")
    assert [line["duration_ms"] for line in lines.access] == [250.0]


@pytest.mark.parametrize(("path", "line"), [("/v1/ask", ("warning", "slow request")), ("/stream", ("info", "request"))])
async def test_a_slow_question_is_a_warning(
    lines: Lines, monkeypatch: pytest.MonkeyPatch, path: str, line: tuple[str, str]
) -> None:
    clock = SimpleNamespace(monotonic=iter([100.0, 101.25]).__next__)
    monkeypatch.setattr("app.middleware.access_log.time", clock)
    await talk(Starlette(routes=[Route(path, _status_200, methods=["POST"])]), {"type": "http.request"}, path=path)
    assert [(each["level"], each["message"]) for each in lines.access] == [line]


async def test_questions_are_counted_by_how_they_ended(lines: Lines) -> None:
    requests = counter()

    async def ends(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["log"] |= {"class": "batch", "outcome": "length"}
        await Response()(scope, receive, send)

    async def refused(scope: Scope, receive: Receive, send: Send) -> None:
        await Overloaded("too much").send(scope, receive, send)

    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("a bug")

    async def leaves(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    for app in (ends, ends, refused, fails, leaves):
        with contextlib.suppress(ValueError):
            await logged(app, requests)(post(), _left, _nowhere)
    await logged(ends, requests)(post("/v1/images"), _left, _nowhere)
    await logged(ends, requests)(post() | {"method": "GET"}, _left, _nowhere)
    assert sorted(counted(requests)) == [
        ("/v1/ask", "batch", "length", 2),
        ("/v1/ask", "unknown", "cancelled", 1),
        ("/v1/ask", "unknown", "internal_error", 1),
        ("/v1/ask", "unknown", "overloaded", 1),
    ]


async def test_query_headers_and_bodies_are_not_logged(lines: Lines) -> None:
    headers = {"Authorization": f"Bearer {SECRET}", "Cookie": SECRET}
    await send("POST", f"/v1/ask?key={SECRET}", content=SECRET.encode(), headers=headers)
    assert len(lines.access) == 1
    assert SECRET not in lines.text


async def test_lines_within_a_request_carry_its_id_and_those_after_it_do_not(lines: Lines) -> None:
    reply = await send("POST", "/v1/ask")
    logging.getLogger("library").warning("outside")
    ids = {line["message"]: line.get("request_id") for line in lines.all}
    assert ids == {"inside": reply.headers["X-Request-ID"], "request": reply.headers["X-Request-ID"], "outside": None}


async def test_a_path_with_line_feeds_stays_one_line(lines: Lines) -> None:
    await send("GET", '/x%0A{"level":"forged"}%0D%0A')
    assert [line["status"] for line in lines.all] == [404]


@pytest.mark.parametrize(("status", "level"), [(200, "info"), (404, "info"), (499, "info"), (503, "warning")])
async def test_faults_of_the_service_are_warnings(lines: Lines, status: int, level: str) -> None:
    await send("GET", f"/status/{status}")
    assert [(line["status"], line["level"]) for line in lines.access] == [(status, level)]


async def test_the_code_of_a_problem_is_in_the_line(lines: Lines) -> None:
    await send("GET", "/refuse")
    assert [(line["status"], line["error"]) for line in lines.access] == [(503, "overloaded")]


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz", "/health", "/metrics"])
async def test_probes_are_for_debugging(lines: Lines, path: str) -> None:
    await send("GET", path)
    assert [(line["status"], line["level"]) for line in lines.access] == [(503, "debug")]


async def test_the_line_of_a_stream_comes_at_its_end(lines: Lines) -> None:
    seen: list[int] = []

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_look(message: Message) -> None:
            await send(message)
            seen.append(len(lines.access))

        await Starlette(routes=ROUTES)(scope, receive, send_and_look)

    transport = httpx.ASGITransport(logged(watched))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        await http.get("/stream")
    assert len(seen) == 5  # the start, three parts, the end
    assert set(seen) == {0}
    (line,) = lines.access
    assert (line["status"], line["response_bytes"], line["outcome"]) == (200, len(b"part" * 3), "stop")


async def test_a_client_that_left_before_the_reply_is_499(lines: Lines) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await PlainTextResponse("for nobody")(scope, receive, send)

    request = {"type": "http.request", "body": b"12345", "more_body": False}
    await talk(app, request, {"type": "http.disconnect"})
    (line,) = lines.access
    assert (line["status"], line["level"], line["request_bytes"], line["response_bytes"]) == (499, "info", 5, 0)


async def test_a_client_that_left_and_got_no_reply_at_all_is_499(lines: Lines) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    await talk(app, {"type": "http.disconnect"})
    assert [line["status"] for line in lines.access] == [499]


async def test_a_body_that_was_cut_is_no_fault_of_ours(lines: Lines) -> None:
    part = {"type": "http.request", "body": b"123", "more_body": True}
    with pytest.raises(ClientDisconnect):
        await talk(Starlette(routes=ROUTES), part, {"type": "http.disconnect"}, path="/gone")
    (line,) = lines.access
    assert (line["status"], line["level"], line["request_bytes"]) == (499, "info", 3)
    assert "exception" not in line


async def test_a_bug_met_after_the_client_left_is_still_logged_with_its_traceback(lines: Lines) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await talk(app, {"type": "http.disconnect"})
    (line,) = lines.access
    assert (line["status"], line["level"]) == (500, "error")
    assert "a bug" in line["exception"]


async def test_a_client_that_leaves_after_the_reply_changes_nothing(lines: Lines) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("for somebody")(scope, receive, send)
        await receive()

    await talk(app, {"type": "http.disconnect"})
    assert [(line["status"], line["response_bytes"]) for line in lines.access] == [(200, len("for somebody"))]


async def test_an_exception_that_escapes_is_logged_once_with_its_traceback(lines: Lines) -> None:
    with pytest.raises(ValueError, match="a bug") as caught:
        await send("GET", "/bug")
    (line,) = lines.access
    assert (line["status"], line["level"], line["error"]) == (500, "error", "internal_error")
    assert line["request_id"]
    assert "_bug" in line["exception"]
    again = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "", (), caught._excinfo)
    assert not NotLoggedBefore().filter(again)


async def test_an_exception_amid_the_reply_is_500_although_another_status_was_sent(lines: Lines) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await talk(app)
    assert [(line["status"], line["response_bytes"]) for line in lines.access] == [(500, 4)]


async def test_a_request_without_a_reply_is_500(lines: Lines) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    await talk(app)
    assert [(line["status"], line["level"]) for line in lines.access] == [(500, "warning")]


async def test_a_cancelled_request_leaves_its_line(lines: Lines) -> None:
    waiting = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        waiting.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(talk(app))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (line,) = lines.access
    assert line["status"] == 500
    assert "exception" not in line


async def test_other_scopes_pass(lines: Lines) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def nothing(*_: Message) -> Any: ...

    await AccessLogMiddleware(app, slow_seconds=1.0)({"type": "lifespan"}, nothing, nothing)
    assert seen == ["lifespan"]
    assert lines.text == ""
