"""Life of a service: up before its model, clean ends, one clear line when it cannot start, death of the engine.

These tests start services of their own, so they stand before tests/integration, whose one server stays for the session.
"""

import shutil
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from support import answers, picture, serve, wait_for


def test_the_server_is_up_before_the_model_and_ends_cleanly_while_loading(model_dir: Path, tmp_path: Path) -> None:
    with serve(model_dir, tmp_path / "log") as (address, process):
        wait_for(lambda: answers(f"{address}/livez", 200), 30, "the server answers")
        early = httpx.get(f"{address}/readyz")
        assert early.status_code == 503
        assert early.json()["code"] == "not_ready"
        assert early.headers["retry-after"].isdecimal()
        refused = httpx.post(f"{address}/v1/ask", data={"question": "?"}, files={"image": picture()})
        assert refused.status_code == 503
        service = psutil.Process(process.pid)
        wait_for(lambda: any("EngineCore" in child.name() for child in service.children()), 60, "the engine starts")
        engine = service.children(recursive=True)
        process.terminate()
        assert process.wait(10) == 0
        assert psutil.wait_procs(engine, timeout=5)[1] == []  # nothing is left behind


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"ASKIMAGE_MODEL__PATH": "/nowhere"}, "model folder /nowhere does not exist"),
        ({"ASKIMAGE_ENGINE__EXTRA_ARGS": '{"max_num_sequences": 1}'}, "nearest valid name is 'max_num_seqs'"),
        ({"ASKIMAGE_ENGINE__KV_CACHE_MEMORY_BYTES": str(1 << 50)}, "need 1048576.0 GiB"),
        ({"ASKIMAGE_SERVER__PRT": "1"}, "nearest valid name is ASKIMAGE_SERVER__PORT"),
        (
            {"ASKIMAGE_SERVER__HOST": "256.0.0.1", "ASKIMAGE_AUTH__ANONYMOUS": "true"},
            "cannot listen on 256.0.0.1, port",
        ),
    ],
    ids=["no-folder", "unknown-argument", "no-memory", "unknown-setting", "no-such-address"],
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
    assert "Unknown error" not in last


def test_a_port_in_use_is_one_clear_line(model_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serve(model_dir, tmp_path / "log", ASKIMAGE_SERVER__PORT=str(port)) as (_, process):
            assert process.wait(30) == 1
    lines = (tmp_path / "log").read_text().strip().splitlines()
    assert lines == [f"askimage: cannot listen on 127.0.0.1, port {port}: Address already in use"]


def test_damaged_weights_are_named(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    with (tmp_path / "model" / "model.safetensors").open("r+b") as weights:
        weights.truncate(1_000_000)
    with serve(tmp_path / "model", tmp_path / "log") as (_, process):
        assert process.wait(60) == 1
    assert "model.safetensors has 1000000 bytes where" in (tmp_path / "log").read_text().strip().splitlines()[-1]


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["LlavaOfTomorrow"], "model_type": "x"}')
    with serve(tmp_path / "model", tmp_path / "log") as (_, process):
        assert process.wait(60) == 1
    assert "LlavaOfTomorrow" in (tmp_path / "log").read_text().strip().splitlines()[-1]
