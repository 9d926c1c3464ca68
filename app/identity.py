"""Who is asking: what a request's key, or its address, says of it."""

from dataclasses import dataclass

from starlette.types import Scope

from app.engine.request import PriorityClass


@dataclass(frozen=True, slots=True)
class Tier:
    """What a group of clients may do.

    Attributes:
        default_class: Class of a request without `X-Priority`.
        max_class: Highest class that may be asked for.
        requests: Limits such as `120/minute;2000/hour`; None takes the service's.
        image_tokens: Limits on image tokens; None takes the service's.
    """

    default_class: PriorityClass = "normal"
    max_class: PriorityClass = "normal"
    requests: str | None = None
    image_tokens: str | None = None


TIERS = {
    "premium": Tier(max_class="realtime"),
    "standard": Tier(),
    "bulk": Tier(default_class="batch", max_class="batch"),
}
"""Tiers that need no declaration; a keys file may change them and add others."""


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of one request, in the state of its scope as `client`.

    Attributes:
        name: The key's name, or `anonymous`: for logs.
        id: Whose limits are counted: `key:NAME` or `address:ADDRESS`.
        tier: What it may do, with the key's own limits.
    """

    name: str
    id: str
    tier: Tier


QUESTION_ROUTES = frozenset({"/v1/ask"})
"""Where questions are asked."""


def is_question(scope: Scope) -> bool:
    """Whether a request asks something about images."""
    return scope["method"] == "POST" and scope["path"] in QUESTION_ROUTES


def is_api(path: str) -> bool:
    """Whether a path takes keys, classes and limits: all but the probes, the metrics and the documentation."""
    return path.startswith("/v1/") or path == "/generate"
