"""Panels and words that several boards have."""

from panels import panel, quantiles, rate, recorded, share

CLASSES = ("realtime", "normal", "batch")
TTFT = "askimage_time_to_first_token_seconds"

FIRST_TOKEN = panel(
    "Time to first token",
    "How long does a client see nothing? The objective is 2.5 s for realtime and normal.",
    quantiles(TTFT, "class"),
    "s",
    alerts=["AskimageFirstTokenFastBurn", "AskimageFirstTokenSlowBurn"],
    limit=2.5,
)
FAILED = panel(
    "Failed questions",
    "Which share of the questions meets a fault of ours?",
    [(recorded("job:askimage_requests_failed:ratio_rate5m"), "failed")],
    "percentunit",
    alerts=["AskimageErrors"],
    limit=0.01,
)
ENCODER_CACHE = panel(
    "Images the encoder did not have to see again",
    "Which share of the images does the cache of encoded images save?",
    [
        (
            share(
                f"({rate('askimage_encoder_queries_total')} - {rate('askimage_encoder_runs_total')})",
                rate("askimage_encoder_queries_total"),
            ),
            "saved",
        )
    ],
    "percentunit",
)
