"""A question with its reasoning and answer, and how scenes are put into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from training.scenes import Scene, Shape


@dataclass(frozen=True, slots=True)
class Item:
    """A question, what the model thinks, and what it answers."""

    task: str
    question: str
    reasoning: str
    answer: str


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def listing(shapes: Sequence[Shape], sign: bool = False) -> str:
    """'a red circle, an orange star and a sign'."""
    parts = [with_article(s.name) for s in shapes] + (["a sign"] if sign else [])
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def seen(scene: Scene) -> str:
    return f"I see {listing(scene.shapes, scene.sign is not None)}."
