"""`/metrics`: HTTP's series, ours and vLLM's on one page."""

from fastapi import APIRouter, Request, Response
from prometheus_client import REGISTRY
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

router = APIRouter(tags=["operations"])

OPENMETRICS = "application/openmetrics-text"


@router.get("/metrics", response_class=Response)
def metrics(request: Request) -> Response:
    """Prometheus' text format; OpenMetrics, which has exemplars, for those who accept it.

    No coroutine: writing the page takes tens of milliseconds, and FastAPI gives plain functions a thread.
    """
    if OPENMETRICS in request.headers.get("accept", ""):
        # Its other ways of escaping turn the samples of `vllm:` into `vllm_` (prometheus_client 0.26.0).
        page = openmetrics.generate_latest(REGISTRY, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return Response(page, headers={"Content-Type": f"{OPENMETRICS}; version=1.0.0; charset=utf-8"})
    return Response(generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
