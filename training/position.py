"""Questions of left and right, above and below."""

from __future__ import annotations

import random

from training.items import Item, listing
from training.scenes import Scene, Shape

# Two shapes count as left/right or above/below each other from this many pixels of distance on.
CLEAR_DISTANCE = 12


def ask_position(rng: random.Random, scene: Scene) -> Item | None:
    """Left or right, above or below, of two shapes with different names."""
    names = [s.name for s in scene.shapes]
    if len(names) < 2 or len(set(names)) < len(names):
        return None
    across = rng.random() < 0.5

    def place(s: Shape) -> float:
        return s.x if across else s.y

    a, b = rng.sample(scene.shapes, 2)
    if abs(place(a) - place(b)) < CLEAR_DISTANCE:
        return None
    ordered = sorted(scene.shapes, key=place)
    thought = f"From {'left to right' if across else 'top to bottom'}: {listing(ordered)}."
    kinds = [s.kind for s in scene.shapes]
    short = kinds.count(a.kind) == kinds.count(b.kind) == 1 and rng.random() < 0.3
    an, bn = (a.kind, b.kind) if short else (a.name, b.name)
    first = rng.random() < 0.5  # ask for the left or upper one
    wanted = min(a, b, key=place) if first else max(a, b, key=place)
    side = ("left" if first else "right") if across else ("above" if first else "below")
    style = rng.random()
    if style < 0.3:
        if across:
            phrase = rng.choice(("Is the {a} to the {d} of the {b}?", "Is the {a} {d} of the {b}?"))
        else:
            phrase = "Is the {a} {d} the {b}?"
        # Spelt out so that every step copies from the text before: comparing names is what the model learns last.
        answer = "yes" if wanted is a else "no"
        more = ("Further " + side) if across else ("Higher" if first else "Lower")
        thought = f"{thought} The {an} yes, the {bn} no. {more} is the {an if wanted is a else bn} {answer}."
        return Item("position", phrase.format(a=an, b=bn, d=side), thought, answer)
    gap = place(ordered[1]) - place(ordered[0]) if first else place(ordered[-1]) - place(ordered[-2])
    if style < 0.5 and gap >= CLEAR_DISTANCE:
        if across:
            phrase = rng.choice(
                (
                    "Which shape is on the {d}?",
                    "What is on the {d}?",
                    "Which shape is furthest {d}?",
                    "What is {d}most?",
                )
            )
        else:
            side = "top" if first else "bottom"
            phrase = rng.choice(("Which shape is at the {d}?", "What is at the {d}?", "Which shape is on the {d}?"))
        return Item("position", phrase.format(d=side), thought, "the " + ordered[0 if first else -1].name)
    if style < 0.65 and len(names) == 2:
        other = b if wanted is a else a
        on = kinds.count(other.kind) == 1 and rng.random() < 0.3
        phrase = rng.choice(
            ("What is to the {d} of the {o}?", "Which shape is {d} of the {o}?")
            if across
            else ("What is {d} the {o}?", "Which shape is {d} the {o}?")
        )
        return Item(
            "position", phrase.format(d=side, o=other.kind if on else other.name), thought, "the " + wanted.name
        )
    if across:
        phrase = rng.choice(
            (
                "Which is further {d}, the {a} or the {b}?",
                "Which shape is on the {d}, the {a} or the {b}?",
                "What is more to the {d}, the {a} or the {b}?",
            )
        )
    else:
        higher = "higher" if first else "lower"
        phrase = rng.choice(
            (
                "Which is " + higher + ", the {a} or the {b}?",
                "Which shape is {d}, the {a} or the {b}?",
                "What is " + higher + " up, the {a} or the {b}?"
                if first
                else "What is further down, the {a} or the {b}?",
            )
        )
    return Item("position", phrase.format(a=an, b=bn, d=side), thought, "the " + wanted.name)
