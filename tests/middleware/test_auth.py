"""Who a request is from, and the replies to those who may not ask."""

import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import PROBLEM_JSON
from app.keys import KeyStore
from app.middleware.auth import AuthMiddleware
from app.settings import AuthSettings

KEY = "ask_a-key-of-the-file"


class _State:
    """What the server does with what the lifespan yields."""

    def __init__(self, app: ASGIApp, **state: Any) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = dict(self._state)
        await self._app(scope, receive, send)


async def _who(request: Request) -> JSONResponse:
    client = getattr(request.state, "client", None)
    if client is None:
        return JSONResponse(None)
    return JSONResponse({"name": client.name, "id": client.id, "log": request.state.log})


def service(settings: AuthSettings, proxies: int = 0) -> httpx.AsyncClient:
    routes = [Route(path, _who, methods=["GET", "POST"]) for path in ("/v1/ask", "/generate", "/readyz")]
    app = _State(AuthMiddleware(Starlette(routes=routes), trusted_proxies=proxies), keys=KeyStore(settings))
    transport = httpx.ASGITransport(app, client=("192.0.2.7", 1234))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
def one_key(tmp_path: Path) -> AuthSettings:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "phone-app"\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\n')
    return AuthSettings(keys_file=path)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("path", ["/v1/ask", "/generate"])
async def test_a_key_names_its_client(one_key: AuthSettings, scheme: str, path: str) -> None:
    async with service(one_key) as http:
        reply = await http.post(path, headers={"Authorization": f"{scheme} {KEY}"})
    assert reply.json() == {"name": "phone-app", "id": "key:phone-app", "log": {"key": "phone-app"}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], "wants a key"),
        (["Bearer wrong"], "not one of this service's"),
        (["Bearer"], "no key after"),
        (["Bearer  "], "no key after"),
        ([f"Basic {KEY}"], "does not begin with `Bearer`"),
        ([KEY], "does not begin with `Bearer`"),
        ([f"Bearer {KEY}", f"Bearer {KEY}"], "more than one"),
        ([f"Bearer {KEY} {KEY}"], "not one of this service's"),
    ],
)
async def test_without_a_good_key_the_reply_says_how_to_send_it(
    one_key: AuthSettings, values: list[str], says: str
) -> None:
    async with service(one_key) as http:
        reply = await http.post("/v1/ask", headers=[("Authorization", value) for value in values])
    assert reply.status_code == 401
    assert reply.headers["content-type"] == PROBLEM_JSON
    assert reply.headers["www-authenticate"].startswith("Bearer")
    assert says in reply.json()["detail"]
    assert "`Authorization: Bearer KEY`" in reply.json()["detail"]
    assert KEY not in reply.text


@pytest.mark.parametrize("value", [b"Bearer \xff\xfe", b"Bearer \xc3\xa4"])
async def test_bytes_that_are_no_key_are_unknown(one_key: AuthSettings, value: bytes) -> None:
    async with service(one_key) as http:
        assert (await http.post("/v1/ask", headers={b"Authorization": value})).status_code == 401


async def test_a_key_may_have_letters_of_any_language() -> None:
    async with service(AuthSettings(key=SecretStr("schlüssel"))) as http:
        reply = await http.post("/v1/ask", headers={b"Authorization": "Bearer schlüssel".encode()})
    assert reply.json()["name"] == "default"


async def test_probes_need_no_key_and_get_no_client(one_key: AuthSettings) -> None:
    async with service(one_key) as http:
        reply = await http.get("/readyz", headers={"Authorization": "nonsense"})
    assert (reply.status_code, reply.json()) == (200, None)


async def test_without_keys_clients_are_told_apart_by_address() -> None:
    async with service(AuthSettings()) as http:
        reply = await http.post("/v1/ask", headers={"X-Forwarded-For": "203.0.113.9"})
        assert reply.json() == {"name": "anonymous", "id": "address:192.0.2.7", "log": {"key": "anonymous"}}
    async with service(AuthSettings(), proxies=1) as http:
        reply = await http.post("/v1/ask", headers={"X-Forwarded-For": "203.0.113.9"})
        assert reply.json()["id"] == "address:203.0.113.9"


@pytest.mark.parametrize("value", ["Bearer wrong", "Bearer", "Basic dTpw"])
async def test_a_wrong_key_is_refused_even_where_none_is_needed(value: str) -> None:
    async with service(AuthSettings()) as http:
        assert (await http.post("/v1/ask", headers={"Authorization": value})).status_code == 401
