"""Multipart forms as pydantic models, with one clear error for anything that is not as it should be."""

import difflib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, get_args, get_origin

from fastapi import Request, UploadFile
from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from app.errors import ApiError, BodyTooLarge, InvalidField, MalformedRequest, first_validation_error
from app.routers.streaming import ClientGone

Form = TypeVar("Form", bound=BaseModel)

MAX_FILES = 128  # far above any limit on images, which the form's own check then names
MAX_FIELDS = 128
MAX_FIELD_BYTES = 1 << 20


class _Parser(MultiPartParser):
    """Starlette's parser, which does not mind a form that breaks off; this one knows whether the end has come."""

    complete = False

    def on_end(self) -> None:
        self.complete = True


@asynccontextmanager
async def read_form(request: Request, model: type[Form]) -> AsyncIterator[Form]:
    """Read and validate a multipart form; its files are closed at the end.

    Raises:
        MalformedRequest: Not a multipart form, or one that breaks off.
        BodyTooLarge: A text field is larger than the service reads.
        InvalidField: A field is missing, unknown (the nearest name is given) or invalid.
        ClientGone: The client left while it was sending.
    """
    form = await _parse(request)
    try:
        yield _validated(form, model)
    finally:
        await form.close()


async def _parse(request: Request) -> FormData:
    media_type, options = parse_options_header(request.headers.get("content-type", ""))
    if media_type != b"multipart/form-data":
        raise MalformedRequest("send the fields as multipart/form-data (curl: -F question=… -F image=@file)")
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
        raise MalformedRequest("send the form in UTF-8, or leave the charset out of its Content-Type")
    parser = _Parser(
        request.headers,
        request.stream(),
        max_files=MAX_FILES,
        max_fields=MAX_FIELDS,
        max_part_size=MAX_FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except BaseException as error:
        # Starlette closes what it spooled to disk for its own errors alone.
        for file in parser._files_to_close_on_error:
            file.close()
        if isinstance(error, ClientDisconnect):
            raise ClientGone from None
        if isinstance(error, MultiPartException):
            raise _refusal(error) from error
        raise
    if not parser.complete:
        await form.close()
        raise MalformedRequest("the form breaks off before its closing boundary")
    return form


def _refusal(error: MultiPartException) -> ApiError:
    if error.message.startswith("Part exceeded"):
        return BodyTooLarge(f"a text field is larger than {MAX_FIELD_BYTES} bytes", limit=MAX_FIELD_BYTES)
    return MalformedRequest(f"the form cannot be parsed: {error.message}")


def _validated(form: FormData, model: type[Form]) -> Form:
    values: dict[str, Any] = {}
    for name in form:
        field = model.model_fields.get(name)
        if field is None:
            near = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0)[0]
            raise InvalidField(f"unknown field {name!r}; the nearest valid one is {near!r}", field=name)
        sent = form.getlist(name)
        is_list = get_origin(field.annotation) is list
        if len(sent) > 1 and not is_list:
            raise InvalidField(f"{name} was sent {len(sent)} times; send it once", field=name)
        is_file = UploadFile in (field.annotation, *get_args(field.annotation))
        for value in sent:
            _check_kind(name, value, is_file)
        values[name] = sent if is_list else sent[0]
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise first_validation_error(error.errors()) from None


def _check_kind(name: str, value: object, is_file: bool) -> None:
    # Starlette's UploadFile is the base class of FastAPI's.
    sent_file = not isinstance(value, str)
    if is_file and not sent_file:
        raise InvalidField(f"{name} must be a file (curl: -F {name}=@file)", field=name)
    if sent_file and not is_file:
        raise InvalidField(f"{name} must be text, not a file", field=name)


def multipart_body(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI `requestBody` of a form."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
