"""Can this checkpoint be loaded on this machine? Asked before the engine starts, to answer in one clear line.

vLLM reports the same troubles from a child process, a minute later, as the end of a long traceback.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from app.engine.arguments import GiB
from app.engine.gpu import GpuReading

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class ModelUnusable(Exception):
    """The model cannot be loaded; the message is one line that says why and what to change."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint folder says of itself.

    Attributes:
        path: The folder.
        architectures: As in config.json.
        model_type: As in config.json.
        weight_bytes: Size of the weight files.
    """

    path: Path
    architectures: tuple[str, ...]
    model_type: str
    weight_bytes: int


def inspect_checkpoint(model: str) -> Checkpoint | None:
    """Read a checkpoint folder; None when `model` is a name for vLLM to resolve rather than a path.

    Raises:
        ModelUnusable: No such folder, no config.json, or one that names no architecture.
    """
    path = Path(model)
    if not path.is_dir():
        if path.is_absolute() or model.startswith(".") or model.count("/") != 1:
            raise ModelUnusable(f"model folder {model} does not exist (set ASKIMAGE_MODEL__PATH)")
        return None
    config_file = path / "config.json"
    try:
        config = json.loads(config_file.read_text())
    except FileNotFoundError:
        raise ModelUnusable(f"model folder {model} has no config.json; is it a checkpoint folder?") from None
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{config_file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelUnusable(f"{config_file} is not a JSON object")
    architectures = tuple(config.get("architectures") or ())
    if not architectures:
        raise ModelUnusable(f"{config_file} names no architecture")
    weights = sum(file.stat().st_size for pattern in _WEIGHT_FILES for file in path.glob(pattern))
    for file in path.glob("*.safetensors"):
        _check_safetensors(file)
    return Checkpoint(path, architectures, str(config.get("model_type", "")), weights)


def _check_safetensors(file: Path) -> None:
    """Header and size agree (format: 8 bytes of header length, the header as JSON, the tensors' bytes)."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length)) if length < file.stat().st_size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends)
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelUnusable(f"{file} is not a safetensors file; copy it again") from None
    if file.stat().st_size != expected:
        raise ModelUnusable(f"{file} has {file.stat().st_size} bytes where its header says {expected}; copy it again")


def check_architecture(checkpoint: Checkpoint) -> None:
    """Is it a vision model that vLLM knows?

    Raises:
        ModelUnusable: vLLM has no such model, or it takes no images.
    """
    from vllm import ModelRegistry

    supported = ModelRegistry.get_supported_archs()
    name = checkpoint.architectures[0]
    if name not in supported:
        raise ModelUnusable(f"model architecture {name} is not one that vLLM 0.32 supports")


def check_memory(checkpoint: Checkpoint, arguments: dict[str, Any], device: str, gpus: Sequence[GpuReading]) -> None:
    """Do weights and KV cache fit?

    Raises:
        ModelUnusable: With what is needed and what there is.
    """
    weights = 0 if arguments["load_format"] == "dummy" else checkpoint.weight_bytes
    share = arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]
    needed = weights // share + (arguments.get("kv_cache_memory_bytes") or 0)
    if device == "cuda":
        needed -= int(arguments["cpu_offload_gb"] * GiB)
        # Any device will do that the process may use; the fullest one decides.
        available = min((gpu.memory_total_bytes - gpu.memory_used_bytes for gpu in gpus), default=needed)
        available = int(available * (arguments.get("gpu_memory_utilization") or 0.92))
        where = "free on the GPU (gpu_memory_utilization counted in)"
    else:
        available, where = psutil.virtual_memory().available, "available in main memory"
    if needed > available:
        raise ModelUnusable(
            f"not enough memory for {checkpoint.path}: weights {weights / share / GiB:.1f} GiB per device and KV cache "
            f"need {needed / GiB:.1f} GiB, {available / GiB:.1f} GiB are {where}"
        )
