"""Every error a client can meet: status, code and title in one class each, rendered as RFC 9457 problem details.

A class is also its own OpenAPI entry (`responses`), so that the documentation cannot drift from what is raised.
"""

import http
import json
from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.identity import is_api

PROBLEM_JSON = "application/problem+json"


class ApiError(Exception):
    """Base of everything that is answered with a problem document.

    Args:
        detail: One or two sentences that say what to change.
        field: The request field at fault, if one is.
        limit: The limit that was passed, in the unit that `detail` names.
        retry_after: Whole seconds after which trying again makes sense; becomes the `Retry-After` header.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Internal error"
    headers: ClassVar[dict[str, str]] = {}

    def __init__(
        self, detail: str, *, field: str | None = None, limit: float | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.limit = limit
        self.retry_after = retry_after

    def problem(self, request_id: str | None = None) -> dict[str, Any]:
        """The problem document (RFC 9457, section 3), with `code`, `field`, `limit` and `request_id` as extensions."""
        members = {
            "type": f"urn:askimage:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "field": self.field,
            "limit": self.limit,
            "request_id": request_id,
        }
        return {name: value for name, value in members.items() if value is not None}

    def response(self, scope: Scope) -> Response:
        """The answer to the request of `scope`; its log line and the count of rejections learn of the error."""
        state = scope.get("state", {})
        state.setdefault("log", {})["error"] = self.code
        if (service := state.get("service")) is not None and is_api(scope["path"]):
            service.telemetry.rejections.labels(self.code).inc()
        retry = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        # Text that a client sent may hold what UTF-8 cannot, such as a lone surrogate; JSON's own escapes can.
        body = json.dumps(self.problem(state.get("request_id")), ensure_ascii=True)
        return Response(body, self.status, self.headers | retry, media_type=PROBLEM_JSON)

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with this error, from a middleware."""
        await self.response(scope)(scope, receive, send)


class MalformedRequest(ApiError):
    """The request cannot be parsed at all."""

    status, code, title = 400, "malformed_request", "Malformed request"


class Unauthorized(ApiError):
    """No key, or one that is not known."""

    status, code, title = 401, "unauthorized", "Unauthorized"
    headers: ClassVar[dict[str, str]] = {"WWW-Authenticate": 'Bearer realm="askimage"'}


class ClassForbidden(ApiError):
    """The key's tier does not include this class of service."""

    status, code, title = 403, "class_forbidden", "Class of service not allowed"


class NotFound(ApiError):
    """No such route or object."""

    status, code, title = 404, "not_found", "Not found"


class RequestTimeout(ApiError):
    """The request body did not arrive in time."""

    status, code, title = 408, "request_timeout", "Request timed out"


class BodyTooLarge(ApiError):
    """More bytes than the service reads."""

    status, code, title = 413, "body_too_large", "Request body too large"


class ImageTooLarge(ApiError):
    """Too many bytes, pixels, patches or images."""

    status, code, title = 413, "image_too_large", "Image too large"


class PromptTooLong(ApiError):
    """The prompt and the room for an answer do not fit the model's context."""

    status, code, title = 413, "prompt_too_long", "Prompt too long"


class UnsupportedImage(ApiError):
    """Bytes that are not an image of a format on the allow-list."""

    status, code, title = 415, "unsupported_image", "Unsupported image format"


class UndecodableImage(ApiError):
    """An image of a known format whose pixels cannot be read."""

    status, code, title = 422, "undecodable_image", "Image cannot be decoded"


class InvalidField(ApiError):
    """A missing, unknown or invalid field."""

    status, code, title = 422, "invalid_field", "Invalid field"


class RateLimited(ApiError):
    """More requests or image tokens than the client may send in a window of time."""

    status, code, title = 429, "rate_limited", "Rate limit exceeded"


class Overloaded(ApiError):
    """The service has more work than it can queue, or the request waited too long."""

    status, code, title = 503, "overloaded", "Service overloaded"


class QueueFull(Overloaded):
    """No room to wait for the engine."""

    code, title = "queue_full", "Queue full"


class Evicted(Overloaded):
    """A waiting request had to make room for one of a higher class."""

    code, title = "evicted", "Evicted from the queue"


class QueueTimeout(Overloaded):
    """The engine had no slot within the class's queue timeout."""

    code, title = "queue_timeout", "Waited too long"


class NotReady(ApiError):
    """The model is still loading."""

    status, code, title = 503, "not_ready", "Service not ready"


class Draining(NotReady):
    """The service is shutting down; another replica may answer."""

    code, title = "draining", "Service shutting down"


class EngineDead(ApiError):
    """The engine ended; the process is about to be restarted by its supervisor."""

    status, code, title = 503, "engine_dead", "Inference engine not running"


class EngineError(ApiError):
    """The engine failed at this request; others are not affected."""

    status, code, title = 500, "engine_error", "Engine error"


class DeadlineExceeded(ApiError):
    """`deadline_ms` passed before the answer was complete."""

    status, code, title = 504, "deadline_exceeded", "Deadline exceeded"


class StatusError(ApiError):
    """An HTTP status that the framework raised (404, 405, …), kept as it is."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        phrase = http.HTTPStatus(status).phrase
        self.status = status  # type: ignore[misc]
        self.code = phrase.lower().replace(" ", "_")  # type: ignore[misc]
        self.title = phrase  # type: ignore[misc]


def error_codes(base: type[ApiError] = ApiError) -> set[str]:
    """The codes of all errors."""
    return {base.code}.union(*map(error_codes, base.__subclasses__()))


def responses(*errors: type[ApiError]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI `responses` for a route, several error classes of one status as named examples."""
    entries: dict[int | str, dict[str, Any]] = {}
    for error in errors:
        entry = entries.setdefault(
            error.status, {"description": error.title, "content": {PROBLEM_JSON: {"examples": {}}}}
        )
        example = error(_summary(error)).problem(request_id="0f1d2c3b")
        entry["content"][PROBLEM_JSON]["examples"][error.code] = {"value": example}
        if error.title not in entry["description"]:
            entry["description"] += f"; {error.title}"
    return entries


def _summary(error: type[ApiError]) -> str:
    return (error.__doc__ or "").partition("\n")[0]


def first_validation_error(errors: Sequence[Any]) -> InvalidField:
    """One `InvalidField` out of pydantic's list: the first error, with how many more there are."""
    first = errors[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    bounds = (first.get("ctx", {}).get(name) for name in ("le", "ge", "lt", "gt", "max_length", "min_length"))
    limit = next((bound for bound in bounds if bound is not None), None)
    return InvalidField(f"{field}: {first['msg']}{more}", field=field, limit=limit)
