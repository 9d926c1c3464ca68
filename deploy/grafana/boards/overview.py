"""The first look."""

from boards.shared import FAILED, FIRST_TOKEN
from panels import board, only, panel, rate, recorded

READY = 'state="ready"'

BOARD = board(
    "overview",
    "Overview",
    "Is it all right, and if not, which board is next?",
    [
        panel(
            "Firing alerts",
            "What does somebody have to look at now? 0 is nothing.",
            [
                (
                    'count by (alertname) (ALERTS{alertname=~"Askimage.+", alertstate="firing"}) or vector(0)',
                    "{{alertname}}",
                )
            ],
            kind="stat",
            limit=1,
        ),
        panel(
            "Scraped instances",
            "Does every instance answer Prometheus?",
            [(f"sum({only('up')})", "up"), (f"count({only('up')})", "known")],
            kind="stat",
            alerts=["AskimageDown"],
        ),
        panel(
            "Ready instances",
            "How many answer questions?",
            [(f"sum({only('askimage_engine_state', READY)})", "ready")],
            kind="stat",
            alerts=["AskimageNotReady"],
        ),
        panel(
            "Starts within 30 minutes",
            "Does an instance start over and over?",
            [(f"max(changes({only('process_start_time_seconds')}[30m]))", "starts")],
            kind="stat",
            alerts=["AskimageRestarts"],
            limit=3,
        ),
    ],
    [
        panel(
            "Questions by class",
            "How much is asked, and by whom?",
            [(rate("askimage_requests_total", "class"), "{{class}}")],
            "reqps",
            alerts=["AskimageNoTraffic"],
            stacked=True,
        ),
        panel(
            "Questions by outcome",
            "How do questions end? stop, length and the like are answers, the others are not.",
            [(rate("askimage_requests_total", "outcome"), "{{outcome}}")],
            "reqps",
            stacked=True,
        ),
        FAILED,
    ],
    [
        FIRST_TOKEN,
        panel(
            "Late first tokens",
            "Is the objective's share of late first tokens used up too fast? A page at 14.4 times what is allowed.",
            [(recorded(f"job:askimage_first_tokens_late:ratio_rate{window}"), window) for window in ("5m", "1h", "6h")]
            + [("1 - askimage:first_tokens_in_time:objective", "allowed")],
            "percentunit",
            alerts=["AskimageFirstTokenFastBurn", "AskimageFirstTokenSlowBurn"],
        ),
        panel(
            "Slots and queue",
            "Is there room for more?",
            [
                (f"sum({only('askimage_slots_used')})", "slots used"),
                (f"sum({only('askimage_slots')})", "slots"),
                (f"sum({only('askimage_waiting')})", "waiting"),
            ],
            alerts=["AskimageQueueTime", "AskimageRejections"],
        ),
    ],
    [
        panel(
            "Engine states",
            "How many instances load, drain, or have lost their engine?",
            [(f"sum by (state) ({only('askimage_engine_state')})", "{{state}}")],
            alerts=["AskimageEngineDead", "AskimageNotReady"],
            stacked=True,
        ),
        panel(
            "Versions",
            "What runs where?",
            [(f"sum by (instance, model, device, askimage, vllm, torch) ({only('askimage_build_info')})", "")],
            kind="table",
        ),
    ],
)
