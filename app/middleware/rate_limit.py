"""Hold each client to its limits before the body of its request is read, and tell it where it stands.

The headers are those of draft-ietf-httpapi-ratelimit-headers: `RateLimit-Policy` says what is allowed, `RateLimit` what
is left of it. Image tokens are known only once the images are, so their figures are those from before the request.
"""

from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError
from app.identity import Client, is_api
from app.rate_limits import LimitReached, RateLimiter, Standing


class RateLimitMiddleware:
    """Answers requests to the API that pass a limit with 429; inside of the AuthMiddleware, which finds the client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_api(scope["path"]):
            await self._app(scope, receive, send)
            return
        limiter: RateLimiter = scope["state"]["rate_limiter"]
        client: Client = scope["state"]["client"]
        standings: Sequence[Standing] = ()

        async def send_with_standings(message: Message) -> None:
            if standings and message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["RateLimit-Policy"] = ", ".join(
                    f'"{each.policy}";q={each.quota};w={each.window}' for each in standings
                )
                headers["RateLimit"] = ", ".join(
                    f'"{each.policy}";r={each.remaining};t={each.reset}' for each in standings
                )
            await send(message)

        try:
            standings = await limiter.admit(client)
        except ApiError as error:
            standings = error.standings if isinstance(error, LimitReached) else ()
            await error.send(scope, receive, send_with_standings)
            return
        await self._app(scope, receive, send_with_standings)
