"""Questions about a scene: phrasings, the one or two sentences of reasoning, and the answer."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.items import Item, listing, seen, with_article
from training.position import ask_position
from training.scenes import COLORS, KINDS, Scene

NOUNS = ("shape", "object", "thing")


def _color(rng: random.Random, scene: Scene) -> Item | None:
    kinds = [s.kind for s in scene.shapes]
    unique = [s for s in scene.shapes if kinds.count(s.kind) == 1]
    if not unique:
        return None
    shape = rng.choice(unique)
    word = rng.choice(("color", "colour"))
    if len(scene.shapes) == 1 and rng.random() < 0.35:
        noun = rng.choice(NOUNS)
        question = rng.choice(
            ("What {w} is the {n}?", "What is the {w} of the {n}?", "What {w} is it?", "Which {w} is this?")
        )
        return Item("color", question.format(w=word, n=noun), seen(scene), shape.color)
    question = rng.choice(
        (
            "What {w} is the {k}?",
            "What {w} is the {k}?",
            "What is the {w} of the {k}?",
            "Which {w} is the {k}?",
            "Which {w} does the {k} have?",
            "Tell me the {w} of the {k}.",
            "What {w} does the {k} have?",
        )
    )
    return Item("color", question.format(w=word, k=shape.kind), seen(scene), shape.color)


def _shape(rng: random.Random, scene: Scene) -> Item | None:
    colors = [s.color for s in scene.shapes]
    unique = [s for s in scene.shapes if colors.count(s.color) == 1]
    if not unique:
        return None
    shape = rng.choice(unique)
    if len(scene.shapes) == 1 and rng.random() < 0.35:
        question = rng.choice(
            ("What shape is it?", "What shape is this?", "Which shape do you see?", "What shape is in the image?")
        )
        return Item("shape", question, seen(scene), shape.kind)
    question = rng.choice(
        (
            "What shape is the {c} {n}?",
            "What shape is the {c} one?",
            "Which shape is {c}?",
            "What is the {c} {n}?",
            "Name the shape of the {c} {n}.",
            "What shape is {c}?",
        )
    )
    noun = rng.choice(("object", "thing", "figure"))
    return Item("shape", question.format(c=shape.color, n=noun), seen(scene), shape.kind)


def _count(rng: random.Random, scene: Scene) -> Item | None:
    n = len(scene.shapes)
    if n == 0:
        return None
    question = rng.choice(
        (
            "How many shapes are there?",
            "How many shapes do you see?",
            "Count the shapes.",
            "How many shapes are in the image?",
            "How many shapes are in the picture?",
            "How many objects are there?",
            "How many objects are in the image?",
            "What is the number of shapes?",
        )
    )
    tail = "That makes 1 shape." if n == 1 else f"That makes {n} shapes."
    return Item("count", question, f"{seen(scene)} {tail}", str(n))


def _count_some(rng: random.Random, scene: Scene) -> Item | None:
    """Count the shapes of one colour or of one kind."""
    if not scene.shapes:
        return None
    if rng.random() < 0.5:
        color = rng.choice(scene.shapes).color if rng.random() < 0.8 else rng.choice(list(COLORS))
        n = sum(s.color == color for s in scene.shapes)
        question = rng.choice(
            (
                "How many {c} shapes are there?",
                "How many {c} shapes do you see?",
                "Count the {c} shapes.",
                "How many shapes are {c}?",
                "How many {c} objects are in the image?",
            )
        ).format(c=color)
        what = color
    else:
        kind = rng.choice(scene.shapes).kind if rng.random() < 0.8 else rng.choice(KINDS)
        n = sum(s.kind == kind for s in scene.shapes)
        question = rng.choice(
            (
                "How many {k}s are there?",
                "How many {k}s do you see?",
                "Count the {k}s.",
                "How many {k}s are in the image?",
                "How many {k}s are in the picture?",
            )
        ).format(k=kind)
        what = kind if n == 1 else kind + "s"
    return Item("count", question, f"{seen(scene)} {n} {what}.", str(n))


def _presence(rng: random.Random, scene: Scene) -> Item | None:
    if not scene.shapes and not scene.sign:
        return None
    if rng.random() < 0.06 or not scene.shapes:
        question = rng.choice(
            ("Is there a sign?", "Is there any text?", "Do you see a sign?", "Does the image have a sign?")
        )
        return Item("presence", question, seen(scene), "yes" if scene.sign else "no")
    seed = rng.choice(scene.shapes)
    color, kind = seed.color, seed.kind
    style = rng.random()
    if style < 0.7:
        if rng.random() < 0.55:  # mostly near misses: one of the two changed, often to one that another shape has
            if rng.random() < 0.5:
                color = rng.choice(list(COLORS)) if rng.random() < 0.6 else rng.choice(scene.shapes).color
            else:
                kind = rng.choice(KINDS) if rng.random() < 0.6 else rng.choice(scene.shapes).kind
        found = any(s.color == color and s.kind == kind for s in scene.shapes)
        what = with_article(f"{color} {kind}")
    elif style < 0.85:
        kind = kind if rng.random() < 0.5 else rng.choice(KINDS)
        found = any(s.kind == kind for s in scene.shapes)
        what = with_article(kind)
    else:
        color = color if rng.random() < 0.5 else rng.choice(list(COLORS))
        found = any(s.color == color for s in scene.shapes)
        what = with_article(f"{color} {rng.choice(('shape', 'object', 'thing'))}")
    question = rng.choice(
        (
            "Is there {x}?",
            "Is there {x} in the image?",
            "Is there {x} in the picture?",
            "Do you see {x}?",
            "Can you see {x}?",
            "Does the image have {x}?",
            "Does the picture contain {x}?",
        )
    )
    return Item("presence", question.format(x=what), seen(scene), "yes" if found else "no")


def _describe(rng: random.Random, scene: Scene) -> Item | None:
    question = rng.choice(
        (
            "What do you see?",
            "Describe the image.",
            "Describe the picture.",
            "What is in the picture?",
            "What is in the image?",
            "What is this?",
            "Describe what you see.",
        )
    )
    n = len(scene.shapes)
    counted = f"There {'is 1 shape' if n == 1 else f'are {n} shapes'}"
    if scene.sign:
        says = f"a sign that says {scene.sign.text}"
        if not n:
            return Item("describe", question, "There is a sign.", says)
        return Item("describe", question, f"{counted} and a sign.", listing(scene.shapes) + " and " + says)
    return Item("describe", question, f"{counted}.", listing(scene.shapes)) if n else None


def _read(rng: random.Random, scene: Scene) -> Item | None:
    question = rng.choice(
        (
            "What does the sign say?",
            "What does the sign say?",
            "What does it say?",
            "Read the sign.",
            "Read the text.",
            "What is written in the image?",
            "What is written on the sign?",
            "What text is in the picture?",
            "What is the text in the image?",
            "What does the text say?",
            "What is the name of the shop?",
            "Which word is on the sign?",
            "What number is on the sign?" if scene.sign and scene.sign.text.isdigit() else "What word is this?",
        )
    )
    if not scene.sign:
        return Item("read", question, seen(scene), "there is no sign")
    return Item("read", question, f"The sign reads {' '.join(scene.sign.text)}.", scene.sign.text)


TASKS: dict[str, Callable[[random.Random, Scene], Item | None]] = {
    "color": _color,
    "shape": _shape,
    "count": _count,
    "count_some": _count_some,
    "presence": _presence,
    "position": ask_position,
    "describe": _describe,
    "read": _read,
}


def ask(rng: random.Random, task: str, scene: Scene) -> Item | None:
    """An item of the task about the scene, or None where the scene cannot carry one."""
    return TASKS[task](rng, scene)


def vary(rng: random.Random, question: str) -> str:
    """As people type: now and then in lower case, without the mark at the end, or all in capitals."""
    luck = rng.random()
    if luck < 0.12:
        question = question.lower()
    elif luck < 0.13:
        question = question.upper()
    luck = rng.random()
    if luck < 0.12:
        question = question.rstrip("?.")
    elif luck < 0.15:
        question = question.rstrip("?.") + rng.choice((" ?", "??", "!", "."))
    elif luck < 0.18:
        question = rng.choice(("Please tell me: ", "Look at the image. ", "Hi! ", "Hey, ")) + question
    return question
