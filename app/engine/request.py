"""What goes into the engine and what comes out: plain data, no HTTP and no vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class ClosedThinking:
    """Thinking that the model's own turn begins with. The markers are trusted, the text is not: the model may have
    copied it from a picture or a user, so nothing in it is special.

    Attributes:
        open: Opening marker.
        text: What was thought.
        close: Closing marker.
    """

    open: str
    text: str
    close: str


# vLLM's priority: lower goes first.
PRIORITIES = {"realtime": 0, "normal": 10, "batch": 20}
PriorityClass = Literal["realtime", "normal", "batch"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation.

    Attributes:
        role: Who speaks.
        text: What the user, the system or the model wrote; never read as special tokens.
        images: How many images precede the text.
    """

    role: Role
    text: str
    images: int = 0


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image as a model takes it.

    Attributes:
        id: SHA-256 of the file.
        width: Upright width in pixels, as sent.
        height: Upright height in pixels, as sent.
        format: File format.
        frames: Frames or pages in the file; the first is used.
        resized_to: Width and height after scaling, before padding; None where vLLM's own processor decides.
        payload: Patches or pixels, for the adapter that made it.
    """

    id: str
    width: int
    height: int
    format: str
    frames: int
    resized_to: tuple[int, int] | None
    payload: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A question, ready to be answered.

    Attributes:
        id: Request id.
        turns: The conversation; the last turn is the question.
        images: The images of all turns, in order.
        priority: Class of service.
        max_tokens: Most tokens of thinking and answer; None takes the service's default.
        temperature: None takes the checkpoint's default.
        stop: Strings that end the answer (not the thinking); they are not part of it.
        thinking: `off` makes the model answer at once.
        thinking_budget: Most tokens of thinking; then the answer is forced.
        json_schema: The answer is JSON of this schema.
        arrived: Monotonic seconds when the request came in.
        admission_seconds: Time it waited for a slot of the engine.
        preprocess_seconds: Time its images took.
        trace_headers: W3C trace context, for the engine's own span.
    """

    id: str
    turns: tuple[Turn, ...]
    images: tuple[PreparedImage, ...]
    priority: PriorityClass = "normal"
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    thinking: Literal["auto", "off"] = "auto"
    thinking_budget: int | None = None
    json_schema: dict[str, Any] | None = None
    arrived: float = 0.0
    admission_seconds: float = 0.0
    preprocess_seconds: float = 0.0
    trace_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; `image_tokens` and `cached_tokens` are part of `prompt_tokens`, `reasoning_tokens` of
    `completion_tokens`."""

    prompt_tokens: int
    image_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds of each phase, and the rate of the decode phase."""

    preprocess_ms: float
    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    total_ms: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class EnginePhase:
    """One engine request of a generation: monotonic seconds of what befell it, by the engine's clock."""

    queued: float
    scheduled: float
    first_token: float
    last_token: float

    @property
    def queued_seconds(self) -> float:
        """Waiting in the engine for the first step."""
        return self.scheduled - self.queued


FinishReason = Literal["stop", "length", "thinking_length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a generation.

    Attributes:
        answer: None when the output ended inside the thinking.
        image_tokens: Tokens of each image, in order.
        phases: Its engine requests, one or two.
    """

    answer: str | None
    reasoning: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    image_tokens: tuple[int, ...]
    phases: tuple[EnginePhase, ...]
