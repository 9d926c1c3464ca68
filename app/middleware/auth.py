"""Who asks: the client behind each request's key, or behind its address where no key is needed.

Outside of everything that reads the body, so that a stranger costs no more than a few headers.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import ApiError, Unauthorized
from app.identity import is_api
from app.keys import HOW_TO_SEND, KeyStore
from app.middleware.address import client_address


class AuthMiddleware:
    """Sets `client` in the state of requests to the API, and `key` in what is logged of them; else answers with 401.

    The keys are in the scope's state as `keys`, put there by the lifespan.

    Args:
        app: The application inside.
        trusted_proxies: Proxies in front, for the client's address.
    """

    def __init__(self, app: ASGIApp, trusted_proxies: int) -> None:
        self._app = app
        self._trusted_proxies = trusted_proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_api(scope["path"]):
            state = scope["state"]
            keys: KeyStore = state["keys"]
            try:
                client = keys.client(_token(scope), client_address(scope, self._trusted_proxies))
            except ApiError as error:
                await error.send(scope, receive, send)
                return
            state["client"] = client
            state.setdefault("log", {})["key"] = client.name
        await self._app(scope, receive, send)


def _token(scope: Scope) -> str | None:
    """The key of the `Authorization` header; None without the header.

    Raises:
        Unauthorized: The header says something else, or comes more than once. A key that cannot be read is refused
            even where none is needed: who sends one does not expect to be served as a stranger.
    """
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if not values:
        return None
    if len(values) > 1:
        raise Unauthorized(f"there is more than one Authorization header; {HOW_TO_SEND}, once")
    scheme, _, token = values[0].strip().partition(b" ")
    if scheme.lower() != b"bearer":
        raise Unauthorized(f"the Authorization header does not begin with `Bearer`; {HOW_TO_SEND}")
    if not token.strip():
        raise Unauthorized(f"the Authorization header has no key after `Bearer`; {HOW_TO_SEND}")
    # Keys are UTF-8; other bytes are kept as they are and match none.
    return str(token.strip().decode("utf-8", "surrogateescape"))
