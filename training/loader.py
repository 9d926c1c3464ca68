"""Worker processes that draw batches into shared memory, and the thread that carries them to the device."""

from __future__ import annotations

import mmap
import multiprocessing as mp
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.samples import Grid, Mix, make_batch
from training.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Plan:
    """What a worker draws next."""

    grid: Grid
    rows: int
    mix: Mix
    fonts: list[str]
    vision_only: bool
    images: int = 1


@dataclass(slots=True)
class Batch:
    """A batch on the device; ids, positions and targets are missing while only the vision tower learns."""

    grid: Grid
    images: int
    tensors: dict[str, Tensor]
    echoes: int = 0


# (random state, progress of the run in 0..1, progress of the question stage in 0..1 or -1 before it) -> plan
Planner = Callable[[random.Random, float, float], Plan]
SLOT_MARGIN = 8 << 20  # bytes for labels and ids beside the patches
ECHOES = 2


class Loader:
    """Draws on ``workers`` processes ahead of the consumer. Fork-based, so make it before touching the GPU."""

    def __init__(self, planner: Planner, tokenizer: Path, workers: int, patches: int, seed: int) -> None:
        context = mp.get_context("fork")
        self.echoed = 0
        self._size = patches * 588 + SLOT_MARGIN
        slots = 2 * workers + 2
        self._memory = mmap.mmap(-1, self._size * slots)
        self._free, self._ready = context.Queue(), context.Queue()
        self._progress = context.Array("d", [0.0, -1.0])
        for slot in range(slots):
            self._free.put(slot)
        self._workers = [
            context.Process(target=self._work, args=(planner, tokenizer, seed * 1000 + i), daemon=True)
            for i in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    def set_progress(self, run: float, questions: float) -> None:
        self._progress[0], self._progress[1] = run, questions

    def waiting(self) -> int:
        """Finished batches nobody has taken yet."""
        return int(self._ready.qsize())

    def alive(self) -> bool:
        return all(worker.is_alive() for worker in self._workers)

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()

    def _work(self, planner: Planner, tokenizer_path: Path, seed: int) -> None:
        torch.set_num_threads(1)
        tokenizer, rng = Tokenizer(tokenizer_path), random.Random(seed)
        while True:
            slot = self._free.get()
            plan = planner(rng, self._progress[0], self._progress[1])
            arrays = make_batch(
                rng,
                tokenizer,
                plan.grid,
                plan.rows,
                plan.mix,
                plan.fonts,
                vision_only=plan.vision_only,
                images=plan.images,
            )
            offset, layout = slot * self._size, []
            for name, array in arrays.items():
                np.frombuffer(self._memory, array.dtype, array.size, offset).reshape(array.shape)[...] = array
                layout.append((name, array.dtype.str, array.shape, offset))
                offset += -(-array.nbytes // 64) * 64
            assert offset <= (slot + 1) * self._size, "the batch is larger than its slot"
            self._ready.put((slot, plan.grid, plan.images, layout))

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """Batches on the device, copied a few ahead by a thread with a stream of its own.

        While the workers are behind, a recent batch is given again, at most ``ECHOES`` times ("data echoing",
        arXiv:1907.05550); ``echoed`` counts those.
        """
        ahead: queue.Queue[Batch] = queue.Queue(3)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None

        def carry() -> None:
            while True:
                slot, grid, images, layout = self._ready.get()
                tensors: dict[str, Tensor] = {}
                with torch.cuda.stream(stream):
                    for name, dtype, shape, offset in layout:
                        view = np.frombuffer(self._memory, np.dtype(dtype), int(np.prod(shape)), offset)
                        source = torch.from_numpy(view.reshape(shape))
                        tensors[name] = source.to(device) if stream else source.clone()
                if stream:
                    stream.synchronize()
                self._free.put(slot)
                ahead.put(Batch(grid, images, tensors))

        threading.Thread(target=carry, daemon=True).start()
        recent: deque[Batch] = deque(maxlen=48)
        rng = random.Random(0)
        while True:
            if ahead.empty() and len(recent) > recent.maxlen // 2:
                position = rng.randrange(len(recent) // 2)  # the older half
                batch = recent[position]
                batch.echoes += 1
                if batch.echoes >= ECHOES:
                    del recent[position]
                self.echoed += 1
            else:
                batch = ahead.get()
                if stream:
                    for tensor in batch.tensors.values():
                        tensor.record_stream(torch.cuda.current_stream(device))
                if recent and len(recent[-1].tensors) != len(batch.tensors):
                    recent.clear()  # of another stage
                recent.append(batch)
            yield batch
