"""Questions without an answer."""

from boards.shared import FAILED
from panels import board, only, panel, rate, recorded

OVERLOAD = 'reason=~"overloaded|queue_full|evicted|queue_timeout|deadline_exceeded"'
OTHERS = OVERLOAD.replace("=~", "!~", 1)

BOARD = board(
    "errors",
    "Errors",
    "Who does not get an answer, and whose fault is it?",
    [
        FAILED,
        panel(
            "Overload",
            "Which share of the questions has no room or no time?",
            [(recorded("job:askimage_rejections_overload:ratio_rate5m"), "rejected")],
            "percentunit",
            alerts=["AskimageRejections"],
            limit=0.05,
        ),
        panel(
            "Client errors",
            "Which share of the requests is at fault itself?",
            [(recorded("job:askimage_client_errors:ratio_rate5m"), "4xx")],
            "percentunit",
            alerts=["AskimageClientErrors"],
            limit=0.5,
        ),
    ],
    [
        panel(
            "Rejections by overload",
            "Is the queue too short, or the wait too long?",
            [(rate("askimage_rejections_total", "reason", OVERLOAD), "{{reason}}")],
            "reqps",
            alerts=["AskimageRejections"],
            stacked=True,
        ),
        panel(
            "Other rejections",
            "What else is turned away? not_ready and draining count readiness probes too.",
            [(rate("askimage_rejections_total", "reason", OTHERS), "{{reason}}")],
            "reqps",
            alerts=["AskimageErrors", "AskimageClientErrors"],
            stacked=True,
        ),
        panel(
            "Replies by status",
            "What do routes answer?",
            [(rate("http_requests_total", "handler, status"), "{{handler}} {{status}}")],
            "reqps",
        ),
    ],
    [
        panel(
            "Clients that left",
            "How far was the work that nobody waited for?",
            [(rate("askimage_cancellations_total", "phase"), "{{phase}}")],
            "reqps",
            stacked=True,
        ),
        panel(
            "Engines that died, and drains",
            "Was work cut short within the hour?",
            [
                (f"sum(increase({only('askimage_engine_restarts_total')}[1h]))", "engine restarts"),
                (f"sum(increase({only('askimage_drains_total')}[1h]))", "drains"),
            ],
            alerts=["AskimageEngineDead"],
        ),
        panel(
            "Rate limits not looked at",
            "Is the storage of the rate limits away?",
            [(rate("askimage_rate_limit_storage_errors_total", "instance"), "{{instance}}")],
            "cps",
            alerts=["AskimageRateLimitStorage"],
        ),
    ],
)
