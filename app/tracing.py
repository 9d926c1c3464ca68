"""OpenTelemetry traces: one for each request, from its upload to its last token.

The code makes spans with OpenTelemetry's interface whether or not anybody collects them; without an endpoint they are
no-ops. Attributes follow the semantic conventions for HTTP servers and for generative AI. No span holds a question, an
answer or an image.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.engine.request import EnginePhase, GenerationRequest, Result
from app.settings import SettingsError, TracingSettings
from app.threads import in_daemon_thread
from app.versions import VERSIONS

FLUSH_SECONDS = 2.0

_w3c = TraceContextTextMapPropagator()


class Tracing:
    """Where spans are made, and where they go.

    Args:
        settings: The collector's address and the share of requests that are traced.

    Raises:
        SettingsError: The packages that send spans are missing.

    Attributes:
        tracer: Makes spans; no-ops without an endpoint.
    """

    def __init__(self, settings: TracingSettings) -> None:
        self._provider: Any = _exporting(settings) if settings.endpoint is not None else None
        provider = self._provider or trace.NoOpTracerProvider()
        self.tracer: Tracer = provider.get_tracer("askimage", VERSIONS["askimage"])

    async def close(self) -> None:
        """Send what is left, vLLM's spans too, if the collector takes them within two seconds."""
        if self._provider is not None:
            vllm: Any = trace.get_tracer_provider()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    for provider in (self._provider, vllm):
                        await in_daemon_thread(provider.force_flush)


def _exporting(settings: TracingSettings) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise SettingsError(f"ASKIMAGE_TRACING__ENDPOINT: pip install 'askimage[tracing]' ({error})") from error
    resource = Resource.create({"service.name": "askimage", "service.version": VERSIONS["askimage"]})
    provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint)))
    return provider


def start_request(tracer: Tracer, method: str, path: str, headers: Mapping[str, str]) -> Span:
    """The span of a whole request, within the trace that its client began, if it did (W3C `traceparent`)."""
    attributes = {"http.request.method": method, "url.path": path}
    return tracer.start_span(method, _w3c.extract(headers), SpanKind.SERVER, attributes)


def current_trace_id() -> str | None:
    """The trace of the request at hand, in hex; None where it is not sampled."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.trace_flags.sampled else None


class ChatSpan:
    """The model's part of a request: the "inference" span of the conventions for generative AI.

    Args:
        tracer: Makes the spans.
        request: What is asked.
        model: Name of the model.
    """

    def __init__(self, tracer: Tracer, request: GenerationRequest, model: str) -> None:
        asked: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "frequency_penalty": request.frequency_penalty,
            "seed": request.seed,
            "stop_sequences": request.stop or None,
        }
        attributes = {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}
        attributes |= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "askimage",
            "gen_ai.request.model": model,
            "gen_ai.output.type": "text" if request.json_schema is None else "json",
            "askimage.class": request.priority,
            "askimage.images": len(request.images),
        }
        self._tracer = tracer
        self._span = tracer.start_span(f"chat {model}", kind=SpanKind.INTERNAL, attributes=attributes)
        self._context = trace.set_span_in_context(self._span)
        self._model = model

    @property
    def headers(self) -> Mapping[str, str]:
        """The span's context for vLLM, which puts its own span inside."""
        carrier: dict[str, str] = {}
        _w3c.inject(carrier, self._context)
        return carrier

    def answered(self, result: Result, id: str) -> None:
        """Say what the model answered with, and where its time went."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(
            {
                "gen_ai.response.id": id,
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": [result.finish_reason],
                "gen_ai.usage.input_tokens": result.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": result.usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": result.usage.cached_tokens,
                "askimage.image_tokens": result.usage.image_tokens,
                "askimage.reasoning_tokens": result.usage.reasoning_tokens,
            }
        )
        for phase in result.phases:
            self._engine_spans(phase)

    def end(self, error: str | None = None) -> None:
        """End the span; `error` is the code of what went wrong."""
        if error is not None:
            mark_failed(self._span, error)
        self._span.end()

    def _engine_spans(self, phase: EnginePhase) -> None:
        # The engine reads the monotonic clock, which all processes of a machine share.
        epoch = time.time_ns() - time.monotonic_ns()
        times = phase.queued, phase.scheduled, phase.first_token, phase.last_token
        for name, began, ended in zip(("engine queue", "prefill", "decode"), times, times[1:], strict=False):
            span = self._tracer.start_span(name, self._context, start_time=epoch + int(began * 1e9))
            span.end(epoch + int(ended * 1e9))


def mark_failed(span: Span, code: str) -> None:
    """Say that what a span stands for ended with an error."""
    span.set_attribute("error.type", code)
    span.set_status(StatusCode.ERROR)
