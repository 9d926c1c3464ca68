"""`POST /v1/ask`: one question about one or several images."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.deps import PoolDep, ServiceDep, SettingsDep, StoreDep
from app.engine.adapter import Adapter
from app.engine.generation import Events
from app.engine.request import GenerationRequest, PreparedImage, Result, Turn
from app.engine.schema import check_json_schema
from app.engine.service import EngineService
from app.engine.thinking import Delta
from app.errors import (
    ApiError,
    BodyTooLarge,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    ImageTooLarge,
    InvalidField,
    MalformedRequest,
    NotFound,
    NotReady,
    PromptTooLong,
    UndecodableImage,
    UnsupportedImage,
    responses,
)
from app.images.pool import ImagePool
from app.images.store import ImageStore
from app.routers.ask_form import AskForm, AskReply
from app.routers.forms import multipart_body, read_form
from app.routers.streaming import EventStream, event, until_disconnect, with_pings

router = APIRouter(tags=["ask"])

ERRORS = responses(
    MalformedRequest,
    NotFound,
    BodyTooLarge,
    ImageTooLarge,
    PromptTooLong,
    UnsupportedImage,
    UndecodableImage,
    InvalidField,
    EngineError,
    NotReady,
    EngineDead,
    DeadlineExceeded,
)


@router.post("/v1/ask", response_model=AskReply, responses=ERRORS, openapi_extra=multipart_body(AskForm))
async def ask(request: Request, service: ServiceDep, pool: PoolDep, store: StoreDep, settings: SettingsDep) -> Response:
    """Ask a question about one or several images.

    With `stream=true` the reply is a stream of server-sent events: `accepted`, `reasoning` and `answer` deltas, then
    `done`, or `error`.
    """
    adapter = service.require_ready()
    async with read_form(request, AskForm) as form:
        files = await _files(form, store, settings.images.max_per_request)
    deadline = Deadline(request.state.arrived, form.deadline_ms)
    work = _accept(request, form, files, adapter, service, pool, deadline)
    generation, events = await until_disconnect(request, work)
    if form.stream:
        return EventStream(with_pings(_event_stream(generation, events, service, deadline)))
    return JSONResponse(await until_disconnect(request, _reply(generation, events, service, deadline)))


class Deadline:
    """The end of `deadline_ms`, which spans the whole request from its arrival."""

    def __init__(self, arrived: float, milliseconds: int | None) -> None:
        self._milliseconds = milliseconds
        self._end = None if milliseconds is None else arrived + milliseconds / 1e3

    async def within(self, events: Events) -> Events:
        """Pass events on until the end; closing this closes them.

        The deadline is set around each step and never across a `yield`, where it would cancel the reader.
        """
        async with aclosing(events):
            while True:
                try:
                    async with self.enforced():
                        each = await anext(events)
                except StopAsyncIteration:
                    return
                yield each

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Raises DeadlineExceeded at the end, and cancels what runs inside."""
        try:
            async with asyncio.timeout(None if self._end is None else self._end - time.monotonic()):
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"the answer was not complete within deadline_ms={self._milliseconds}",
                field="deadline_ms",
                limit=self._milliseconds,
            ) from None


async def _files(form: AskForm, store: ImageStore, most: int) -> list[bytes]:
    """The bytes of all images: uploads first, then stored ones, each in the order they were sent."""
    count = len(form.image) + len(form.image_id)
    if count == 0:
        raise InvalidField("image: send at least one image file (field image) or image_id", field="image")
    if count > most:
        raise ImageTooLarge(
            f"{count} images were sent; at most {most} are taken in a request", field="image", limit=most
        )
    return [await upload.read() for upload in form.image] + [store.get(each).data for each in form.image_id]


async def _accept(
    request: Request,
    form: AskForm,
    files: list[bytes],
    adapter: Adapter,
    service: EngineService,
    pool: ImagePool,
    deadline: Deadline,
) -> tuple[GenerationRequest, Events]:
    """Prepare the images and hand the question to the engine."""
    async with deadline.enforced():
        if form.json_schema is not None:
            await asyncio.to_thread(check_json_schema, form.json_schema)
        began = time.monotonic()
        images = await asyncio.gather(*(_prepare(pool, adapter, files, index) for index in range(len(files))))
        spent = time.monotonic() - began
        service.telemetry.preprocess.observe(spent)
        generation = GenerationRequest(
            id=request.state.request_id,
            turns=_turns(form, len(images)),
            images=tuple(images),
            priority=request.state.priority,
            arrived=request.state.arrived,
            preprocess_seconds=spent,
            **form.sampling(),
        )
        return generation, await service.generate(generation)


async def _prepare(pool: ImagePool, adapter: Adapter, files: list[bytes], index: int) -> PreparedImage:
    try:
        return await pool.prepare(files[index], adapter)
    except ApiError as error:
        if len(files) > 1:
            error.detail = f"image {index + 1} of {len(files)}: {error.detail}"
        raise


def _turns(form: AskForm, images: int) -> tuple[Turn, ...]:
    """System, history, question. The images stand before the first thing the user said, where later questions about
    them find the cache filled."""
    turns = [Turn("system", form.system)] if form.system else []
    turns += [Turn(each.role, each.content) for each in form.history]
    turns.append(Turn("user", form.question))
    first = next(index for index, turn in enumerate(turns) if turn.role == "user")
    turns[first] = Turn("user", turns[first].text, images)
    return tuple(turns)


async def _reply(
    request: GenerationRequest,
    events: Events,
    service: EngineService,
    deadline: Deadline,
) -> dict[str, Any]:
    async with aclosing(deadline.within(events)) as timed:
        async for each in timed:
            if isinstance(each, Result):
                return _document(request, each, service, answer=each.answer, reasoning=each.reasoning)
    raise AssertionError("a generation ends with its result")


async def _event_stream(
    request: GenerationRequest,
    events: Events,
    service: EngineService,
    deadline: Deadline,
) -> AsyncGenerator[bytes, None]:
    accepted = {"id": request.id, "model": service.settings.model.served_name, "class": request.priority}
    yield event("accepted", _json(accepted))
    try:
        async with aclosing(deadline.within(events)) as timed:
            async for each in timed:
                if isinstance(each, Delta):
                    yield event(each.channel.value, _json({"text": each.text}))
                else:
                    yield event("done", _json(_document(request, each, service)))
    except ApiError as error:
        yield event("error", _json(error.problem(request.id)))


def _document(
    request: GenerationRequest, result: Result, service: EngineService, **texts: str | None
) -> dict[str, Any]:
    """The reply; in a stream its texts have gone before."""
    return {
        "id": request.id,
        "model": service.settings.model.served_name,
        **texts,
        "finish_reason": result.finish_reason,
        "usage": asdict(result.usage),
        "timings": asdict(result.timings),
        "images": [
            {
                "id": image.id,
                "width": image.width,
                "height": image.height,
                "format": image.format,
                "frames": image.frames,
                "resized_to": image.resized_to,
                "tokens": tokens,
            }
            for image, tokens in zip(request.images, result.image_tokens, strict=True)
        ],
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
