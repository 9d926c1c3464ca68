"""Tunes the decoder of an export further, the vision tower frozen: cheap enough for one CPU thread.

python -m training.tune demo_model TUNED --fonts .fonts --minutes 12
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.export import export, load_checkpoint
from training.fonts import TRAINING_FONTS, find_fonts
from training.inputs import to_patches
from training.items import Item
from training.model import KimiVL
from training.samples import MEDIUM, SMALL, Grid, Mix, conversation, draw_item, pack
from training.scenes import KINDS, Scene
from training.tokenizer import Tokenizer
from training.train import QUESTION_TASKS

# A yes or no is one token in some thirty, so it weighs more.
VERDICTS, VERDICT_WEIGHT = ("yes", "no", " yes", " no"), 4.0


def draw(rng: random.Random, grid: Grid, mix: Mix, fonts: list[str], closed: float) -> tuple[Scene, Item]:
    """An item of the mix, or with chance ``closed`` a yes-or-no question of position.

    Two fifths of those are about two shapes of one kind, which only their colours tell apart.
    """
    if rng.random() >= closed:
        return draw_item(rng, rng.choices(list(mix.tasks), list(mix.tasks.values()))[0], grid, mix, fonts)
    one_kind = rng.random() < 0.4
    while True:
        scene, item = draw_item(rng, "position", grid, mix, fonts)
        kinds = sum(kind in item.question for kind in KINDS)
        if item.answer in ("yes", "no") and (kinds == 1 or not one_kind):
            return scene, item


def step_loss(model: KimiVL, tokenizer: Tokenizer, rng: random.Random, pairs: list[tuple[Scene, Item]]) -> Tensor:
    """Mean loss of the replies about pictures of one grid."""
    patched = [to_patches(scene.image) for scene, _ in pairs]
    rows, cols = patched[0][1]
    examples = [conversation(rng, tokenizer, scene, item, rows * cols // 4) for scene, item in pairs]
    packed = pack(examples, tokenizer.special["[PAD]"], tokenizer.special["<|media_pad|>"])
    arrays = {name: torch.from_numpy(array).long() for name, array in packed.items()}
    with torch.no_grad():
        pixels = torch.stack([torch.from_numpy(patches) for patches, _ in patched]).float() / 127.5 - 1
        features = model.image_features(pixels, rows, cols)
    hidden = model.hidden_states(arrays["ids"], features, media=arrays["media"])
    logits = model.head(hidden.flatten(0, 1)[arrays["positions"]])
    losses = F.cross_entropy(logits, arrays["targets"], reduction="none")
    verdicts = torch.tensor([tokenizer.encode(word)[0] for word in VERDICTS])
    weights = torch.where(torch.isin(arrays["targets"], verdicts), VERDICT_WEIGHT, 1.0)
    return (losses * weights).sum() / weights.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the decoder of an exported checkpoint.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fonts", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--rows", type=int, default=16, help="a batch")
    parser.add_argument("--closed", type=float, default=0.55, help="share of yes-or-no questions of position")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    fonts = find_fonts(options.fonts, TRAINING_FONTS)
    model, tokenizer = load_checkpoint(options.checkpoint)
    parameters = list(model.language_model.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01)
    mix = Mix(QUESTION_TASKS | {"position": 8.0})
    start, saved, step, mean = time.time(), time.time(), 0, 0.0
    while (progress := (time.time() - start) / (60 * options.minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 30) * min(1.0, (1 - progress) / 0.5)
        grid = rng.choice(SMALL if rng.random() < 0.9 else [g for g in MEDIUM if g[0] * g[1] <= 64])
        pairs = [draw(rng, grid, mix, fonts, options.closed) for _ in range(options.rows)]
        loss = step_loss(model, tokenizer, rng, pairs)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        mean += (float(loss.detach()) - mean) / min(step, 25)
        if step % 25 == 0:
            print(f"step {step} at {time.time() - start:.0f} s: loss {mean:.4f}", flush=True)
        if time.time() - saved > 120:
            saved = time.time()
            export(model, options.checkpoint / "tiktoken.model", options.out)
    export(model, options.checkpoint / "tiktoken.model", options.out)
    print(f"{step} steps, {step * options.rows} pictures")


if __name__ == "__main__":
    main()
