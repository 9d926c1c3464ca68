"""What clients see of their limits: the headers of every reply, and the refusals."""

from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from app.errors import PROBLEM_JSON
from app.identity import Client, Tier
from app.middleware.rate_limit import RateLimitMiddleware
from app.rate_limits import RateLimiter
from app.settings import LimitSettings

CLIENT = Client("phone-app", "key:phone-app", Tier())


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(await Request(scope, receive).body())(scope, receive, send)


def service(**settings: Any) -> httpx.AsyncClient:
    limited = RateLimitMiddleware(_answer)
    limiter = RateLimiter(LimitSettings(**settings), CollectorRegistry())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"client": CLIENT, "rate_limiter": limiter}
        await limited(scope, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def limits_of(reply: httpx.Response | Response) -> tuple[str | None, str | None]:
    return reply.headers.get("RateLimit-Policy"), reply.headers.get("RateLimit")


async def test_a_reply_says_what_is_allowed_and_what_is_left() -> None:
    async with service(requests="120/minute", image_tokens="500000/minute") as http:
        reply = await http.post("/v1/ask", content=b"question")
    assert (reply.status_code, reply.content) == (200, b"question")
    assert limits_of(reply) == (
        '"requests";q=120;w=60, "image-tokens";q=500000;w=60',
        '"requests";r=119;t=60, "image-tokens";r=500000;t=0',
    )


async def test_several_limits_have_names_of_their_own() -> None:
    async with service(requests="120/minute;2000/hour") as http:
        reply = await http.post("/generate")
    assert limits_of(reply) == (
        '"requests-per-minute";q=120;w=60, "requests-per-hour";q=2000;w=3600',
        '"requests-per-minute";r=119;t=60, "requests-per-hour";r=1999;t=3600',
    )


async def test_a_refusal_says_when_to_come_back() -> None:
    async with service(requests="1/hour") as http:
        await http.post("/v1/ask")
        reply = await http.post("/v1/ask")
    assert reply.status_code == 429
    assert reply.headers["content-type"] == PROBLEM_JSON
    assert reply.json()["code"] == "rate_limited"
    assert reply.json()["limit"] == 1
    after = reply.headers["retry-after"]
    assert 3590 <= int(after) <= 3600
    assert limits_of(reply) == ('"requests";q=1;w=3600', f'"requests";r=0;t={after}')


async def test_a_refusal_does_not_read_the_body() -> None:
    limiter = RateLimiter(LimitSettings(requests="0/hour"), CollectorRegistry())
    sent: list[Message] = []

    async def body() -> Message:
        pytest.fail("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    state = {"client": CLIENT, "rate_limiter": limiter}
    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/ask", "headers": [], "state": state}
    await RateLimitMiddleware(_answer)(scope, body, send)
    assert sent[0]["status"] == 429


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/metrics", "/docs"])
async def test_probes_and_metrics_are_never_limited(path: str) -> None:
    async with service(requests="1/hour") as http:
        for _ in range(3):
            reply = await http.get(path)
            assert reply.status_code == 200
            assert limits_of(reply) == (None, None)


async def test_without_limits_there_are_no_headers() -> None:
    async with service() as http:
        assert limits_of(await http.post("/v1/ask")) == (None, None)


async def test_without_an_answer_of_the_storage_there_are_no_headers() -> None:
    async with service(requests="1/hour", storage_url="redis://127.0.0.1:1/0") as http:
        for _ in range(2):
            reply = await http.post("/v1/ask")
            assert reply.status_code == 200
            assert limits_of(reply) == (None, None)


async def test_a_closed_service_answers_503_while_the_storage_is_silent() -> None:
    async with service(requests="1/hour", storage_url="redis://127.0.0.1:1/0", fail_open=False) as http:
        reply = await http.post("/v1/ask")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    assert reply.json()["detail"] == "the rate-limit storage does not answer"
    assert limits_of(reply) == (None, None)


async def test_other_connections_pass_untouched() -> None:
    seen: list[str] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    await RateLimitMiddleware(inner)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]
