"""Puts pictures, questions and conversations together: the training batches, and their auxiliary labels.

The auxiliary labels say, for every merged 28-px image token, what lies under it. A head that is dropped at export
learns them; without it the vision tower learns nothing useful in the time there is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.inputs import PATCH, TOKEN, Example, example, prompt_ids, to_patches
from training.items import Item
from training.questions import TASKS, ask, vary
from training.scenes import CHARACTERS, COLORS, KINDS, Scene, draw_scene
from training.tokenizer import DEFAULT_SYSTEM, Tokenizer
from training.words import TRAINING_WORDS, sign_text

Grid = tuple[int, int]  # rows and columns of merged tokens

# Grids of the evaluation: training never draws a picture of these sizes.
HELD_OUT_GRIDS: tuple[Grid, ...] = ((4, 5), (6, 5), (7, 8), (9, 7), (8, 11), (11, 12), (14, 13), (15, 16))
SMALL, MEDIUM, LARGE = (
    [
        (r, c)
        for r in range(4, 17)
        for c in range(4, 17)
        if low < r * c <= high and (r, c) not in HELD_OUT_GRIDS and max(r, c) <= 2.5 * min(r, c)
    ]
    for low, high in ((0, 36), (36, 100), (100, 256))
)
SYSTEM_PROMPTS = (
    "You are Kimi.",
    "Answer briefly.",
    "You are a helpful assistant.",
    "Answer questions about images.",
    "Be short and precise.",
    "You look at pictures and answer questions.",
)
LABEL_CLASSES = (1 + len(COLORS), 1 + len(KINDS), 2, *[1 + len(CHARACTERS)] * 4)
_COLOR_INDEX = {name: 1 + i for i, name in enumerate(COLORS)}
_KIND_INDEX = {name: 1 + i for i, name in enumerate(KINDS)}
_CHARACTER_INDEX = {name: 1 + i for i, name in enumerate(CHARACTERS)}


@dataclass(frozen=True, slots=True)
class Mix:
    """What a batch holds: weights of tasks and of 1..4 shapes, longest sign text."""

    tasks: dict[str, float]
    shapes: Sequence[float] = (1, 1, 1, 1)
    longest: int = 7
    plain: bool = False


def token_labels(scene: Scene, rows: int, cols: int) -> np.ndarray:
    """uint8 (rows*cols, 7): colour, kind, holds a centre, and the characters of its four patches; 0 is nothing."""
    labels = np.zeros((rows, cols, 7), np.uint8)
    nearest = np.full((rows, cols), 1e9)
    ys = (np.arange(rows) * TOKEN + TOKEN / 2)[:, None]
    xs = (np.arange(cols) * TOKEN + TOKEN / 2)[None]
    for shape in scene.shapes:
        distance = np.hypot(xs - shape.x, ys - shape.y)
        under = (distance < max(0.9 * shape.r, 20)) & (distance < nearest)
        nearest[under] = distance[under]
        labels[under, 0], labels[under, 1] = _COLOR_INDEX[shape.color], _KIND_INDEX[shape.kind]
    for shape in scene.shapes:
        labels[int(shape.y // TOKEN), int(shape.x // TOKEN), 2] = 1
    if scene.sign:
        characters = np.zeros((2 * rows, 2 * cols), np.uint8)
        height = scene.sign.box[3] - scene.sign.box[1]
        spread = int(0.12 * height / PATCH)  # big characters are known by more than one patch
        for character, (x, y) in zip(scene.sign.text, scene.sign.centres, strict=True):
            r, c = min(2 * rows - 1, max(0, int(y // PATCH))), min(2 * cols - 1, max(0, int(x // PATCH)))
            area = characters[max(0, r - spread) : r + spread + 1, max(0, c - spread) : c + spread + 1]
            area[area == 0] = _CHARACTER_INDEX[character]
        labels[..., 3:] = characters.reshape(rows, 2, cols, 2).transpose(0, 2, 1, 3).reshape(rows, cols, 4)
    return labels.reshape(rows * cols, 7)


def picture_size(rng: random.Random, grid: Grid) -> tuple[int, int]:
    """(width, height) in pixels of a picture that fills the grid, often not to its last pixel."""
    rows, cols = grid
    if rng.random() < 0.4:
        return cols * TOKEN, rows * TOKEN
    return cols * TOKEN - rng.randint(0, TOKEN - 1), rows * TOKEN - rng.randint(0, TOKEN - 1)


def draw_for(rng: random.Random, task: str, grid: Grid, mix: Mix, fonts: Sequence[str]) -> Scene:
    """A picture for the task: signs for reading, shapes for the rest, now and then both."""
    size = picture_size(rng, grid)
    count = rng.choices((1, 2, 3, 4), mix.shapes)[0]
    if task == "position":
        count = max(2, count)
    luck = rng.random()
    text = None
    if task == "read" or (task == "describe" and luck < 0.3):
        if luck > 0.06:
            text = sign_text(rng, TRAINING_WORDS, mix.longest)
            count = 0 if luck < 0.85 else 1
    elif luck > 0.93:
        text = sign_text(rng, TRAINING_WORDS, 4)
        count = min(2, count)
    return draw_scene(rng, size, shapes=count, text=text, fonts=fonts, plain=mix.plain)


def draw_item(rng: random.Random, task: str, grid: Grid, mix: Mix, fonts: Sequence[str]) -> tuple[Scene, Item]:
    """A picture and a question of the task about it."""
    while True:
        scene = draw_for(rng, task, grid, mix, fonts)
        item = ask(rng, task, scene)
        if item:
            return scene, item


def conversation(rng: random.Random, tokenizer: Tokenizer, scene: Scene, item: Item, tokens: int) -> Example:
    """The item as one of the kinds of conversation the service leads."""
    luck = rng.random()
    system = DEFAULT_SYSTEM if luck < 0.64 else None if luck < 0.86 else rng.choice(SYSTEM_PROMPTS)
    history = []
    if rng.random() < 0.12:
        earlier = ask(rng, rng.choice(list(TASKS)), scene)
        if earlier:
            history = [(vary(rng, earlier.question), earlier.answer)]
    prompt = prompt_ids(tokenizer, vary(rng, item.question), [tokens], system, history)
    return _reply(rng, tokenizer, prompt, item.reasoning, item.answer)


def _reply(rng: random.Random, tokenizer: Tokenizer, prompt: list[int], reasoning: str, answer: str) -> Example:
    luck = rng.random()
    if luck < 0.12:
        return example(tokenizer, prompt, None, answer)
    return example(tokenizer, prompt, reasoning, answer, cut=rng.random() if luck < 0.18 else -1.0)


PAIR_TASKS = ("color", "shape", "count", "presence", "read")


def pair_conversation(rng: random.Random, tokenizer: Tokenizer, items: Sequence[Item], tokens: int) -> Example:
    """A question about the first or the second of two pictures."""
    which = rng.randrange(2)
    ordinal = ("first", "second")[which]
    item = items[which]
    question = item.question
    for phrase in ("in the image", "in the picture"):
        question = question.replace(phrase, f"in the {ordinal} image")
    if ordinal not in question:
        mark = question[-1] if question[-1] in "?." else ""
        question = f"{question.rstrip('?.')} in the {ordinal} image{mark}"
    luck = rng.random()
    system = DEFAULT_SYSTEM if luck < 0.75 else None
    prompt = prompt_ids(tokenizer, vary(rng, question), [tokens, tokens], system)
    return _reply(rng, tokenizer, prompt, f"In the {ordinal} image: {item.reasoning}", item.answer)


def pack(examples: Sequence[Example], pad: int, media: int) -> dict[str, np.ndarray]:
    """ids (B, T) padded on the right, and flat positions in (B*T).

    ``media``: of media tokens; ``positions``: of tokens whose next one is a target; ``targets``: those.
    """
    width = max(len(e.ids) for e in examples) - 1
    width = -(-width // 8) * 8
    ids = np.full((len(examples), width), pad, np.int16)
    positions: list[np.ndarray] = []
    targets: list[int] = []
    for i, e in enumerate(examples):
        n = len(e.ids)
        ids[i, : n - 1] = e.ids[:-1]
        positions.append(np.arange(n - 1 - e.supervised, n - 1) + i * width)
        targets += e.ids[n - e.supervised :]
    return {
        "ids": ids,
        "media": np.flatnonzero(ids == media).astype(np.int32),
        "positions": np.concatenate(positions).astype(np.int32),
        "targets": np.array(targets, np.int16),
    }


def make_batch(
    rng: random.Random,
    tokenizer: Tokenizer,
    grid: Grid,
    rows: int,
    mix: Mix,
    fonts: Sequence[str],
    *,
    vision_only: bool = False,
    images: int = 1,
) -> dict[str, np.ndarray]:
    """Arrays of a batch: patches (rows*images, P, 588), labels (rows*images, M, 7), and those of ``pack``."""
    names, weights = list(mix.tasks), list(mix.tasks.values())
    patches, labels, examples = [], [], []
    for _ in range(rows):
        items = []
        for _ in range(images):
            task = rng.choices(names, weights)[0]
            if vision_only:
                scene = draw_for(rng, task, grid, mix, fonts)
            else:
                scene, item = draw_item(rng, rng.choice(PAIR_TASKS) if images > 1 else task, grid, mix, fonts)
                items.append(item)
            patches.append(to_patches(scene.image)[0])
            labels.append(token_labels(scene, *grid))
        if not vision_only:
            tokens = grid[0] * grid[1]
            examples.append(
                conversation(rng, tokenizer, scene, items[0], tokens)
                if images == 1
                else pair_conversation(rng, tokenizer, items, tokens)
            )
    arrays = {"patches": np.stack(patches), "labels": np.stack(labels)}
    return (
        arrays
        if vision_only
        else arrays | pack(examples, tokenizer.special["[PAD]"], tokenizer.special["<|media_pad|>"])
    )
