"""Where the time goes."""

from boards.shared import CLASSES, FIRST_TOKEN, TTFT
from panels import board, choice, mean, only, panel, quantiles

CHOSEN_CLASSES = 'class=~"$class"'
PHASES = [
    ("admission", "askimage_queue_time_seconds", ', stage="admission"'),
    ("preprocess", "askimage_preprocess_seconds", ""),
    ("engine queue", "askimage_queue_time_seconds", ', stage="engine"'),
    ("prefill", "askimage_prefill_seconds", ""),
    ("decode", "askimage_decode_seconds", ""),
]

BOARD = board(
    "latency",
    "Latency by class and phase",
    "Who waits, and for what?",
    [
        panel(
            "Where the time goes",
            "Which phase makes up the mean question of the chosen classes?",
            [(mean(name, CHOSEN_CLASSES + stage), phase) for phase, name, stage in PHASES],
            "s",
            stacked=True,
        ),
        FIRST_TOKEN,
        panel(
            "Whole request",
            "How long does a complete answer take?",
            quantiles("askimage_request_seconds", "class", CHOSEN_CLASSES),
            "s",
        ),
    ],
    [
        panel(
            "Queue time p99",
            "Who waits for a slot (admission), and who for the engine's first step (engine)?",
            quantiles("askimage_queue_time_seconds", "stage, class", CHOSEN_CLASSES, [0.99]),
            "s",
            alerts=["AskimageQueueTime"],
        ),
        panel(
            "First tokens by time",
            "Is it all of them, or are a few far slower than the rest?",
            [(f"sum by (le) (increase({only(TTFT + '_bucket', CHOSEN_CLASSES)}[$__rate_interval]))", "{{le}}")],
            "s",
            kind="heatmap",
        ),
        panel(
            "Time per output token",
            "How fast does an answer come, once it comes?",
            quantiles("askimage_time_per_output_token_seconds", "class", CHOSEN_CLASSES),
            "s",
        ),
    ],
    [
        panel(
            f"{name.capitalize()} by class",
            question,
            quantiles(f"askimage_{name}_seconds", "class", CHOSEN_CLASSES),
            "s",
        )
        for name, question in (
            ("preprocess", "Do images take long to be made ready?"),
            ("prefill", "Does reading the prompt and its images take long?"),
            ("decode", "Does writing take long? Long answers do."),
        )
    ],
    variables=[choice("class", "Class", CLASSES)],
)
