"""GPU memory by NVML.

The engine lives in processes of its own, so this process's CUDA allocator counts nothing; the driver counts all.
"""

import contextlib
import logging
from dataclasses import dataclass

import pynvml

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one device.

    Attributes:
        index: NVML device index.
        name: Product name.
        used_bytes: Memory in use by all processes.
        total_bytes: Memory of the device.
    """

    index: int
    name: str
    used_bytes: int
    total_bytes: int


class Gpus:
    """The machine's NVIDIA devices; empty where there is no driver."""

    def __init__(self) -> None:
        self._handles: list[object] = []
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            logger.debug("no NVIDIA devices: %s", error)

    def memory(self) -> list[GpuMemory]:
        """Read every device; one that does not answer is left out rather than reported as zero."""
        readings = []
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(pynvml.NVMLError):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                name = pynvml.nvmlDeviceGetName(handle)
                readings.append(GpuMemory(index, str(name), int(memory.used), int(memory.total)))
        return readings
