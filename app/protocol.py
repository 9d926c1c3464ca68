"""uvicorn's HTTP protocol, less patient: it gives up on a peer that opens a connection, or half a request, and stalls.

uvicorn times the pause between two requests and nothing else, so that a few thousand silent sockets would use up the
process's file descriptors; a transport that is closed waits for its peer to read for ever; a head has no bounds; and
behind a pipelined request uvicorn stops to read, so that it does not see that its client has left.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 32 * 1024  # nginx's bound, twice Node's
MAX_HEADERS = 128

_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"connection: close\r\n\r\nA request's head may have %d bytes and %d headers.\n" % (MAX_HEAD_BYTES, MAX_HEADERS)
)


class ImpatientProtocol(HttpToolsProtocol):
    """Bounds a request's head in time and size, and the time in which a peer takes nothing of a reply that waits.

    The times are uvicorn's `timeout_keep_alive`, in seconds. The body is bounded by `app.middleware.body_limit`, which
    can answer. A request that comes before the answer to the one before (pipelining) is not read: the connection ends
    with that answer, and its client has to ask again (RFC 9112, 9.3.2).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deaf = False  # to all that still comes on this connection, but for its end
        self._loose_bytes = 0  # since the last head or piece of a body was complete: a head, or trailers
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        if self._deaf:
            return
        self._loose_bytes += len(data)
        super().data_received(data)
        if self._loose_bytes > MAX_HEAD_BYTES and not self._deaf:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.cycle is not None and not self.cycle.response_complete:
            self._deaf = True
            self.cycle.keep_alive = False

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._stop_head_timer()
        self._loose_bytes = 0
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._deaf:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._await_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _refuse_head(self) -> None:
        self._deaf = True
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_HEAD_TOO_LARGE)
        self.transport.close()

    def _await_head(self) -> None:
        if self._head_timer is None:  # once for each head: sending it byte by byte gains nothing
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _await_reader(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.timeout_keep_alive, self._abort)

    def _abort(self) -> None:
        self._write_timer = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
