"""Probes, health and metrics of a real service, and how a service that cannot start ends."""

from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from support import metric, picture


async def test_probes_of_a_ready_service(client: httpx.AsyncClient) -> None:
    for probe in ("/livez", "/readyz", "/healthz", "/health"):
        assert (await client.get(probe)).status_code == 200, probe
    for probe in ("/livez", "/readyz", "/healthz"):
        assert (await client.head(probe, headers={"X-Priority": "vip"})).status_code == 200, probe


async def test_health_shows_the_figures_of_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/v1/ask", data={"question": "What do you see?"}, files={"image": picture()})
    health = (await client.get("/health")).json()
    page = (await client.get("/metrics")).text
    figures = {
        "askimage_running": health["requests"]["running"],
        "askimage_engine_waiting": health["requests"]["waiting_in_engine"],
        "askimage_kv_cache_usage_ratio": health["kv_cache"]["usage_ratio"],
        "askimage_kv_cache_tokens": health["kv_cache"]["tokens"],
        "askimage_kv_cache_bytes": health["kv_cache"]["bytes"],
        "askimage_queue_time_recent_seconds": health["queue_time_seconds"],
    }
    for name, figure in figures.items():
        assert metric(page, name) == pytest.approx(figure), name
    for each, figure in health["requests"]["waiting"].items():
        assert metric(page, "askimage_waiting", **{"class": each}) == figure
    for kind, figure in health["tokens_per_second"].items():
        assert metric(page, "askimage_tokens_per_second", kind=kind) == pytest.approx(figure, rel=0.5)
        assert figure > 0
    for process, figure in health["memory"].items():
        assert metric(page, "askimage_memory_bytes", process=process) == pytest.approx(figure, rel=0.2)
        assert figure > 100e6, "a process with torch in it"
    build = {"model": health["model"], "device": health["device"]} | health["versions"]
    assert metric(page, "askimage_build_info", **build) == 1
    assert metric(page, "askimage_engine_state", state=health["state"]) == 1
    assert (health["state"], health["device"], health["gpus"]) == ("ready", "cpu", [])
    assert "askimage_gpu" not in page  # no series rather than zeros
    assert health["kv_cache"]["tokens"] >= health["max_model_len"]
    assert health["versions"]["vllm"].startswith("0.32")


async def test_each_field_of_health_is_explained(client: httpx.AsyncClient) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("Health", "Gpu", "Memory", "Requests", "TokensPerSecond", "KvCache"):
        for field, entry in schemas[name]["properties"].items():
            assert "description" in entry or "$ref" in entry, f"{name}.{field}"


async def asked(client: httpx.AsyncClient, **request: Any) -> list[tuple[dict[str, str], float]]:
    """Ask, and tell what of `askimage_requests_total` went up."""

    async def counts() -> dict[frozenset[tuple[str, str]], float]:
        families = text_string_to_metric_families((await client.get("/metrics")).text)
        samples = [sample for family in families for sample in family.samples]
        return {
            frozenset(each.labels.items()): each.value for each in samples if each.name == "askimage_requests_total"
        }

    before = await counts()
    await client.post("/v1/ask", **request)
    return [
        (dict(labels), value - before.get(labels, 0))
        for labels, value in (await counts()).items()
        if value != before.get(labels, 0)
    ]


async def test_questions_are_counted_by_how_they_end(client: httpx.AsyncClient) -> None:
    good: dict[str, Any] = {"data": {"question": "What do you see?"}, "files": {"image": picture()}}
    labels = {"route": "/v1/ask", "class": "normal"}
    assert await asked(client, **good) == [(labels | {"outcome": "stop"}, 1)]
    realtime = {"headers": {"X-Priority": "realtime"}}
    assert await asked(client, **good | realtime) == [(labels | {"class": "realtime", "outcome": "stop"}, 1)]
    short = good | {"data": good["data"] | {"max_tokens": "1"}}
    assert await asked(client, **short) == [(labels | {"outcome": "thinking_length"}, 1)]
    bad = {"data": good["data"], "files": {"image": b"no image"}}
    assert await asked(client, **bad) == [(labels | {"outcome": "unsupported_image"}, 1)]
    assert await asked(client, **good | {"data": good["data"] | {"max_tokens": "-1"}}) == [
        (labels | {"outcome": "invalid_field"}, 1)
    ]
    unknown = {"headers": {"X-Priority": "vip"}}
    assert await asked(client, **good | unknown) == [(labels | {"class": "unknown", "outcome": "malformed_request"}, 1)]


