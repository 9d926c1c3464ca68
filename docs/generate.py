"""Write `.env.example`, `docs/configuration.md` and `docs/metrics.md` from the code itself: `make docs`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from app.engine.admission import AdmissionController
from app.engine.gpu import GpuReading, Gpus
from app.engine.telemetry import Telemetry
from app.images.pool import ImagePool
from app.images.telemetry import ImageTelemetry
from app.rate_limits import RateLimiter
from app.routers.health import Health
from app.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent


def sections() -> list[tuple[str, str, dict[str, Any]]]:
    """(environment prefix, what it is about, fields) of each section."""
    return [
        (f"{PREFIX}{name.upper()}__", (field.annotation.__doc__ or "").strip(), field.annotation.model_fields)
        for name, field in Settings.model_fields.items()
    ]


def default(name: str, field: Any) -> str:
    """The default as one would write it; empty when it depends on the machine or the checkpoint."""
    if name == "path":
        return ""  # the demo model, wherever the package lies
    if field.default is PydanticUndefined or field.default is None:
        return ""
    return field.default if isinstance(field.default, str) else json.dumps(field.default)


def env_example() -> str:
    lines = ["# Every setting with its default. Copy to .env and change what you need; `make run` reads it."]
    for prefix, about, fields in sections():
        lines += ["", f"# --- {about}"]
        for name, field in fields.items():
            lines += [f"# {field.description}", f"#{prefix}{name.upper()}={default(name, field)}"]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        "Environment variables, or lines of a `.env` file in the working directory, which holds nothing else. Lists",
        "and objects are JSON. An unknown name is an error that names the nearest valid one. `make docs` writes this.",
    ]
    for prefix, about, fields in sections():
        lines += ["", f"## {about}", "", "| variable | default | meaning |", "|---|---|---|"]
        for name, field in fields.items():
            value = default(name, field)
            lines.append(f"| `{prefix}{name.upper()}` | {f'`{value}`' if value else ''} | {field.description} |")
    return "\n".join(lines) + "\n"


class _TalkativeGpu(Gpus):
    """One that tells everything a GPU can tell."""

    def readings(self) -> list[GpuReading]:
        return [GpuReading(0, "", *(0 for _ in range(7)))]


def every_series() -> CollectorRegistry:
    """The series of a service that is up, on a machine with a GPU."""
    settings, registry = Settings(), CollectorRegistry()
    telemetry = Telemetry(_TalkativeGpu(), registry)
    telemetry.admission = AdmissionController(settings.admission)
    telemetry.pool = ImagePool(settings.images, ImageTelemetry(registry))
    telemetry.kv_cache_tokens = telemetry.kv_cache_bytes = 0
    RateLimiter(settings.limits, registry)
    return registry


def series() -> Iterator[tuple[str, str, list[str], str]]:
    """(name, type, labels, help) of each."""
    for collector in list(every_series()._collector_to_names):
        for family in collector.collect():
            labels = (
                collector._labelnames if isinstance(collector, MetricWrapperBase) else list(family.samples[0].labels)
            )
            suffix = "_total" if family.type == "counter" else ""
            yield family.name + suffix, family.type, list(labels), family.documentation


def health_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, meaning) of each field, those of inner objects after their own."""
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), None)
        many = "[]" if inner is not None and get_origin(field.annotation) is list else ""
        about = [(inner.__doc__ or "").strip()] if inner is not None else []
        yield f"{prefix}{name}{many}", " ".join([*about, field.description or ""]).strip()
        if inner is not None:
            yield from health_fields(inner, f"{prefix}{name}{many}.")


def metrics() -> str:
    lines = [
        "# Metrics and /health",
        "",
        "What `/metrics` and `/health` say, series by series and field by field. [Observability](observability.md) has",
        "the rest. `make docs` writes this from the code.",
        "",
        "## /metrics",
        "",
        "Units are seconds, bytes, tokens and ratios from 0 to 1; histograms have `_bucket`, `_sum` and `_count`. What",
        "this machine or this GPU does not tell has no series rather than a zero.",
        "",
        "| series | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for name, kind, labels, text in series():
        lines.append(f"| `{name}` | {kind} | {', '.join(f'`{each}`' for each in labels)} | {text} |")
    lines += ["", "## /health", "", "| field | meaning |", "|---|---|"]
    lines += [f"| `{path}` | {text} |" for path, text in health_fields(Health)]
    return "\n".join(lines) + "\n"


FILES = {
    ROOT / ".env.example": env_example,
    ROOT / "docs" / "configuration.md": configuration,
    ROOT / "docs" / "metrics.md": metrics,
}

if __name__ == "__main__":
    for path, write in FILES.items():
        path.write_text(write())
