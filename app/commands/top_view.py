"""How `askimage top` looks: one screen of 80 columns by 24 rows."""

from collections.abc import Iterable
from datetime import timedelta

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.commands.top_snapshot import Quantiles, Snapshot
from app.engine.arguments import GiB
from app.engine.gpu import GpuReading

NOTHING = "–"
PHASE_NAMES = {
    "admission": "wait for a slot",
    "preprocess": "preprocess",
    "engine_queue": "engine queue",
    "prefill": "prefill",
    "decode": "decode",
    "first_token": "to first token",
    "request": "in all",
}
_STYLES = {"ready": "bold green", "loading": "bold yellow", "draining": "bold yellow"}


def screen(now: Snapshot, trouble: str = "") -> RenderableType:
    """All of it; `trouble` says why the figures are old."""
    parts: list[RenderableType] = [_head(now)]
    if trouble:
        parts.append(Text(trouble, style="bold red"))
    return Group(*parts, _classes(now), *_engine(now), *map(_gpu, now.gpus))


def _head(now: Snapshot) -> Text:
    up = timedelta(seconds=int(now.uptime_seconds))
    head = Text.assemble((now.state, _STYLES.get(now.state, "bold red")), f"  {now.model or NOTHING}", overflow="fold")
    head.append(f" on {now.device or NOTHING}, up {up}", style="dim")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(now.versions.items()))
    return head.append(f"\n{versions or NOTHING}", style="dim")


def _classes(now: Snapshot) -> Table:
    window = timedelta(seconds=round(now.window_seconds))
    table = Table(
        caption=f"latencies as p50 / p99; over the last {window}",
        box=SIMPLE_HEAD,
        show_edge=False,
        expand=True,
    )
    table.add_column("")
    for each in now.classes:
        table.add_column(each, justify="right", min_width=len("66.7 ms / 964 ms"))
    rows = now.classes.values()
    slots = "" if now.slots is None else f" of {now.slots:.0f}"
    table.add_row("slots used", *(f"{_count(row.slots_used)}{slots}" for row in rows))
    table.add_row("waiting", *(_count(row.waiting) for row in rows))
    table.add_row("questions/s", *(_rate(row.questions_per_second) for row in rows))
    table.add_row("failed/s", *(_rate(row.failed_per_second) for row in rows))
    for phase, name in PHASE_NAMES.items():
        table.add_row(name, *(_quantiles(row.seconds[phase]) for row in rows))
    return table


def _engine(now: Snapshot) -> Iterable[Text]:
    tokens = "" if now.kv_cache_tokens is None else f" of {now.kv_cache_tokens:,.0f} tokens"
    yield _line(
        "tokens/s",
        f"{_rate(now.tokens_per_second.get('prompt'))} prompt, "
        f"{_rate(now.tokens_per_second.get('generation'))} generation (10 s)",
    )
    yield _line(
        "caches",
        f"KV {_share(now.kv_cache_usage_ratio)}{tokens}; hits: prefix {_share(now.prefix_cache_hit_ratio)}, "
        f"encoder {_share(now.encoder_cache_hit_ratio)}",
    )
    memory = ", ".join(f"{process} {_gib(size)}" for process, size in sorted(now.memory_bytes.items()))
    images, lag = _count(now.preprocess_waiting), _seconds(now.event_loop_lag_seconds)
    yield _line("process", f"{images} images wait for decoding; loop lag p99 {lag}")
    yield _line("memory", memory or NOTHING)
    refused = ", ".join(f"{reason} {_rate(rate)}/s" for reason, rate in sorted(now.rejections_per_second.items()))
    yield _line("rejected", refused or NOTHING, style="yellow" if refused else "")


def _gpu(gpu: GpuReading) -> Text:
    used = f"{gpu.memory_used_bytes / GiB:.1f} of {_gib(gpu.memory_total_bytes)}"
    figures = [gpu.name or NOTHING, used, f"busy {_share(gpu.utilization_ratio)}"]
    figures += [] if gpu.temperature_celsius is None else [f"{gpu.temperature_celsius:.0f} °C"]
    figures += [] if gpu.power_watts is None else [f"{gpu.power_watts:.0f} W"]
    line = _line(f"GPU {gpu.index}", ", ".join(figures))
    errors = {"ECC": gpu.ecc_errors, "Xid": gpu.xid_errors}
    return line.append("".join(f", {count} {kind} errors" for kind, count in errors.items() if count), style="bold red")


def _line(name: str, text: str, style: str = "") -> Text:
    return Text.assemble((f" {name:<9} ", "bold"), (text, style))


def _count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}"


def _rate(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 9.95 or value == 0 else f"{value:.2g}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _gib(size: float) -> str:
    return f"{size / GiB:.1f} GiB"


def _quantiles(seconds: Quantiles) -> str:
    return NOTHING if seconds.p50 is None else f"{_seconds(seconds.p50)} / {_seconds(seconds.p99)}"


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"
