"""`askimage top`: figures from pages of metrics, the screen, and what it says when there are none."""

from collections.abc import Callable

import httpx
import pytest
from rich.console import Console

from app.commands.top import Unreadable, read
from app.commands.top_snapshot import Quantiles, Reading, Snapshot, Window, snapshot
from app.commands.top_view import screen

STARTED = 1_000_000.0
GPUS = """
askimage_gpu_info{gpu="0",name="NVIDIA H200"} 1
askimage_gpu_memory_used_bytes{gpu="0"} 64424509440
askimage_gpu_memory_total_bytes{gpu="0"} 150323855360
askimage_gpu_utilization_ratio{gpu="0"} 0.75
askimage_gpu_temperature_celsius{gpu="0"} 64
askimage_gpu_power_watts{gpu="0"} 512.5
askimage_gpu_ecc_errors_total{gpu="0"} 2
askimage_gpu_info{gpu="1",name="NVIDIA H200"} 1
askimage_gpu_memory_used_bytes{gpu="1"} 0
askimage_gpu_memory_total_bytes{gpu="1"} 150323855360
"""


def page(answered: int = 0, slow: int = 0, *, started: float = STARTED, more: str = "") -> str:
    """A page after so many answers of class normal in up to 100 ms, and `slow` in 0.1-1 s."""
    total = answered + slow
    return f"""# HELP other_series of somebody else
other_series{{broken
process_start_time_seconds {started}
askimage_engine_state{{state="loading"}} 0
askimage_engine_state{{state="ready"}} 1
askimage_build_info{{model="demo",device="cpu",askimage="0.1.0",vllm="0.32.0"}} 1
askimage_slots 32
askimage_slots_used{{class="realtime"}} 0
askimage_slots_used{{class="normal"}} 3
askimage_slots_used{{class="batch"}} 0
askimage_waiting{{class="normal"}} 7
askimage_requests_total{{route="/v1/ask",class="normal",outcome="stop"}} {answered}
askimage_requests_total{{route="/v1/ask",class="normal",outcome="cancelled"}} {slow}
askimage_requests_total{{route="/v1/ask",class="normal",outcome="engine_error"}} {slow}
askimage_request_seconds_bucket{{class="normal",le="0.1"}} {answered}
askimage_request_seconds_bucket{{class="normal",le="1.0"}} {total}
askimage_request_seconds_bucket{{class="normal",le="+Inf"}} {total}
askimage_prefix_cache_queries_total {10 * total}
askimage_prefix_cache_hits_total {5 * total}
askimage_encoder_queries_total {total}
askimage_encoder_runs_total {answered}
askimage_rejections_total{{reason="queue_full"}} {slow}
askimage_rejections_total{{reason="rate_limited"}} 0
askimage_tokens_per_second{{kind="generation"}} 99.2
askimage_memory_bytes{{process="service"}} 1073741824
{more}"""


def at(seconds: float, text: str) -> Reading:
    return Reading(text, STARTED + seconds)


def test_the_first_reading_counts_from_the_start() -> None:
    now = snapshot(at(20, page(30, 10)))
    assert (now.state, now.model, now.device) == ("ready", "demo", "cpu")
    assert now.versions == {"askimage": "0.1.0", "vllm": "0.32.0"}
    assert (now.uptime_seconds, now.window_seconds, now.slots) == (20, 20, 32)
    assert now.classes.keys() == {"realtime", "normal", "batch"}
    normal = now.classes["normal"]
    assert (normal.slots_used, normal.waiting) == (3, 7)
    assert normal.questions_per_second == 50 / 20
    assert normal.failed_per_second == 10 / 20, "those that clients left are no failures"
    assert now.prefix_cache_hit_ratio == 0.5
    assert now.encoder_cache_hit_ratio == 0.25
    assert now.rejections_per_second == {"queue_full": 0.5}, "zeros are not shown"
    assert now.tokens_per_second == {"generation": 99.2}
    assert now.memory_bytes == {"service": 1 << 30}
    assert now.gpus == []


