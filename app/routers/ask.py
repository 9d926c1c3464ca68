"""`POST /v1/ask`: one question about one or several images."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.answering import Answer
from app.deps import AnsweringDep, SettingsDep, StoreDep
from app.engine.inflight import InFlight
from app.engine.request import GenerationRequest, Result, Turn
from app.engine.thinking import Delta
from app.errors import (
    ApiError,
    BodyTooLarge,
    ClassForbidden,
    DeadlineExceeded,
    Draining,
    EngineDead,
    EngineError,
    Evicted,
    ImageTooLarge,
    InvalidField,
    MalformedRequest,
    NotFound,
    NotReady,
    Overloaded,
    PromptTooLong,
    QueueFull,
    QueueTimeout,
    RateLimited,
    RequestTimeout,
    Unauthorized,
    UndecodableImage,
    UnsupportedImage,
    responses,
)
from app.images.store import ImageStore
from app.routers.ask_form import AskForm, AskReply
from app.routers.forms import multipart_body, read_form
from app.routers.streaming import PING_SECONDS, EventStream, Opened, event, until_disconnect, with_pings

router = APIRouter(tags=["ask"])

ERRORS = responses(
    MalformedRequest,
    Unauthorized,
    ClassForbidden,
    NotFound,
    RequestTimeout,
    BodyTooLarge,
    ImageTooLarge,
    PromptTooLong,
    UnsupportedImage,
    UndecodableImage,
    InvalidField,
    RateLimited,
    EngineError,
    NotReady,
    Draining,
    Overloaded,
    QueueFull,
    Evicted,
    QueueTimeout,
    EngineDead,
    DeadlineExceeded,
)


@router.post("/v1/ask", response_model=AskReply, responses=ERRORS, openapi_extra=multipart_body(AskForm))
async def ask(request: Request, answering: AnsweringDep, store: StoreDep, settings: SettingsDep) -> Response:
    """Ask a question about one or several images.

    With `stream=true` the reply is a stream of server-sent events: `accepted`, `reasoning` and `answer` deltas, then
    `done`, or `error`. It begins when the engine has the question, so that what is wrong before is a status of its own,
    or after 15 s: from then on a comment goes out every 15 s without an event, and what is wrong is an `error` event.
    """
    with request.state.tracer.start_as_current_span("body"):
        async with read_form(request, AskForm) as form:
            files = await _files(form, store, settings.images.max_per_request)
    generation = GenerationRequest(
        id=request.state.request_id,
        turns=_turns(form, len(files)),
        images=(),
        priority=request.state.priority,
        arrived=request.state.arrived,
        **form.sampling(),
    )
    if settings.log.questions:
        request.state.log["question"] = form.question
    inflight = InFlight(request.state.arrived, form.deadline_ms)
    answer = answering.answer(generation, files, request.state.client, inflight, request.state.log)
    model = settings.model.served_name
    if not form.stream:
        return JSONResponse(await until_disconnect(request, _reply(answer, model)))
    opened = Opened(answer)
    try:
        await until_disconnect(request, opened.arrived(PING_SECONDS))
    except BaseException:
        await opened.aclose()
        raise
    return EventStream(with_pings(_event_stream(opened, generation, model)), opened)


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


def _turns(form: AskForm, images: int) -> tuple[Turn, ...]:
    """System, history, question. The images stand before the first thing the user said, where later questions about
    them find the cache filled."""
    turns = [Turn("system", form.system)] if form.system else []
    turns += [Turn(each.role, each.content) for each in form.history]
    turns.append(Turn("user", form.question))
    first = next(index for index, turn in enumerate(turns) if turn.role == "user")
    turns[first] = Turn("user", turns[first].text, images)
    return tuple(turns)


async def _reply(answer: Answer, model: str) -> dict[str, Any]:
    async with aclosing(answer):
        async for each in answer:
            if isinstance(each, GenerationRequest):
                request = each
            elif isinstance(each, Result):
                return _document(request, each, model, answer=each.answer, reasoning=each.reasoning)
    raise AssertionError("a generation ends with its result")


async def _event_stream(answer: Opened[Any], request: GenerationRequest, model: str) -> AsyncGenerator[bytes, None]:
    yield event("accepted", _json({"id": request.id, "model": model, "class": request.priority}))
    try:
        async for each in answer:
            if isinstance(each, Delta):
                yield event(each.channel.value, _json({"text": each.text}))
            elif isinstance(each, GenerationRequest):
                request = each
            else:
                yield event("done", _json(_document(request, each, model)))
    except ApiError as error:
        yield event("error", _json(error.problem(request.id)))


def _document(request: GenerationRequest, result: Result, model: str, **texts: str | None) -> dict[str, Any]:
    """The reply; in a stream its texts have gone before."""
    return {
        "id": request.id,
        "model": model,
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
