"""A burst of requests must not hold the event loop: so many begin in one turn of it, the others in the turns after.

The loop handles all that is ready before it looks at anything new. A thousand requests that come at once are half a
second of work to it, and a liveness probe that comes with them would wait behind them all.
"""

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from app.identity import is_api

PER_TURN = 8


class PaceMiddleware:
    """Lets requests to the API begin in the order they came; the outermost, so that nothing is done before."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._line: deque[asyncio.Future[None]] = deque()
        self._left = PER_TURN
        self._refilling = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_api(scope["path"]):
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._refilling:
            self._refilling = True
            loop.call_soon(self._refill, loop)
        if self._left:
            self._left -= 1
            return
        turn = loop.create_future()
        self._line.append(turn)
        await turn

    def _refill(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = PER_TURN
        while self._line and self._left:
            turn = self._line.popleft()
            if not turn.done():  # else its client has left
                turn.set_result(None)
                self._left -= 1
        self._refilling = bool(self._line)
        if self._refilling:
            loop.call_soon(self._refill, loop)
