"""What routers ask for: the objects that the lifespan made, by type.

Coroutines, because FastAPI runs plain functions in threads, a hop there and back for each.
"""

from typing import Annotated

from fastapi import Depends, Request

from app.answering import Answering
from app.engine.service import EngineService
from app.images.pool import ImagePool
from app.images.store import ImageStore
from app.settings import Settings


async def _service(request: Request) -> EngineService:
    service: EngineService = request.state.service
    return service


async def _answering(request: Request) -> Answering:
    answering: Answering = request.state.answering
    return answering


async def _pool(request: Request) -> ImagePool:
    pool: ImagePool = request.state.pool
    return pool


async def _store(request: Request) -> ImageStore:
    store: ImageStore = request.state.store
    return store


async def _settings(request: Request) -> Settings:
    settings: Settings = request.state.settings
    return settings


ServiceDep = Annotated[EngineService, Depends(_service)]
AnsweringDep = Annotated[Answering, Depends(_answering)]
PoolDep = Annotated[ImagePool, Depends(_pool)]
StoreDep = Annotated[ImageStore, Depends(_store)]
SettingsDep = Annotated[Settings, Depends(_settings)]
