"""Probes, health and metrics of a real service, and how a service that cannot start ends."""

import re

import httpx
import pytest

from support import picture


async def test_probes_of_a_ready_service(client: httpx.AsyncClient) -> None:
    for probe in ("/livez", "/readyz", "/healthz", "/health"):
        assert (await client.get(probe)).status_code == 200, probe
    for probe in ("/livez", "/readyz", "/healthz"):
        assert (await client.head(probe, headers={"X-Priority": "vip"})).status_code == 200, probe


async def test_health_shows_the_figures_of_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/v1/ask", data={"question": "What do you see?"}, files={"image": picture()})
    health = (await client.get("/health")).json()
    page = (await client.get("/metrics")).text
    assert health["state"] == "ready"
    assert health["device"] == "cpu"
    assert health["gpus"] == []
    assert health["tokens_per_second"]["generation"] > 0
    assert health["queue_time_seconds"] >= 0
    waiting = {"realtime": 0, "normal": 0, "batch": 0}
    assert health["requests"] == {"running": 0, "waiting": waiting, "waiting_in_engine": 0}
    assert health["versions"]["vllm"].startswith("0.32")
    assert "askimage_gpu_memory" not in page  # no series rather than zeros
    for series in (
        'askimage_engine_state{state="ready"} 1.0',
        "askimage_running 0.0",
        'askimage_requests_total{class="normal",outcome="stop"}',
        'askimage_queue_time_seconds_count{class="normal",stage="admission"}',
        'askimage_queue_time_seconds_count{class="normal",stage="engine"}',
        'askimage_waiting{class="batch"} 0.0',
        "askimage_event_loop_lag_seconds_count",
        'askimage_tokens_per_second{kind="generation"}',
        "vllm:num_requests_running",
        "vllm:request_queue_time_seconds_count",
        'http_requests_total{handler="/v1/ask"',
    ):
        assert series in page, series
    rate = re.search(r'askimage_tokens_per_second\{kind="generation"\} (\S+)', page)
    assert rate is not None
    assert float(rate[1]) == pytest.approx(health["tokens_per_second"]["generation"], abs=1)


async def test_the_openapi_document_names_fields_and_errors(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    operation = document["paths"]["/v1/ask"]["post"]
    fields = operation["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
    assert "$defs" not in str(fields)
    assert {"image", "question", "thinking_budget", "json_schema", "deadline_ms"} <= fields.keys()
    assert {"200", "400", "404", "413", "415", "422", "503", "504"} <= operation["responses"].keys()
