"""Trains the demo model inside a box of time.

Stage 0 teaches the vision tower alone, through the auxiliary labels, until it reads characters; then questions and
answers, with the auxiliary loss beside them. The learning rate falls to zero over the last 40% of the time.

    python -m training.train --out RUN --fonts .fonts --minutes 16 --device cuda --workers 15
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from training.config import ModelConfig
from training.evaluate import answer_locally, held_out, score
from training.export import export, save_run
from training.fonts import BUILT_IN, HELD_OUT_FONTS, TRAINING_FONTS, find_fonts
from training.loader import Batch, Loader, Plan
from training.model import KimiVL
from training.samples import LABEL_CLASSES, LARGE, MEDIUM, SMALL, Grid, Mix
from training.tokenizer import Tokenizer

VISION_TASKS = {"count": 0.45, "read": 0.55}
QUESTION_TASKS = {
    "color": 2.0,
    "shape": 1.0,
    "count": 1.2,
    "count_some": 1.0,
    "presence": 1.6,
    "position": 2.4,
    "describe": 0.6,
    "read": 3.8,
}
CHARACTER_GOAL = 0.9  # of labelled patches whose character the vision tower knows, to leave stage 0
EASY_FONTS = 8


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Says what the workers draw, by how far the run is."""

    patches: int
    fonts: list[str]
    resumed: bool = False
    grids: tuple[list[Grid], list[Grid], list[Grid]] = field(default=(SMALL, MEDIUM, LARGE))

    def __call__(self, rng: random.Random, run: float, questions: float) -> Plan:
        vision_only = questions < 0
        if vision_only:
            early = run < 0.04
            weights = (1.0, 0.0, 0.0) if early else (0.6, 0.28, 0.12)
            mix = Mix(VISION_TASKS, longest=3 if run < 0.02 else 7, plain=early)
            fonts = self.fonts[:EASY_FONTS] if early else self.fonts
        else:
            easy = questions < 0.25 and not self.resumed
            weights = (0.7, 0.22, 0.08) if easy else (0.45, 0.33, 0.22)
            mix = Mix(QUESTION_TASKS, shapes=(3, 4, 2, 1) if easy else (1, 1, 1, 1.2))
            fonts = self.fonts
        images = 2 if questions > 0.15 and rng.random() < 0.04 else 1
        group = rng.choices(self.grids, weights)[0] if images == 1 else self.grids[0]
        grid = rng.choice(group)
        rows = max(2, min(1024, self.patches // (4 * grid[0] * grid[1])) // images)
        return Plan(grid, rows, mix, fonts, vision_only, images)


class LabelHead(nn.Module):
    """Predicts the auxiliary labels from image features; only training has it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, sum(LABEL_CLASSES))

    def forward(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, M, H), labels (B, M, 7) -> loss, and the share of right ones among labels that are not 0."""
        losses, shares = [], []
        for i, logits in enumerate(self.linear(features).split(LABEL_CLASSES, -1)):
            label = labels[..., i]
            weight = torch.where(label > 0, 1.0, 0.15)
            loss = F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none")
            losses.append((loss * weight.flatten()).sum() / weight.sum())
            known = label > 0
            right = ((logits.argmax(-1) == label) & known).sum()
            shares.append(torch.stack((right, known.sum())))
        colour, kind, centre, *characters = shares
        totals = torch.stack((colour, kind, centre, torch.stack(characters).sum(0))).float()
        stacked = torch.stack(losses)
        return stacked[:3].mean() + stacked[3:].mean(), totals


def optimiser_for(model: KimiVL, head: LabelHead, rate: float, fused: bool) -> torch.optim.Optimizer:
    decayed, free = [], list(head.parameters())
    for name, p in model.named_parameters():
        (free if p.ndim < 2 or "pos_emb" in name or "embed_tokens" in name else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


@dataclass(slots=True)
class Trainer:
    """One run: the model, its clock, and what is logged."""

    model: KimiVL
    head: LabelHead
    rate: float
    seconds: float
    stage0: tuple[float, float]  # least and most of the time that stage 0 may take
    pad: int
    warmup: int = 400
    resumed: bool = False
    step: int = 0
    samples: int = 0
    stage_step: int = 0
    stage0_end: float = -1.0  # progress at which stage 0 ended
    characters: float = 0.0  # running share of characters known
    optimiser: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        fused = next(self.model.parameters()).is_cuda
        self.optimiser = optimiser_for(self.model, self.head, self.rate, fused)

    def factor(self, progress: float) -> float:
        """Of the learning rate: a warm-up in each stage, flat, then down to zero over the last 40%."""
        return min(1.0, (self.stage_step + 1) / self.warmup) * min(1.0, max(0.0, 1 - progress) / 0.4)

    def train_step(self, batch: Batch, progress: float) -> tuple[Tensor, Tensor, Tensor]:
        """One optimiser step -> answer loss (0 in stage 0), auxiliary loss, label counts; all left on the device."""
        factor = self.factor(progress)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * factor
        tensors, (rows, cols) = batch.tensors, batch.grid
        pixels = tensors["patches"].float() / 127.5 - 1
        device = pixels.device.type
        loss = torch.zeros((), device=pixels.device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            features = self.model.image_features(pixels, 2 * rows, 2 * cols)
        # The head of a resumed run is new: it catches up before its gradients reach the vision tower.
        catching_up = self.resumed and self.step < self.warmup
        auxiliary, shares = self.head(features.detach() if catching_up else features, tensors["labels"].long())
        questions = "ids" in tensors
        if questions:
            ids = tensors["ids"].long()
            features = features.view(len(ids), -1, features.shape[-1])
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                hidden = self.model.hidden_states(ids, features, (ids != self.pad).float(), tensors["media"].long())
                logits = self.model.head(hidden.flatten(0, 1).index_select(0, tensors["positions"]))
            loss = F.cross_entropy(logits.float(), tensors["targets"].long())
        weight = 1.0 if not questions else 0.5 - 0.4 * progress
        (loss + weight * auxiliary).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if questions:
            self._balance(factor)
        self.step += 1
        self.stage_step += 1
        self.samples += len(tensors["patches"])
        return loss.detach(), auxiliary.detach(), shares

    @torch.no_grad()
    def _balance(self, factor: float) -> None:
        """Move each router's bias against the load of its experts."""
        for mixture in self.model.mixtures():
            if mixture.load is not None:
                mixture.gate.e_score_correction_bias += 2e-3 * factor * (mixture.load.mean() - mixture.load).sign()

    def maybe_leave_stage0(self, progress: float) -> None:
        least, most = self.stage0
        if self.stage0_end < 0 and (progress >= most or (progress >= least and self.characters >= CHARACTER_GOAL)):
            self.stage0_end, self.stage_step = progress, 0

    def question_progress(self, progress: float) -> float:
        return -1.0 if self.stage0_end < 0 else (progress - self.stage0_end) / (1 - self.stage0_end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fonts", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("demo_model/tiktoken.model"))
    parser.add_argument("--minutes", type=float, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--patches", type=int, default=49_152, help="a batch")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--stage0", type=float, nargs=2, default=(0.10, 0.33), help="least and most share of the time")
    parser.add_argument("--evaluate-every", type=float, default=120, help="seconds")
    parser.add_argument("--per-task", type=int, default=48, help="held-out pictures in those evaluations")
    parser.add_argument("--steps", type=int, default=0, help="stop early, for trying things out")
    parser.add_argument("--resume", type=Path, help="weights of an export to go on from, without stage 0")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tiktoken.model").write_bytes(options.tokenizer.read_bytes())
    fonts = find_fonts(options.fonts, TRAINING_FONTS)
    assert fonts, f"no training fonts under {options.fonts}"
    curriculum = Curriculum(options.patches, fonts, options.resume is not None)
    loader = Loader(curriculum, options.tokenizer, options.workers, options.patches, options.seed)
    tokenizer = Tokenizer(options.tokenizer)
    samples = held_out(options.per_task, [BUILT_IN, *find_fonts(options.fonts, HELD_OUT_FONTS)], seed=7)

    device = torch.device(options.device)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, media_token_id=tokenizer.special["<|media_pad|>"])
    model = KimiVL(config).to(device)
    if options.resume:
        model.load_state_dict({k: v.float() for k, v in load_file(options.resume).items()})
    head = LabelHead(config.hidden_size).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(fonts)} fonts", flush=True)
    pad = tokenizer.special["[PAD]"]
    trainer = Trainer(
        model, head, options.rate, options.minutes * 60, tuple(options.stage0), pad, resumed=options.resume is not None
    )
    if options.resume:
        trainer.stage0_end = 0.0
        loader.set_progress(0.0, 0.0)
    log = (options.out / "log.jsonl").open("a")

    def note(**values: object) -> None:
        line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()})
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    start, next_evaluation = time.time(), options.evaluate_every
    window: list[tuple[Tensor, Tensor, Tensor]] = []
    window_start, window_samples = start, 0
    model.train()
    for batch in loader.batches(device):
        elapsed = time.time() - start
        progress = elapsed / trainer.seconds
        if progress >= 1 or (options.steps and trainer.step >= options.steps):
            break
        questions = trainer.question_progress(progress)
        loader.set_progress(progress, questions)
        if trainer.stage0_end >= 0 and "ids" not in batch.tensors:
            continue  # drawn before the stage changed
        window.append(trainer.train_step(batch, progress))
        if len(window) == (20 if trainer.step < 200 else 100):
            loss, auxiliary = (float(torch.stack([w[i] for w in window]).mean()) for i in (0, 1))
            counts = torch.stack([w[2] for w in window]).sum(0)
            shares = (counts[:, 0] / counts[:, 1].clamp(min=1)).tolist()
            trainer.characters = shares[3]
            now = time.time()
            note(
                step=trainer.step,
                seconds=elapsed,
                samples=trainer.samples,
                per_second=(trainer.samples - window_samples) / (now - window_start),
                waiting=loader.waiting(),
                echoed=loader.echoed,
                loss=loss,
                auxiliary=auxiliary,
                color_kind_centre_character=[round(s, 3) for s in shares],
                stage=0 if trainer.stage0_end < 0 else 1,
            )
            window, window_start, window_samples = [], now, trainer.samples
            assert loader.alive(), "a worker died"
            assert loss == loss, "the loss is not a number"
            trainer.maybe_leave_stage0(progress)
        if elapsed > next_evaluation:
            next_evaluation += options.evaluate_every
            save_run(model, options.out / "last.pt", trainer.step)
            if trainer.stage0_end >= 0:
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    scores = score(samples, answer_locally(model, tokenizer, samples))
                note(
                    step=trainer.step,
                    evaluation={k: round(v, 3) for k, v in scores.items()},
                    took=time.time() - start - elapsed,
                )
    loader.close()
    save_run(model, options.out / "last.pt", trainer.step)
    export(model, options.tokenizer, options.out / "export")
    note(step=trainer.step, samples=trainer.samples, seconds=time.time() - start, finished=True)


if __name__ == "__main__":
    main()
