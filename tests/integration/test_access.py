"""Keys, classes, limits, request ids, ports and logs of the real server; none of it waits for a model."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from support import ROOT, answers, free_port, picture, serve, wait_for


def test_keys_limits_and_logs_before_any_model(model_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    made = subprocess.run(
        [sys.executable, "-m", "app.cli", "keys", "new", "phone", "--file", keys, "--requests", "3/minute"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    key = made.stdout.strip()
    operations = free_port()
    settings = {"ASKIMAGE_AUTH__KEYS_FILE": str(keys), "ASKIMAGE_SERVER__OPERATIONS_PORT": str(operations)}
    with serve(model_dir, tmp_path / "log", ASKIMAGE_SERVER__HOST="0.0.0.0", **settings) as (address, _):
        wait_for(lambda: answers(f"{address}/livez", 200), 30, "the server answers")
        question = {"data": {"question": "What is my secret?"}, "files": {"image": picture()}}
        with httpx.Client(base_url=address, timeout=10) as client:
            stranger = client.post("/v1/ask", **question)
            assert (stranger.status_code, stranger.json()["code"]) == (401, "unauthorized")
            assert stranger.headers["www-authenticate"].startswith("Bearer")
            client.headers["Authorization"] = f"Bearer {key}"
            client.headers["X-Request-ID"] = "mine-1"
            known = client.post("/v1/ask", **question)
            assert (known.status_code, known.json()["code"]) == (503, "not_ready")
            assert known.json()["request_id"] == known.headers["x-request-id"] == "mine-1"
            assert known.headers["ratelimit-policy"] == '"requests";q=3;w=60'
            assert known.headers["ratelimit"].startswith('"requests";r=2;')
            forbidden = client.post("/v1/ask", headers={"X-Priority": "realtime"}, **question)
            assert (forbidden.status_code, forbidden.json()["code"]) == (403, "class_forbidden")
            evil = client.post("/v1/ask", headers={"X-Request-ID": "evil id; {}"}, **question)
            assert evil.headers["x-request-id"].isalnum()
            limited = client.post("/v1/ask", **question)
            assert (limited.status_code, limited.json()["code"]) == (429, "rate_limited")
            assert 1 <= int(limited.headers["retry-after"]) <= 60
            assert client.get("/livez").status_code == 200  # probes are never limited
            assert client.get("/metrics").status_code == 404
        page = httpx.get(f"http://127.0.0.1:{operations}/metrics").text
        assert 'askimage_rejections_total{reason="rate_limited"} 1.0' in page

        # A key that is taken out of the file is refused soon after.
        keys.write_text("")
        wait_for(
            lambda: httpx.get(f"{address}/v1/images/x", headers={"Authorization": f"Bearer {key}"}).status_code == 401,
            6,
            "the key is gone",
        )
    text = (tmp_path / "log").read_text()
    assert key not in text
    assert "secret" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    mine = next(line for line in lines if line.get("request_id") == "mine-1" and line["logger"] == "app.access")
    assert {"key": "phone", "class": "normal", "status": 503, "error": "not_ready"}.items() <= mine.items()


@pytest.mark.parametrize("exposed", ["0.0.0.0", "::"])
def test_without_keys_nobody_else_is_let_in(model_dir: Path, tmp_path: Path, exposed: str) -> None:
    with serve(model_dir, tmp_path / "log", ASKIMAGE_SERVER__HOST=exposed) as (_, process):
        assert process.wait(30) == 1
    last = (tmp_path / "log").read_text().strip().splitlines()[-1]
    assert "askimage keys new" in last
    assert "ASKIMAGE_AUTH__ANONYMOUS=true" in last


def test_metrics_and_documentation_can_be_closed(model_dir: Path, tmp_path: Path) -> None:
    closed = {"ASKIMAGE_SERVER__METRICS": "false", "ASKIMAGE_SERVER__DOCS": "false"}
    with serve(model_dir, tmp_path / "log", **closed) as (address, _):
        wait_for(lambda: answers(f"{address}/livez", 200), 30, "the server answers")
        for path in ("/metrics", "/docs", "/openapi.json"):
            assert httpx.get(address + path).status_code == 404, path
