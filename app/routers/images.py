"""`/v1/images`: upload once, ask many times."""

from typing import Annotated

from fastapi import APIRouter, Request, Response, UploadFile
from pydantic import BaseModel, ConfigDict, Field

from app.deps import PoolDep, ServiceDep, SettingsDep, StoreDep
from app.errors import (
    BodyTooLarge,
    EngineDead,
    ImageTooLarge,
    InvalidField,
    MalformedRequest,
    NotFound,
    NotReady,
    Overloaded,
    RateLimited,
    RequestTimeout,
    Unauthorized,
    UndecodableImage,
    UnsupportedImage,
    responses,
)
from app.images.store import StoredImage
from app.routers.forms import multipart_body, read_form
from app.routers.streaming import until_disconnect

router = APIRouter(prefix="/v1/images", tags=["images"])

UPLOAD_ERRORS = responses(
    MalformedRequest,
    Unauthorized,
    RequestTimeout,
    BodyTooLarge,
    ImageTooLarge,
    UnsupportedImage,
    UndecodableImage,
    InvalidField,
    RateLimited,
    NotReady,
    Overloaded,
    EngineDead,
)


class UploadForm(BaseModel):
    """The multipart field."""

    model_config = ConfigDict(extra="forbid")

    image: Annotated[UploadFile, Field(description="An image file.")]


class StoredImageInfo(BaseModel):
    """An uploaded image."""

    id: str = Field(description="SHA-256 of the file's bytes; send it as `image_id`.")
    width: int
    height: int
    format: str
    bytes: int


def _info(image_id: str, image: StoredImage) -> StoredImageInfo:
    return StoredImageInfo(
        id=image_id, width=image.width, height=image.height, format=image.format, bytes=len(image.data)
    )


@router.post("", status_code=201, responses=UPLOAD_ERRORS, openapi_extra=multipart_body(UploadForm))
async def upload(
    request: Request, service: ServiceDep, pool: PoolDep, store: StoreDep, settings: SettingsDep
) -> StoredImageInfo:
    """Upload an image for later questions; the same bytes give the same id."""
    adapter = service.require_ready()
    async with read_form(request, UploadForm) as form:
        data = await form.image.read()
    prepared = await until_disconnect(request, pool.prepare(data, adapter, request.state.priority))
    image = StoredImage(data, prepared.width, prepared.height, prepared.format)
    store.put(prepared.id, image)
    return _info(prepared.id, image)


@router.get("/{image_id}", responses=responses(NotFound))
async def describe(image_id: str, store: StoreDep) -> StoredImageInfo:
    """What is known of an uploaded image."""
    return _info(image_id, store.get(image_id))


@router.delete("/{image_id}", status_code=204, responses=responses(NotFound))
async def delete(image_id: str, store: StoreDep) -> Response:
    """Forget an uploaded image."""
    store.delete(image_id)
    return Response(status_code=204)
