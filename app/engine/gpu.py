"""The machine's GPUs, by NVML.

The engine lives in processes of its own, so this process's CUDA allocator counts nothing; the driver counts all.
"""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

logger = logging.getLogger(__name__)

EVENT_WAIT_MS = 1000


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One device; None where it does not tell.

    Attributes:
        index: NVML device index.
        name: Product name.
        memory_used_bytes: Memory in use by all processes.
        memory_total_bytes: Memory of the device.
        utilization_ratio: Share of the last sampling period in which a kernel ran, 0-1.
        temperature_celsius: Of the die.
        power_watts: Drawn now.
        ecc_errors: Uncorrected memory errors since the driver was loaded.
        xid_errors: Xid events (driver's error reports) since this process started.
    """

    index: int
    name: str
    memory_used_bytes: int
    memory_total_bytes: int
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    ecc_errors: int | None = None
    xid_errors: int | None = None


class Gpus:
    """The machine's NVIDIA devices; empty where there is no driver."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._xids: Counter[str] | None = None
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            logger.debug("no NVIDIA devices: %s", error)

    def readings(self) -> list[GpuReading]:
        """Ask every device; one that does not answer is left out rather than reported as zero. Takes milliseconds, or
        far longer when a driver is unwell."""
        readings = []
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(pynvml.NVMLError):
                readings.append(self._reading(index, handle))
        return readings

    def _reading(self, index: int, handle: Any) -> GpuReading:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        utilization = _told(pynvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = _told(pynvml.nvmlDeviceGetPowerUsage, handle)
        uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        return GpuReading(
            index,
            str(pynvml.nvmlDeviceGetName(handle)),
            int(memory.used),
            int(memory.total),
            utilization_ratio=None if utilization is None else utilization.gpu / 100,
            temperature_celsius=_told(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            power_watts=None if milliwatts is None else milliwatts / 1e3,
            ecc_errors=_told(pynvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
            xid_errors=None if self._xids is None else self._xids[pynvml.nvmlDeviceGetUUID(handle)],
        )

    def watch_xids(self) -> None:
        """Count Xid events from now on, on a thread of its own; where the driver has no events they stay untold."""
        if not self._handles:
            return
        try:
            events = pynvml.nvmlEventSetCreate()
            for handle in self._handles:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        except pynvml.NVMLError as error:
            logger.info("Xid errors are not counted: %s", error)
            return
        self._xids = Counter()
        threading.Thread(target=self._count_xids, args=(events, self._xids), name="xids", daemon=True).start()

    def _count_xids(self, events: Any, counts: "Counter[str]") -> None:
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(events, EVENT_WAIT_MS)
                uuid = pynvml.nvmlDeviceGetUUID(event.device)
            except pynvml.NVMLError_Timeout:
                continue
            except pynvml.NVMLError as error:
                logger.warning("Xid errors are no longer counted: %s", error)
                self._xids = None
                return
            counts[uuid] += 1
            logger.error("GPU %s reports Xid %d", uuid, event.eventData)


def _told(ask: Callable[..., Any], *arguments: Any) -> Any:
    """What the driver answers, or None where the device has no such thing."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return None
