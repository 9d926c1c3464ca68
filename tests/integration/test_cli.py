"""The command line against the real service, and its checks of a checkpoint."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT, free_port, picture

QUESTION = "What color is the circle?"


def askimage(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture
def sign(tmp_path: Path) -> str:
    (tmp_path / "circle.png").write_bytes(picture())
    return str(tmp_path / "circle.png")


@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_ask_prints_reasoning_and_answer(server: str, sign: str, options: list[str]) -> None:
    run = askimage("ask", sign, QUESTION, "--url", server, *options)
    assert run.returncode == 0, run.stderr
    *reasoning, answer = run.stdout.strip().splitlines()
    assert answer == "red"
    assert "red circle" in " ".join(reasoning)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([QUESTION], "at least one image"),
        (["/nowhere.png", QUESTION], "no such file: /nowhere.png"),
    ],
)
def test_ask_says_what_is_missing(arguments: list[str], message: str) -> None:
    run = askimage("ask", *arguments)
    assert run.returncode == 1
    assert message in run.stderr


def test_ask_shows_the_services_own_error(server: str, sign: str) -> None:
    run = askimage("ask", sign, QUESTION, "--url", server, "--temperature", "9")
    assert run.returncode == 1
    assert "422 Invalid field: temperature" in run.stderr


def test_ask_without_a_service_names_the_address(sign: str) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    run = askimage("ask", sign, QUESTION, "--url", address)
    assert run.returncode == 1
    assert f"no answer from {address}" in run.stderr


def test_check_passes_on_a_good_checkpoint_and_names_what_is_wrong_with_a_bad_one(
    model_dir: Path, tmp_path: Path
) -> None:
    good = askimage("check", "--model", str(model_dir))
    assert good.returncode == 0, good.stdout
    for line in ("torch", "vllm: 0.32.0", "device: cpu", "KimiVLForConditionalGeneration", "tokenizer", "256 tokens"):
        assert line in good.stdout
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    (broken / "tiktoken.model").unlink()
    bad = askimage("check", "--model", str(broken))
    assert bad.returncode == 1
    assert "failed" in bad.stdout
    assert "tiktoken.model" in bad.stdout


def test_help_teaches() -> None:
    assert "Try:" in askimage("serve", "--help").stdout
    assert {"serve", "ask", "check"} <= set(askimage("--help").stdout.split())