async def test_an_answer_leaves_its_figures_in_every_series(client: httpx.AsyncClient) -> None:
    async def page() -> str:
        return (await client.get("/metrics")).text

    before = await page()
    image = picture(140, 98)  # no other test has it
    replies = [
        (await client.post("/v1/ask", data={"question": "What do you see?"}, files={"image": image})).json()
        for _ in range(2)
    ]
    after = await page()

    def rise(name: str, **labels: str) -> float:
        return metric(after, name, **labels) - metric(before, name, **labels)

    normal = {"class": "normal"}
    for stage in ("admission", "engine"):
        assert rise("askimage_queue_time_seconds_count", stage=stage, **normal) == 2
    timings = [each["timings"] for each in replies]
    for name, total in (
        ("preprocess", sum(each["preprocess_ms"] for each in timings)),
        ("prefill", sum(each["prefill_ms"] for each in timings)),
        ("decode", sum(each["decode_ms"] for each in timings)),
        ("time_to_first_token", sum(each["ttft_ms"] for each in timings)),
        ("request", sum(each["total_ms"] for each in timings)),
        ("time_per_output_token", sum(1e3 / each["tokens_per_second"] for each in timings)),
    ):
        assert rise(f"askimage_{name}_seconds_count", **normal) == 2, name
        assert rise(f"askimage_{name}_seconds_sum", **normal) == pytest.approx(total / 1e3, rel=0.02, abs=1e-4), name
    usage = [each["usage"] for each in replies]
    for kind in ("prompt", "image", "cached", "reasoning"):
        assert rise("askimage_tokens_total", kind=kind) == sum(each[f"{kind}_tokens"] for each in usage), kind
    answer = sum(each["completion_tokens"] - each["reasoning_tokens"] for each in usage)
    assert rise("askimage_tokens_total", kind="answer") == answer
    assert rise("askimage_image_tokens_sum") == sum(each["image_tokens"] for each in usage)
    assert rise("askimage_image_bytes_sum") == 2 * len(image)
    assert rise("askimage_image_pixels_sum") == 2 * 140 * 98
    assert rise("askimage_image_decode_seconds_count") == 2
    assert rise("askimage_images_total", format="PNG", outcome="ok") == 2
    assert rise("askimage_encoder_queries_total") == 2
    assert rise("askimage_encoder_runs_total") == 1  # the second one's image was in the cache
    assert rise("askimage_prefix_cache_queries_total") >= rise("askimage_prefix_cache_hits_total")
    assert rise("askimage_prefix_cache_hits_total") == sum(each["cached_tokens"] for each in usage)


async def test_open_metrics_name_requests_beside_their_latencies(client: httpx.AsyncClient) -> None:
    headers = {"X-Request-ID": "find-me"}
    data = {"question": "What do you see?"}
    await client.post("/v1/ask", data=data, files={"image": picture()}, headers=headers)
    reply = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    families = {each.name: each for each in openmetrics_families(reply.text)}
    for name in ("askimage_time_to_first_token_seconds", "askimage_request_seconds"):
        exemplars = [each.exemplar.labels for each in families[name].samples if each.exemplar]
        assert {"request_id": "find-me"} in exemplars, name
    assert "vllm:num_requests_running" in families
    plain = await client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert "find-me" not in plain.text


@pytest.mark.parametrize(
    "series",
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:request_queue_time_seconds_count",
        "vllm:time_to_first_token_seconds_bucket",
        'http_requests_total{handler="/v1/ask"',
        'askimage_waiting{class="batch"} 0.0',
        'askimage_rejections_total{reason="queue_full"} ',
        'askimage_cancellations_total{phase="upload"} ',
        "askimage_drains_total 0.0",
        "askimage_engine_restarts_total 0.0",
        "askimage_event_loop_lag_seconds_count",
        "askimage_preprocess_waiting 0.0",
        "askimage_slots ",
        'askimage_slots_used{class="normal"} 0.0',
    ],
)
async def test_what_boards_and_scalers_ask_for_is_there(client: httpx.AsyncClient, series: str) -> None:
    assert series in (await client.get("/metrics")).text


async def test_the_openapi_document_names_fields_and_errors(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    operation = document["paths"]["/v1/ask"]["post"]
    fields = operation["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
    assert "$defs" not in str(fields)
    assert {"image", "question", "thinking_budget", "json_schema", "deadline_ms"} <= fields.keys()
    assert {"200", "400", "404", "413", "415", "422", "503", "504"} <= operation["responses"].keys()
