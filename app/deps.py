"""What routers ask for: the objects that the lifespan made, by type."""

from typing import Annotated

from fastapi import Depends, Request

from app.answering import Answering
from app.engine.service import EngineService
from app.images.pool import ImagePool
from app.images.store import ImageStore
from app.settings import Settings


def _service(request: Request) -> EngineService:
    service: EngineService = request.state.service
    return service


def _answering(request: Request) -> Answering:
    answering: Answering = request.state.answering
    return answering


def _pool(request: Request) -> ImagePool:
    pool: ImagePool = request.state.pool
    return pool


def _store(request: Request) -> ImageStore:
    store: ImageStore = request.state.store
    return store


def _settings(request: Request) -> Settings:
    settings: Settings = request.state.settings
    return settings


ServiceDep = Annotated[EngineService, Depends(_service)]
AnsweringDep = Annotated[Answering, Depends(_answering)]
PoolDep = Annotated[ImagePool, Depends(_pool)]
StoreDep = Annotated[ImageStore, Depends(_store)]
SettingsDep = Annotated[Settings, Depends(_settings)]
