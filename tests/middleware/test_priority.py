"""Which class of service a request gets."""

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.identity import TIERS, Client, Tier
from app.middleware.priority import PriorityMiddleware


async def _class(request: Request) -> JSONResponse:
    log = getattr(request.state, "log", None)
    return JSONResponse({"priority": getattr(request.state, "priority", None), "log": log})


async def ask(tier: Tier, priority: str | None = None, path: str = "/v1/ask") -> httpx.Response:
    """The reply to a request of a client of that tier."""
    inner = PriorityMiddleware(Starlette(routes=[Route(path, _class, methods=["POST"])]))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"client": Client("someone", "key:someone", tier)}
        await inner(scope, receive, send)

    headers = {} if priority is None else {"X-Priority": priority}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        return await http.post(path, headers=headers)


@pytest.mark.parametrize(("tier", "expected"), [("premium", "normal"), ("standard", "normal"), ("bulk", "batch")])
async def test_without_the_header_the_tier_decides(tier: str, expected: str) -> None:
    assert (await ask(TIERS[tier])).json() == {"priority": expected, "log": {"class": expected}}


@pytest.mark.parametrize(
    ("tier", "allowed"),
    [("premium", {"realtime", "normal", "batch"}), ("standard", {"normal", "batch"}), ("bulk", {"batch"})],
)
@pytest.mark.parametrize("asked", ["realtime", "normal", "batch"])
async def test_a_class_up_to_the_tiers_highest_may_be_asked_for(tier: str, allowed: set[str], asked: str) -> None:
    reply = await ask(TIERS[tier], asked)
    if asked in allowed:
        assert reply.json()["priority"] == asked
    else:
        assert (reply.status_code, reply.json()["code"]) == (403, "class_forbidden")
        assert all(name in reply.json()["detail"] for name in allowed)


async def test_the_header_is_read_without_regard_to_case_and_space() -> None:
    assert (await ask(TIERS["premium"], " RealTime ")).json()["priority"] == "realtime"


@pytest.mark.parametrize("asked", ["urgent", "", "0", "realtime,batch"])
async def test_a_class_that_does_not_exist_is_malformed(asked: str) -> None:
    reply = await ask(TIERS["standard"], asked)
    assert reply.status_code == 400
    assert "realtime, normal, batch" in reply.json()["detail"]


async def test_generate_has_classes_too() -> None:
    assert (await ask(TIERS["bulk"], path="/generate")).json()["priority"] == "batch"
    assert (await ask(TIERS["bulk"], "realtime", path="/generate")).status_code == 403


async def test_probes_have_no_class() -> None:
    assert (await ask(TIERS["bulk"], "nonsense", path="/readyz")).json() == {"priority": None, "log": None}
