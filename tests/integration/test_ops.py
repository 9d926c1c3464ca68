"""Probes, health and metrics of a real service, and how a service that cannot start ends."""

import re
from pathlib import Path

import httpx
import pytest

from support import answers, picture, serve, wait_for


async def test_probes_of_a_ready_service(client: httpx.AsyncClient) -> None:
    for probe in ("/livez", "/readyz", "/healthz", "/health"):
        assert (await client.get(probe)).status_code == 200, probe


async def test_health_shows_the_figures_of_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/v1/ask", data={"question": "What do you see?"}, files={"image": picture()})
    health = (await client.get("/health")).json()
    page = (await client.get("/metrics")).text
    assert health["state"] == "ready"
    assert health["device"] == "cpu"
    assert health["gpus"] == []
    assert health["tokens_per_second"]["generation"] > 0
    assert health["queue_time_seconds"] >= 0
    assert health["requests"] == {"running": 0, "waiting": 0}
    assert health["versions"]["vllm"].startswith("0.32")
    assert "askimage_gpu_memory" not in page  # no series rather than zeros
    for series in (
        'askimage_engine_state{state="ready"} 1.0',
        "askimage_running 0.0",
        "askimage_queue_time_seconds_count",
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
    assert {"image", "question", "thinking_budget", "json_schema", "deadline_ms"} <= fields.keys()
    assert {"200", "400", "404", "413", "415", "422", "503", "504"} <= operation["responses"].keys()


def test_the_server_is_up_before_the_model_and_ends_cleanly_while_loading(model_dir: Path, tmp_path: Path) -> None:
    with serve(model_dir, tmp_path / "log") as (address, process):
        wait_for(lambda: answers(f"{address}/livez", 200), 30, "the server answers")
        early = httpx.get(f"{address}/readyz")
        assert early.status_code == 503
        assert early.json()["code"] == "not_ready"
        assert early.headers["retry-after"].isdecimal()
        refused = httpx.post(f"{address}/v1/ask", data={"question": "?"}, files={"image": picture()})
        assert refused.status_code == 503
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"ASKIMAGE_MODEL__PATH": "/nowhere"}, "model folder /nowhere does not exist"),
        ({"ASKIMAGE_ENGINE__EXTRA_ARGS": '{"max_num_sequences": 1}'}, "nearest valid name is 'max_num_seqs'"),
        ({"ASKIMAGE_ENGINE__KV_CACHE_MEMORY_BYTES": str(1 << 50)}, "need 1048576.0 GiB"),
        ({"ASKIMAGE_SERVER__PRT": "1"}, "nearest valid name is ASKIMAGE_SERVER__PORT"),
    ],
    ids=["no-folder", "unknown-argument", "no-memory", "unknown-setting"],
)
def test_a_service_that_cannot_start_ends_with_one_clear_line(
    model_dir: Path, tmp_path: Path, variables: dict[str, str], line: str
) -> None:
    log = tmp_path / "log"
    with serve(model_dir, log, **variables) as (_, process):
        assert process.wait(60) == 1
    last = log.read_text().strip().splitlines()[-1]
    assert last.startswith("askimage: ")
    assert line in last


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["LlavaOfTomorrow"], "model_type": "x"}')
    with serve(tmp_path / "model", tmp_path / "log") as (_, process):
        assert process.wait(60) == 1
    assert "LlavaOfTomorrow" in (tmp_path / "log").read_text().strip().splitlines()[-1]
