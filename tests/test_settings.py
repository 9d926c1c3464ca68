"""Configuration errors are found at start and say what to change."""

import importlib.util
import json
from pathlib import Path

import pytest

from app.engine.arguments import engine_arguments
from app.settings import Settings, SettingsError, load_settings

ROOT = Path(__file__).resolve().parent.parent


def test_variables_reach_their_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASKIMAGE_SERVER__PORT", "9000")
    monkeypatch.setenv("ASKIMAGE_ENGINE__SPECULATIVE_CONFIG", '{"method": "ngram"}')
    monkeypatch.setenv("ASKIMAGE_ENGINE__MAX_NUM_SEQS", "")  # empty means default
    settings = load_settings()
    assert settings.server.port == 9000
    assert settings.engine.speculative_config == {"method": "ngram"}
    assert settings.engine.max_num_seqs is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ASKIMAGE_SERVER__PRT", "1", "unknown setting ASKIMAGE_SERVER__PRT.*ASKIMAGE_SERVER__PORT"),
        ("ASKIMAGE_ENGINE__MAX_NUM_SEQ", "1", "nearest valid name is ASKIMAGE_ENGINE__MAX_NUM_SEQS"),
        ("ASKIMAGE_SERVER__PORT", "99999", "ASKIMAGE_SERVER__PORT: .*65535"),
        ("ASKIMAGE_ENGINE__EXTRA_ARGS", "{", "engine"),
        ("ASKIMAGE_MODEL__THINKING_OPEN", "a b", "ASKIMAGE_MODEL__THINKING_OPEN"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=message):
        load_settings()


def test_a_wrong_line_of_the_env_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("ASKIMAGE_SERVER__PRT=1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="nearest valid name is ASKIMAGE_SERVER__PORT"):
        load_settings()


def test_the_environment_wins_over_the_env_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("ASKIMAGE_SERVER__PORT=1\nASKIMAGE_SERVER__HOST=::1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASKIMAGE_SERVER__PORT", "2")
    assert (load_settings().server.port, load_settings().server.host) == (2, "::1")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_num_sequences": 4}, "nearest valid name is 'max_num_seqs'"),
        ({"trust_remote_code": True}, "set by the service"),
    ],
)
def test_extra_engine_arguments_are_checked(extra: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        engine_arguments(Settings(engine={"extra_args": extra}), "cpu")


def test_typed_settings_win_over_device_defaults_and_extra_args_over_both() -> None:
    settings = Settings(engine={"max_num_seqs": 4, "max_model_len": 100, "extra_args": {"max_model_len": 200}})
    arguments = engine_arguments(settings, "cpu")
    assert (arguments["max_num_seqs"], arguments["max_model_len"]) == (4, 200)
    assert arguments["compilation_config"] == {"custom_ops": ["all", "-rotary_embedding"]}
    assert engine_arguments(Settings(), "cuda")["max_num_batched_tokens"] == 16384


def test_written_pages_match_the_settings() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, write in generate.FILES.items():
        assert path.read_text() == write(), f"{path.name} is out of date: run `make docs`"


def test_a_copy_of_the_example_is_a_valid_env_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    (tmp_path / ".env").write_text("\n".join(line.removeprefix("#") for line in lines if line.startswith("#ASKIMAGE")))
    monkeypatch.chdir(tmp_path)
    assert json.loads(load_settings().model_dump_json())["server"] == json.loads(Settings().model_dump_json())["server"]
