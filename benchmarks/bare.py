"""`askimage` with its telemetry taken out: no series, log lines, traces or vLLM statistics. For `telemetry_cost` alone.

usage: python -m benchmarks.bare serve
"""

import asyncio
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_fastapi_instrumentator import Instrumentator

import app.engine.service as engine_service
import app.loop_lag
from app.cli import app as cli
from app.engine.sampled import Sampled
from app.middleware.access_log import AccessLogMiddleware
from app.middleware.trace import TraceMiddleware

load_engine = engine_service.load_engine


def load_without_statistics(*arguments: Any) -> Any:
    """The engine, without vLLM's statistics and loggers."""
    from vllm.v1.engine.async_llm import AsyncLLM

    make = AsyncLLM.from_vllm_config
    AsyncLLM.from_vllm_config = lambda config, **_: make(config, disable_log_stats=True)
    return load_engine(*arguments)


async def pass_through(self: Any, scope: Any, receive: Any, send: Any) -> None:
    """Instead of a middleware."""
    scope.setdefault("state", {})["log"] = {}
    await self._app(scope, receive, send)


async def forever(*_: Any) -> None:
    """Instead of measuring the loop's lag."""
    await asyncio.Event().wait()


def nothing(*_: Any, **__: Any) -> None:
    pass


engine_service.load_engine = load_without_statistics
app.loop_lag.measure_loop_lag = forever
AccessLogMiddleware.__call__ = TraceMiddleware.__call__ = pass_through
Instrumentator.instrument = Sampled.start = nothing
Counter.inc = Gauge.set = Histogram.observe = nothing
MetricWrapperBase.labels = lambda self, *_, **__: self

if __name__ == "__main__":
    cli()
