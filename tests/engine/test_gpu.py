"""GPU figures, with a stand-in for NVML: this machine has no GPU."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from prometheus_client import CollectorRegistry

from app.engine import gpu
from app.engine.gpu import GpuReading, Gpus
from app.engine.telemetry import Telemetry

WHOLE = GpuReading(0, "H200", 60 << 30, 140 << 30, 0.75, 64, 512.5, 2, None)


class FakeNvml:
    """Two devices; what `missing` names is not told."""

    NVMLError = pynvml.NVMLError
    NVMLError_Timeout = pynvml.NVMLError_Timeout

    def __init__(self, *missing: str, broken: int | None = None) -> None:
        self._missing = missing
        self._broken = broken
        self._events: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "_missing"):
            raise_not_supported = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

            def refuse(*_: Any) -> Any:
                raise raise_not_supported

            return refuse
        try:
            return object.__getattribute__(self, name)
        except AttributeError:
            return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if handle == self._broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(used=60 << 30, total=140 << 30)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=75, memory=10)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 64

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 512_500

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return 2

    def nvmlEventSetCreate(self) -> list[Any]:
        return self._events

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: list[Any]) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        if handle == 1:
            events.extend([handle, handle, "timeout", handle])

    def nvmlEventSetWait_v2(self, events: list[Any], wait_ms: int) -> Any:
        if not events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        event = events.pop()
        if event == "timeout":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(device=event, eventData=79)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Gpus:
    monkeypatch.setattr(gpu, "pynvml", getattr(request, "param", FakeNvml()))
    return Gpus()


def series(gpus: Gpus) -> dict[str, float]:
    """Samples of GPU 0."""
    registry = CollectorRegistry()
    Telemetry(gpus, registry)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {each.name: each.value for each in samples if each.labels.get("gpu") == "0"}


def test_a_device_tells_its_figures(gpus: Gpus) -> None:
    first, second = gpus.readings()
    assert first == WHOLE
    assert second.index == 1
    assert series(gpus) == {
        "askimage_gpu_info": 1,
        "askimage_gpu_memory_used_bytes": 60 << 30,
        "askimage_gpu_memory_total_bytes": 140 << 30,
        "askimage_gpu_utilization_ratio": 0.75,
        "askimage_gpu_temperature_celsius": 64,
        "askimage_gpu_power_watts": 512.5,
        "askimage_gpu_ecc_errors_total": 2,
    }


@pytest.mark.parametrize(
    "gpus", [FakeNvml("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors")],
    indirect=True,
)  # fmt: skip
def test_what_a_device_does_not_tell_is_no_series(gpus: Gpus) -> None:
    assert gpus.readings()[0] == GpuReading(0, "H200", 60 << 30, 140 << 30, None, 64)
    assert series(gpus).keys() == {
        "askimage_gpu_info",
        "askimage_gpu_memory_used_bytes",
        "askimage_gpu_memory_total_bytes",
        "askimage_gpu_temperature_celsius",
    }


@pytest.mark.parametrize("gpus", [FakeNvml(broken=0)], indirect=True)
def test_a_device_that_is_lost_is_left_out(gpus: Gpus) -> None:
    assert [each.index for each in gpus.readings()] == [1]
    assert series(gpus) == {}


@pytest.mark.parametrize("gpus", [FakeNvml("nvmlInit"), FakeNvml("nvmlDeviceGetCount")], indirect=True)
def test_without_a_driver_there_are_no_devices(gpus: Gpus) -> None:
    gpus.watch_xids()
    assert gpus.readings() == []
    assert series(gpus) == {}


def test_xids_are_counted_for_each_device(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[list[int | None]] = []
    wait = gpu.pynvml.nvmlEventSetWait_v2

    def wait_and_look(events: Any, wait_ms: int) -> Any:
        counts.append([each.xid_errors for each in gpus.readings()])
        return wait(events, wait_ms)

    monkeypatch.setattr(gpu.pynvml, "nvmlEventSetWait_v2", wait_and_look)
    monkeypatch.setattr(gpu.threading, "Thread", Inline)
    gpus.watch_xids()
    assert counts == [[0, 0], [0, 1], [0, 1], [0, 2], [0, 3]]
    assert [each.xid_errors for each in gpus.readings()] == [None, None]  # the driver tells no more


@pytest.mark.parametrize("gpus", [FakeNvml("nvmlDeviceRegisterEvents")], indirect=True)
def test_a_driver_without_events_leaves_xids_untold(gpus: Gpus) -> None:
    gpus.watch_xids()
    assert gpus.readings()[0].xid_errors is None


class Inline:
    """A thread that runs where it is started."""

    def __init__(self, target: Any, args: tuple[Any, ...], **_: Any) -> None:
        self._run = lambda: target(*args)

    def start(self) -> None:
        self._run()
