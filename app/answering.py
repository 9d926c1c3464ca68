"""A question's way through the service: a slot of the engine, its images made ready, its answer.

Images are decoded when the slot is theirs, not before: those who wait hold their files and not their patches, which are
a hundred times larger, and a flood of one class cannot fill the decoding threads.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, get_args

from opentelemetry.trace import Tracer

from app.engine.adapter import Adapter
from app.engine.inflight import InFlight, Phase
from app.engine.request import FinishReason, GenerationRequest, PreparedImage, Result
from app.engine.schema import check_json_schema
from app.engine.service import EngineService
from app.engine.thinking import Delta
from app.errors import ApiError
from app.identity import Client
from app.images.pool import ImagePool
from app.rate_limits import RateLimiter
from app.tracing import ChatSpan

Answer = AsyncGenerator[GenerationRequest | Delta | Result, None]
"""The request as the engine got it, then the deltas as they come, then the result."""


class Answering:
    """Answers questions.

    Args:
        service: Admission and engine.
        pool: Makes images ready.
        limiter: Counts the image tokens of each client.
        tracer: Makes a span of each step.
    """

    def __init__(self, service: EngineService, pool: ImagePool, limiter: RateLimiter, tracer: Tracer) -> None:
        self._service = service
        self._pool = pool
        self._limiter = limiter
        self._tracer = tracer

    async def answer(
        self,
        request: GenerationRequest,
        files: Sequence[bytes],
        client: Client,
        inflight: InFlight,
        log: dict[str, Any],
    ) -> Answer:
        """Answer a question; closing the iterator at any point gives the slot back and aborts the engine's work.

        Args:
            request: The question, without its images.
            files: Image files of all turns, in order.
            client: Who asks.
            inflight: Its deadline.
            log: Where the request's log line is gathered.

        Raises:
            ApiError: The question cannot be answered, or not now.
        """
        telemetry = self._service.telemetry
        outcome = "cancelled"
        chat: ChatSpan | None = None
        try:
            async with AsyncExitStack() as stack:
                adapter = stack.enter_context(self._service.tracked(inflight))
                async with inflight.enforced():
                    if request.json_schema is not None:
                        await asyncio.to_thread(check_json_schema, request.json_schema)
                    admission = self._service.admission.slot(request.priority, inflight.deadline)
                    with self._tracer.start_as_current_span("admission"):
                        ticket = await stack.enter_async_context(admission)
                    telemetry.queue_time.labels("admission", request.priority).observe(ticket.waited)
                    request = dataclasses.replace(request, admission_seconds=ticket.waited)
                    with self._tracer.start_as_current_span("preprocess"):
                        request = await self._with_images(request, files, adapter, inflight)
                    chat = ChatSpan(self._tracer, request, self._service.settings.model.served_name)
                    request = dataclasses.replace(request, trace_headers=chat.headers)
                    inflight.phase = Phase.PREFILL
                    generation = await self._service.prepare(request)
                    await self._limiter.charge_image_tokens(client, generation.image_tokens)
                yield request
                events = await stack.enter_async_context(aclosing(inflight.within(generation.run())))
                async for event in events:
                    inflight.phase = Phase.DECODE
                    if isinstance(event, Result):
                        outcome = event.finish_reason
                        telemetry.observe(request, event)
                        chat.answered(event, request.id)
                        log.update(_figures(event))
                    yield event
        except ApiError as error:
            outcome = error.code
            raise
        finally:
            if chat is not None:
                chat.end(None if outcome in get_args(FinishReason) else outcome)
            log["outcome"] = outcome
            if outcome == "cancelled":
                telemetry.cancellations.labels(inflight.phase).inc()
                log["phase"] = str(inflight.phase)

    async def _with_images(
        self, request: GenerationRequest, files: Sequence[bytes], adapter: Adapter, inflight: InFlight
    ) -> GenerationRequest:
        inflight.phase = Phase.PREPROCESS
        began = time.monotonic()

        async def prepare(index: int) -> PreparedImage:
            try:
                return await self._pool.prepare(files[index], adapter, request.priority)
            except ApiError as error:
                if len(files) > 1:
                    error.detail = f"image {index + 1} of {len(files)}: {error.detail}"
                raise

        images = await asyncio.gather(*map(prepare, range(len(files))))
        spent = time.monotonic() - began
        self._service.telemetry.preprocess.labels(request.priority).observe(spent)
        return dataclasses.replace(request, images=tuple(images), preprocess_seconds=spent)


def _figures(result: Result) -> dict[str, Any]:
    """What the log line says of an answer: no texts."""
    return (
        {"finish_reason": result.finish_reason} | dataclasses.asdict(result.timings) | dataclasses.asdict(result.usage)
    )
