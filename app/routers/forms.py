"""Multipart forms as pydantic models, with one clear error for anything that is not as it should be."""

import difflib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, get_args, get_origin

from fastapi import Request, UploadFile
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException

from app.errors import InvalidField, MalformedRequest, first_validation_error

Form = TypeVar("Form", bound=BaseModel)

MAX_FIELDS = 64
MAX_FIELD_BYTES = 1 << 20


@asynccontextmanager
async def read_form(request: Request, model: type[Form], max_files: int) -> AsyncIterator[Form]:
    """Read and validate a multipart form; its files are closed at the end.

    Raises:
        MalformedRequest: Not a multipart form, or one that breaks off.
        InvalidField: A field is missing, unknown (the nearest name is given) or invalid.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.startswith(("multipart/form-data", "application/x-www-form-urlencoded")):
        raise MalformedRequest("send the fields as multipart/form-data (curl: -F question=… -F image=@file)")
    try:
        # One file more than allowed, so that the form's own check can name the limit.
        form = await request.form(max_files=max_files + 1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    except HTTPException as error:
        raise MalformedRequest(f"the form cannot be parsed: {error.detail}") from error
    try:
        yield _validated(form, model)
    finally:
        await form.close()


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
