"""`askimage check`: are this machine and this checkpoint all right?"""

import asyncio
import importlib.metadata
import io
import os
import platform
import sys
from collections.abc import Callable
from typing import Annotated

import psutil
import typer
from PIL import Image
from rich.console import Console

from app.engine.arguments import GiB, device_type, engine_arguments
from app.engine.gpu import Gpus
from app.engine.kimi_vl.plugin import ARCHITECTURE
from app.engine.preflight import check_architecture, check_memory, inspect_checkpoint
from app.engine.service import EngineService, EngineState
from app.engine.telemetry import Telemetry
from app.images.intake import decode
from app.settings import Settings, SettingsError, load_settings

console = Console(highlight=False, soft_wrap=True)

TEST_IMAGE_SIZE = (448, 448)


def check(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder or model name; default: ASKIMAGE_MODEL__PATH.")
    ] = None,
    engine: Annotated[bool, typer.Option("--engine", help="Also start the engine and ask it about a picture.")] = False,
) -> None:
    """Check settings, machine, checkpoint, tokenizer and a test image; with `--engine`, the engine too.

    Exits with 1 at the first thing that would keep the service from starting.
    """
    if model is not None:
        os.environ["ASKIMAGE_MODEL__PATH"] = model
    # Imports vLLM, which takes seconds; `askimage --help` must not.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        settings = load_settings()
    except SettingsError as error:
        _failed("settings", str(error))
    _step("settings", lambda: "read")
    _step("python", platform.python_version)
    _step("torch", lambda: importlib.metadata.version("torch"))
    _step("vllm", _vllm)
    _step("device", _device)
    _step("memory", _memory)
    _step("checkpoint", lambda: _checkpoint(settings))
    _step("fits in memory", lambda: _fits(settings))
    _step("tokenizer", lambda: _tokenizer(settings))
    _step("test image", lambda: _test_image(settings))
    if engine:
        _step("engine", lambda: asyncio.run(_ask_engine(settings)))


def _step(name: str, work: Callable[[], str]) -> None:
    try:
        result = work()
    except Exception as error:
        _failed(name, " ".join(str(error).split()) or type(error).__name__)
    console.print(f"[green]ok[/]      {name}: ", end="")
    console.print(result, markup=False)


def _failed(name: str, reason: str) -> None:
    console.print(f"[red]failed[/]  {name}: ", end="")
    console.print(reason, markup=False)
    sys.exit(1)


def _vllm() -> str:
    import vllm

    return str(vllm.__version__)


def _device() -> str:
    names = [reading.name for reading in Gpus().readings()]
    return f"{device_type()}{' (' + ', '.join(names) + ')' if names else ''}"


def _memory() -> str:
    memory = psutil.virtual_memory()
    parts = [f"{memory.available / GiB:.1f} of {memory.total / GiB:.1f} GiB available"]
    parts += [
        f"GPU {reading.index}: {(reading.memory_total_bytes - reading.memory_used_bytes) / GiB:.1f} of "
        f"{reading.memory_total_bytes / GiB:.1f} GiB free"
        for reading in Gpus().readings()
    ]
    return "; ".join(parts)


def _checkpoint(settings: Settings) -> str:
    checkpoint = inspect_checkpoint(settings.model.path)
    if checkpoint is None:
        return f"{settings.model.path} is a name for vLLM to resolve"
    check_architecture(checkpoint)
    return f"{checkpoint.architectures[0]}, {checkpoint.weight_bytes / 1e6:.1f} MB of weights, {checkpoint.path}"


def _fits(settings: Settings) -> str:
    device = device_type()
    arguments = engine_arguments(settings, device)
    if (checkpoint := inspect_checkpoint(settings.model.path)) is not None:
        check_memory(checkpoint, arguments, device, Gpus().readings())
    return "yes"


def _is_kimi_vl(settings: Settings) -> bool:
    checkpoint = inspect_checkpoint(settings.model.path)
    return checkpoint is not None and checkpoint.architectures[0] == ARCHITECTURE


def _tokenizer(settings: Settings) -> str:
    if not _is_kimi_vl(settings):
        return "left to vLLM for this model"
    from app.engine.kimi_vl.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(settings.model.path)
    text = "What does the sign say? 看图 🙂"
    if tokenizer.decode(tokenizer.encode_ordinary(text)) != text:
        raise ValueError("a text does not survive encoding and decoding; is tiktoken.model damaged?")
    return f"{len(tokenizer)} tokens"


def _test_image(settings: Settings) -> str:
    file = io.BytesIO()
    Image.new("RGB", TEST_IMAGE_SIZE, "white").save(file, "PNG")
    image = decode(file.getvalue(), max_pixels=settings.images.max_pixels)
    if not _is_kimi_vl(settings):
        return f"decoded, {image.pixels.width}×{image.pixels.height}"
    import torch

    from app.engine.kimi_vl.adapter import KimiVLAdapter

    prepared = KimiVLAdapter(settings.model.path, torch.bfloat16, settings.images.max_tokens).prepare(image)
    return f"{image.pixels.width}×{image.pixels.height} becomes {prepared.payload[0].tokens} tokens"


async def _ask_engine(settings: Settings) -> str:
    service = EngineService(settings, Telemetry(Gpus()), on_end=lambda code, line: None)
    service.start()
    try:
        if await service.settled() is not EngineState.READY:
            raise RuntimeError(service.reason)
        return f"started and answered a test image; context {service.max_model_len} tokens"
    finally:
        await service.stop()
