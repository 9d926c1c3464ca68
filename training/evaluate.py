"""Measures the demo model on held-out scenes: another seed, and fonts, words and sizes that training never drew.

python -m training.evaluate --checkpoint demo_model            # with the PyTorch model of model.py
python -m training.evaluate --url http://127.0.0.1:8000        # through the HTTP service
"""

from __future__ import annotations

import argparse
import io
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from training.fonts import BUILT_IN, HELD_OUT_FONTS, find_fonts
from training.inputs import prompt_ids, split_reply, to_patches
from training.items import Item
from training.model import KimiVL, greedy
from training.questions import ask
from training.samples import HELD_OUT_GRIDS, picture_size
from training.scenes import draw_scene
from training.tokenizer import Tokenizer
from training.words import HELD_OUT_WORDS, sign_text

TASKS = ("color", "shape", "presence", "count", "position", "read", "describe")
TARGETS = {"color": 0.97, "shape": 0.97, "presence": 0.97, "count": 0.92, "position": 0.92, "read": 0.80}
SEED = 20_261_130


@dataclass(frozen=True, slots=True)
class Sample:
    """A held-out picture with its question."""

    image: Image.Image
    item: Item


def held_out(per_task: int, fonts: Sequence[str], seed: int = SEED, tasks: Sequence[str] = TASKS) -> list[Sample]:
    """So many samples of every task, over all held-out sizes; scenes of 1 to 4 shapes, or a sign alone."""
    samples: list[Sample] = []
    for task in tasks:
        rng = random.Random(f"{seed} {task}")
        made = 0
        while made < per_task:
            size = picture_size(rng, HELD_OUT_GRIDS[made % len(HELD_OUT_GRIDS)])
            count = rng.randint(2 if task == "position" else 1, 4)
            text = None
            if task == "read" or (task == "describe" and made % 4 == 0):
                text, count = _text(rng), 0
            name = "count_some" if task == "count" and made % 2 else task
            scene = draw_scene(rng, size, shapes=count, text=text, fonts=fonts)
            item = ask(rng, name, scene)
            if item:
                samples.append(Sample(scene.image, item))
                made += 1
    return samples


def _text(rng: random.Random) -> str:
    return rng.choice(HELD_OUT_WORDS) if rng.random() < 0.35 else sign_text(rng, HELD_OUT_WORDS)


def answer_locally(
    model: KimiVL, tokenizer: Tokenizer, samples: Sequence[Sample], rows: int = 128
) -> list[tuple[str, str]]:
    """Greedy (reasoning, answer) of every sample; pictures of one grid share a batch of so many rows."""
    device = next(model.parameters()).device
    patched = [to_patches(s.image) for s in samples]
    replies: list[tuple[str, str]] = [("", "")] * len(samples)
    stop = {tokenizer.special["<|im_end|>"], tokenizer.special["[EOS]"]}
    training = model.training
    model.eval()
    for grid in sorted({g for _, g in patched}):
        members = [i for i, (_, g) in enumerate(patched) if g == grid]
        for start in range(0, len(members), rows):
            part = members[start : start + rows]
            pixels = torch.stack([torch.from_numpy(patched[i][0]) for i in part]).to(device)
            with torch.no_grad():
                features = model.image_features(pixels.float() / 127.5 - 1, *grid)
            prompts = [prompt_ids(tokenizer, samples[i].item.question, [grid[0] * grid[1] // 4]) for i in part]
            for i, ids in zip(part, greedy(model, prompts, features, stop), strict=True):
                replies[i] = split_reply(tokenizer.decode(ids))
    model.train(training)
    return replies


def answer_over_http(url: str, samples: Sequence[Sample], concurrency: int = 16) -> list[tuple[str, str]]:
    """The same from a running service, POST /v1/ask at temperature 0."""
    import httpx

    with httpx.Client(base_url=url, timeout=120) as client:

        def one(sample: Sample) -> tuple[str, str]:
            file = io.BytesIO()
            sample.image.save(file, "PNG")
            reply = client.post(
                "/v1/ask",
                files={"image": ("scene.png", file.getvalue(), "image/png")},
                data={"question": sample.item.question, "temperature": "0"},
            )
            reply.raise_for_status()
            body = reply.json()
            return body.get("reasoning") or "", body.get("answer") or ""

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, samples))


def score(samples: Sequence[Sample], replies: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Share of exactly right answers of every task."""
    total, right = Counter[str](), Counter[str]()
    for sample, (_, answer) in zip(samples, replies, strict=True):
        total[sample.item.task] += 1
        right[sample.item.task] += answer.strip() == sample.item.answer
    return {task: right[task] / total[task] for task in total}


def table(scores: dict[str, float], per_task: int) -> str:
    """The scores in markdown."""
    lines = ["| task | exact | target | pictures |", "|---|---|---|---|"]
    for task in scores:
        target = f"{TARGETS[task]:.0%}" if task in TARGETS else ""
        lines.append(f"| {task} | {scores[task]:.1%} | {target} | {per_task} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of the demo model on held-out scenes.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--checkpoint", type=Path, help="folder in published layout, run with the PyTorch model")
    where.add_argument("--url", help="address of a running service")
    parser.add_argument("--per-task", type=int, default=200)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--fonts", type=Path, default=Path("/usr/share/fonts"), help="where to look for held-out fonts besides Pillow's"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--wrong", action="store_true", help="print every wrong answer")
    options = parser.parse_args()
    fonts = [BUILT_IN, *find_fonts(options.fonts, HELD_OUT_FONTS)]
    samples = held_out(options.per_task, fonts, options.seed, options.tasks)
    start = time.time()
    if options.url:
        replies = answer_over_http(options.url, samples)
    else:
        from training.export import load_checkpoint

        model, tokenizer = load_checkpoint(options.checkpoint)
        replies = answer_locally(model.to(options.device), tokenizer, samples)
    if options.wrong:
        for sample, (reasoning, answer) in zip(samples, replies, strict=True):
            if answer.strip() != sample.item.answer:
                item = sample.item
                print(f"{item.task} {sample.image.size}: {item.question} | {reasoning} | {answer} | not {item.answer}")
    print(table(score(samples, replies), options.per_task))
    print(f"\n{len(samples)} pictures in {time.time() - start:.0f} s, {len(fonts)} held-out fonts")


if __name__ == "__main__":
    main()
