"""The engine, its caches, and the process around it."""

from boards.shared import ENCODER_CACHE
from panels import board, only, panel, quantiles, rate, share

BOARD = board(
    "engine",
    "Engine & cache",
    "What is the engine busy with, and what do its caches save?",
    [
        panel(
            "Requests in the engine",
            "How full is the engine?",
            [
                (f"sum({only('askimage_running')})", "running"),
                (f"sum({only('askimage_engine_waiting')})", "waiting inside"),
                (f"sum({only('askimage_slots')})", "slots"),
            ],
        ),
        panel(
            "Slots by class",
            "Who has the slots?",
            [(f"sum by (class) ({only('askimage_slots_used')})", "{{class}}")],
            stacked=True,
        ),
        panel(
            "Waiting by class",
            "Who waits for a slot?",
            [(f"sum by (class) ({only('askimage_waiting')})", "{{class}}")],
            alerts=["AskimageQueueTime"],
            stacked=True,
        ),
    ],
    [
        panel(
            "Tokens per second",
            "How much does the engine read and write?",
            [(rate("vllm:prompt_tokens_total"), "read"), (rate("vllm:generation_tokens_total"), "written")],
            "short",
        ),
        panel(
            "Tokens of answered questions by kind",
            "What are tokens spent on? Image and cached ones are prompt tokens too.",
            [(rate("askimage_tokens_total", "kind"), "{{kind}}")],
        ),
        panel(
            "Tokens in a step",
            "How well do requests share the engine's steps?",
            quantiles("vllm:iteration_tokens_total"),
        ),
    ],
    [
        panel(
            "KV cache in use",
            "Is the KV cache what bounds the load? Near 100 % the engine preempts.",
            [(only("askimage_kv_cache_usage_ratio"), "{{instance}}")],
            "percentunit",
        ),
        panel(
            "Preemptions",
            "Is work thrown away because the KV cache is full?",
            [(rate("vllm:num_preemptions_total", "instance"), "{{instance}}")],
            "cps",
        ),
        panel(
            "Prefix cache hits",
            "Which share of the prompt tokens does the prefix cache save?",
            [(share(rate("askimage_prefix_cache_hits_total"), rate("askimage_prefix_cache_queries_total")), "saved")],
            "percentunit",
        ),
        ENCODER_CACHE,
    ],
    [
        panel(
            "Event loop lag p99",
            "Does something keep the event loop from its work?",
            quantiles("askimage_event_loop_lag_seconds", "instance", shares=[0.99]),
            "s",
            alerts=["AskimageEventLoopLag"],
            limit=0.1,
        ),
        panel(
            "Main memory",
            "Does a process grow?",
            [(f"sum by (instance, process) ({only('askimage_memory_bytes')})", "{{instance}} {{process}}")],
            "bytes",
        ),
        panel(
            "CPU of the service's process",
            "Is the process that serves HTTP at its bound of about one core, image threads aside?",
            [(rate("process_cpu_seconds_total", "instance"), "{{instance}}")],
        ),
    ],
)