def test_quantiles_are_interpolated_as_prometheus_does() -> None:
    seconds = snapshot(at(20, page(50, 50))).classes["normal"].seconds
    assert seconds["request"] == Quantiles(pytest.approx(0.1), pytest.approx(0.1 + 0.9 * 49 / 50))
    assert snapshot(at(20, page(100))).classes["normal"].seconds["request"].p50 == pytest.approx(0.05)
    assert seconds["prefill"] == Quantiles(None, None)
    above = page(more='askimage_preprocess_seconds_bucket{class="batch",le="5.0"} 0\n'
                      'askimage_preprocess_seconds_bucket{class="batch",le="+Inf"} 9')  # fmt: skip
    assert snapshot(at(20, above)).classes["batch"].seconds["preprocess"] == Quantiles(5, 5), "highest bound"


def test_what_is_not_told_is_none() -> None:
    now = snapshot(at(20, 'askimage_engine_state{state="loading"} 1'))
    assert (now.state, now.model, now.slots, now.kv_cache_usage_ratio) == ("loading", None, None, None)
    assert now.prefix_cache_hit_ratio is None
    assert now.classes["normal"].waiting is None
    text(now)


def test_a_window_looks_back_and_forgets() -> None:
    window = Window(30)
    assert window.add(at(100, page(1000))).window_seconds == 100
    assert window.add(at(102, page(1010))).classes["normal"].questions_per_second == 5
    assert window.add(at(120, page(1010))).window_seconds == 20
    now = window.add(at(140, page(1028)))
    assert now.window_seconds == 20, "the readings at 100 and 102 are too old"
    assert now.classes["normal"].questions_per_second == 18 / 20


def test_a_slow_interval_still_compares_two_readings() -> None:
    window = Window(30)
    window.add(at(100, page(1000)))
    assert window.add(at(200, page(1100))).classes["normal"].questions_per_second == 1


def test_a_new_process_starts_from_zero() -> None:
    window = Window(30)
    window.add(at(100, page(1000)))
    now = window.add(at(110, page(4, started=STARTED + 108)))
    assert (now.uptime_seconds, now.window_seconds) == (2, 2)
    assert now.classes["normal"].questions_per_second == 2


def test_gpus() -> None:
    first, second = snapshot(at(20, page(more=GPUS))).gpus
    assert (first.index, first.name, first.memory_used_bytes, first.ecc_errors) == (0, "NVIDIA H200", 60 << 30, 2)
    assert (second.utilization_ratio, second.power_watts, second.xid_errors) == (None, None, None)


def text(now: Snapshot, trouble: str = "") -> list[str]:
    console = Console(width=80, height=24, highlight=False)
    with console.capture() as capture:
        console.print(screen(now, trouble))
    return capture.get().splitlines()


def test_the_screen_fits_a_terminal() -> None:
    lines = text(snapshot(at(20, page(30, 10, more=GPUS.split('askimage_gpu_info{gpu="1"')[0]))), "since 10:00: lost")
    assert len(lines) <= 24
    shown = "\n".join(lines)
    assert "3 of 32" in shown
    assert "NVIDIA H200, 60.0 of 140.0 GiB, busy 75%, 64 °C, 512 W, 2 ECC errors" in shown
    assert "queue_full 0.5/s" in shown
    assert "99 generation" in shown
    assert "since 10:00: lost" in shown


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: httpx.Response(404), "ASKIMAGE_SERVER__OPERATIONS_PORT"),
        (lambda _: httpx.Response(401), "--key"),
        (lambda _: httpx.Response(503, json={"title": "Loading", "detail": "wait"}), "503 Loading: wait"),
        (lambda _: httpx.Response(200, text="<html>"), "not as this service does"),
        (lambda _: httpx.Response(200, text="up 1\n"), "not as this service does"),
        (lambda _: httpx.Response(200, text='askimage_engine_state{state="'), "not as this service does"),
        (lambda _: httpx.Response(200, text="askimage_engine_state many"), "not as this service does"),
        (lambda request: raise_(httpx.ReadTimeout("", request=request)), "ReadTimeout"),
    ],
)
def test_what_is_wrong_is_said(answer: Callable[[httpx.Request], httpx.Response], message: str) -> None:
    with (
        httpx.Client(base_url="http://here:1", transport=httpx.MockTransport(answer)) as client,
        pytest.raises(Unreadable, match="http://here:1") as error,
    ):
        read(client)
    assert message in str(error.value)


def raise_(error: Exception) -> httpx.Response:
    raise error
