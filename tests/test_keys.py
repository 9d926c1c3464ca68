"""The keys: what their file may say, whose they are, how they change while the service runs, and the commands."""

import asyncio
import errno
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner, Result

from app.cli import app
from app.commands.keys import _append
from app.errors import Unauthorized
from app.identity import TIERS, Client, is_api
from app.keyfile import read_keys
from app.keys import KeyStore, check_exposure
from app.settings import AuthSettings, ServerSettings, Settings, SettingsError


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, key: str, **fields: str) -> str:
    lines = [f'{field} = "{value}"' for field, value in ({"name": name, "sha256": sha256(key)} | fields).items()]
    return "\n".join(["[[keys]]", *lines, ""])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def store(path: Path, text: str, *, anonymous: bool = False, anonymous_tier: str | None = None) -> KeyStore:
    path.write_text(text)
    return KeyStore(AuthSettings(keys_file=path, anonymous=anonymous, anonymous_tier=anonymous_tier))


def refuses(keys: KeyStore, token: str | None) -> bool:
    try:
        keys.client(token, "192.0.2.7")
    except Unauthorized:
        return True
    return False


# --- Whose a key is.


def test_a_key_is_found_by_its_hash_whatever_its_place(path: Path) -> None:
    keys = store(path, entry("a", "one") + entry("b", "two", tier="premium") + entry("c", "three", tier="bulk"))
    assert keys.has_keys
    assert keys.client("one", "192.0.2.7") == Client("a", "key:a", TIERS["standard"])
    assert keys.client("two", "192.0.2.7") == Client("b", "key:b", TIERS["premium"])
    assert keys.client("three", "192.0.2.7") == Client("c", "key:c", TIERS["bulk"])
    assert refuses(keys, "four")
    assert refuses(keys, sha256("one"))
    assert refuses(keys, None)


def test_every_hash_is_compared_whichever_one_matches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("app.keys.hmac.compare_digest", lambda a, b: compared.append(b) or a == b)
    keys = store(path, entry("a", "one") + entry("b", "two") + entry("c", "three"))
    for token in ("one", "three", "four"):
        compared.clear()
        refuses(keys, token)
        assert len(compared) == 3


def test_a_keys_own_limits_come_before_its_tiers(path: Path) -> None:
    text = '[tiers.standard]\nrequests = "9/minute"\nimage_tokens = "900/minute"\n'
    keys = store(path, text + entry("a", "one") + entry("b", "two", requests="1/second;5/minute"))
    plain, own = (keys.client(token, "192.0.2.7").tier for token in ("one", "two"))
    assert (plain.requests, plain.image_tokens) == ("9/minute", "900/minute")
    assert (own.requests, own.image_tokens) == ("1/second;5/minute", "900/minute")


def test_tiers_of_the_file_change_known_ones_and_add_others(path: Path) -> None:
    text = '[tiers.bulk]\nrequests = "9/minute"\n[tiers.gold]\nmax_class = "realtime"\ndefault_class = "realtime"\n'
    keys = store(path, text + entry("a", "one", tier="bulk") + entry("b", "two", tier="gold"))
    bulk, gold = (keys.client(token, "192.0.2.7").tier for token in ("one", "two"))
    assert (bulk.default_class, bulk.max_class, bulk.requests) == ("batch", "batch", "9/minute")
    assert (gold.default_class, gold.max_class) == ("realtime", "realtime")


def test_the_settings_key_and_the_files_work_beside_each_other(path: Path) -> None:
    path.write_text(entry("a", "one"))
    keys = KeyStore(AuthSettings(key=SecretStr("secret"), keys_file=path))
    assert keys.client("secret", "192.0.2.7") == Client("default", "key:default", TIERS["premium"])
    assert keys.client("one", "192.0.2.7").name == "a"


def test_without_keys_everyone_is_anonymous_and_premium() -> None:
    keys = KeyStore(AuthSettings())
    assert not keys.has_keys
    assert keys.client(None, "192.0.2.7") == Client("anonymous", "address:192.0.2.7", TIERS["premium"])
    assert refuses(keys, "anything")


def test_beside_keys_anonymous_requests_are_taken_only_when_allowed_and_as_standard(path: Path) -> None:
    assert refuses(store(path, entry("a", "one")), None)
    allowed = store(path, entry("a", "one"), anonymous=True)
    assert allowed.client(None, "192.0.2.7").tier == TIERS["standard"]
    assert refuses(allowed, "wrong")
    bulk = store(path, entry("a", "one"), anonymous=True, anonymous_tier="bulk")
    assert bulk.client(None, "192.0.2.7").tier == TIERS["bulk"]


# --- What is wrong with a file or a setting.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[keys]", ["not valid TOML", "line 1"]),
        ("x = " + "[" * 5000, ["not valid TOML"]),
        ("[[key]]", ["key: is not known"]),
        ("keys = 3", ["keys: Input should be a valid list"]),
        ("keys = [3]", ["[[keys]] number 1"]),
        ('[[keys]]\nname = "a"', ["key 'a', sha256: Field required"]),
        (f'[[keys]]\nname = "a b"\nsha256 = "{"0" * 64}"', ["[[keys]] number 1, name"]),
        (f'[[keys]]\nname = "a"\nsha256 = "{"0" * 63}"', ["key 'a', sha256", "64 hex digits"]),
        (entry("a", "one") + entry("a", "two"), ["the name 'a'", "rename"]),
        (entry("a", "one") + entry("b", "one"), ["'a' and 'b' are the same key"]),
        (entry("a", "one") + entry("b", "one").replace(sha256("one"), sha256("one").upper()), ["are the same key"]),
        (entry("anonymous", "one"), ["[[keys]] number 1, name", "choose another name"]),
        (entry("default", "one"), ["ASKIMAGE_AUTH__KEY"]),
        (entry("a", "one", tier="gold"), ["key 'a', tier", "'gold'", "premium, standard, bulk"]),
        (entry("a", "one", limit="1/minute"), ["key 'a', limit: is not known"]),
        (entry("a", "one", requests="many"), ["key 'a', requests: 'many' is not a limit", "120/minute"]),
        (entry("a", "one", image_tokens="1/fortnight"), ["key 'a', image_tokens"]),
        ('[tiers.gold]\nmax_class = "vip"', ["[tiers.gold], max_class", "realtime"]),
        ('[tiers.gold]\ndefault_class = "realtime"', ["[tiers.gold]", "'realtime' is above max_class 'normal'"]),
        ('[tiers.bulk]\ndefault_class = "normal"', ["[tiers.bulk]", "above max_class 'batch'"]),
        ('[tiers."two\\nlines"]\nlimit = 1', ["tier 'two\\nlines'"]),
    ],
)
def test_a_wrong_file_is_one_line_that_says_where_and_what(path: Path, text: str, says: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        store(path, text)
    message = str(caught.value)
    assert all(part in message for part in [str(path), *says]), message
    assert "\n" not in message


def test_a_key_pasted_in_place_of_its_hash_is_not_repeated(path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        store(path, '[[keys]]\nname = "a"\nsha256 = "ask_secret"')
    assert "ask_secret" not in str(caught.value)


def test_a_file_that_cannot_be_read_names_the_way_out(path: Path) -> None:
    with pytest.raises(SettingsError, match="askimage keys new"):
        KeyStore(AuthSettings(keys_file=path))
    path.write_bytes(b"\xef\xbb\xbf" + entry("a", "one").encode())  # as some editors save it
    KeyStore(AuthSettings(keys_file=path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="UTF-8"):
        KeyStore(AuthSettings(keys_file=path))


@pytest.mark.parametrize("key", ["", " ", "two words", "line\n"])
def test_a_key_that_no_request_can_send_is_refused(key: str) -> None:
    with pytest.raises(SettingsError, match="ASKIMAGE_AUTH__KEY"):
        KeyStore(AuthSettings(key=SecretStr(key)))


def test_the_same_key_in_settings_and_file_is_refused(path: Path) -> None:
    path.write_text(entry("a", "one"))
    with pytest.raises(SettingsError, match="remove one"):
        KeyStore(AuthSettings(key=SecretStr("one"), keys_file=path))


def test_an_unknown_tier_of_anonymous_requests_is_refused_at_start() -> None:
    with pytest.raises(SettingsError, match=r"ASKIMAGE_AUTH__ANONYMOUS_TIER.*'gold'.*premium"):
        KeyStore(AuthSettings(anonymous_tier="gold"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_without_keys_the_service_may_listen_on_this_machine(host: str) -> None:
    check_exposure(Settings(server=ServerSettings(host=host)), KeyStore(AuthSettings()))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "myhost", ""])
def test_without_keys_the_service_may_not_listen_to_others_unless_told(host: str) -> None:
    settings = Settings(server=ServerSettings(host=host))
    with pytest.raises(SettingsError) as caught:
        check_exposure(settings, KeyStore(settings.auth))
    for way in (
        "ASKIMAGE_AUTH__KEYS_FILE",
        "askimage keys new",
        "ASKIMAGE_AUTH__KEY,",
        "ASKIMAGE_AUTH__ANONYMOUS=true",
    ):
        assert way in str(caught.value)
    for auth in (AuthSettings(anonymous=True), AuthSettings(key=SecretStr("secret"))):
        check_exposure(settings.model_copy(update={"auth": auth}), KeyStore(auth))


def test_keys_are_for_the_api_alone() -> None:
    assert all(is_api(path) for path in ("/v1/ask", "/v1/images", "/generate"))
    assert not any(is_api(path) for path in ("/", "/livez", "/metrics", "/v1", "/docs", "/generate/x"))


# --- While the service runs.


def change(path: Path, text: str | None) -> None:
    """Replace a file at once, or remove it."""
    if text is None:
        path.unlink()
    else:
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)


@asynccontextmanager
async def watched(keys: KeyStore) -> AsyncIterator[None]:
    task = asyncio.create_task(keys.watch(0.01))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "not within 10 s"
        await asyncio.sleep(0.005)


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level and record.name == "app.keys"]


async def test_a_changed_file_is_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keys = store(path, entry("a", "one"))
    async with watched(keys):
        change(path, entry("b", "two") + entry("c", "three"))
        await eventually(lambda: not refuses(keys, "three"))
        assert refuses(keys, "one")
        await eventually(lambda: "keys reloaded: 2 keys" in lines(caplog, logging.INFO))


async def test_a_change_that_keeps_the_size_is_seen_too(path: Path) -> None:
    keys = store(path, entry("a", "one"))
    async with watched(keys):
        change(path, entry("a", "two"))
        await eventually(lambda: not refuses(keys, "two"))
        assert refuses(keys, "one")


async def test_the_file_is_read_off_the_event_loop(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = store(path, entry("a", "one"))
    threads: list[int] = []
    monkeypatch.setattr("app.keys.read_keys", lambda path: threads.append(threading.get_ident()) or read_keys(path))
    async with watched(keys):
        change(path, entry("b", "two"))
        await eventually(lambda: not refuses(keys, "two"))
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("breakage", ["broken", "gone", "unknown tier"])
async def test_a_broken_or_missing_file_keeps_the_old_keys_and_is_one_line(
    path: Path, caplog: pytest.LogCaptureFixture, breakage: str
) -> None:
    caplog.set_level(logging.INFO)
    keys = store(path, entry("a", "one"))
    async with watched(keys):
        if breakage == "gone":
            change(path, None)
        else:
            change(path, "[[keys]" if breakage == "broken" else entry("b", "two", tier="gold"))
        await eventually(lambda: bool(lines(caplog, logging.ERROR)))
        assert not refuses(keys, "one")
        assert refuses(keys, None)
        change(path, entry("b", "two"))
        await eventually(lambda: not refuses(keys, "two"))
    errors = lines(caplog, logging.ERROR)
    assert len(errors) == 1
    assert str(path) in errors[0]
    assert "\n" not in errors[0]


async def test_the_same_broken_file_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = store(path, entry("a", "one"))
    change(path, "[[keys]")
    for _ in range(3):
        keys._reload_if_changed()
    assert len(lines(caplog, logging.ERROR)) == 1


async def test_a_file_without_keys_does_not_open_a_service_that_had_some(path: Path) -> None:
    keys = store(path, entry("a", "one"))
    async with watched(keys):
        change(path, "")
        await eventually(lambda: not keys.has_keys)
        assert refuses(keys, None)
        assert refuses(keys, "one")


async def test_a_first_key_closes_an_open_service_for_good(path: Path) -> None:
    keys = store(path, "")
    assert not refuses(keys, None)
    async with watched(keys):
        change(path, entry("a", "one"))
        await eventually(lambda: refuses(keys, None))
        change(path, "")
        await eventually(lambda: not keys.has_keys)
        assert refuses(keys, None)


async def test_without_a_file_there_is_nothing_to_watch() -> None:
    await asyncio.wait_for(KeyStore(AuthSettings()).watch(), 1)


# --- The commands.


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no .env
    for name in [name for name in os.environ if name.startswith("ASKIMAGE_")]:
        monkeypatch.delenv(name)


def askimage(*arguments: str | Path) -> Result:
    """Run the command here; typer's runner shows what `sys.exit` says in the output, not in stderr."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_new_key_is_printed_once_and_works(path: Path) -> None:
    run = askimage("keys", "new", "phone-app", "--file", path, "--tier", "premium", "--requests", "9/minute")
    assert run.exit_code == 0, run.output
    key = run.stdout.strip()
    assert key.startswith("ask_")
    assert len(run.stderr.splitlines()) == 1
    assert "not shown again" in run.stderr
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    client = KeyStore(AuthSettings(keys_file=path)).client(key, "192.0.2.7")
    assert (client.name, client.tier.max_class, client.tier.requests) == ("phone-app", "realtime", "9/minute")


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_new_key_leaves_the_files_text_and_mode_as_they_are(path: Path, end: str) -> None:
    before = '# ours\n[tiers.gold]\r\nmax_class = "realtime"' + end
    path.write_bytes(before.encode())
    path.chmod(0o640)
    assert askimage("keys", "new", "a", "--file", path, "--tier", "gold").exit_code == 0
    assert askimage("keys", "new", "b", "--file", path).exit_code == 0
    assert path.read_bytes().startswith(before.encode())
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [key.name for key in read_keys(path).keys] == ["a", "b"]
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a"], "the name 'a'"),
        (["b", "--tier", "gold"], "'gold'"),
        (["b", "--requests", "many"], "'many' is not a limit"),
        (["b c"], "name"),
        (["b\n[tiers.x]"], "name"),
    ],
)
def test_a_wrong_new_key_leaves_the_file_alone(path: Path, arguments: list[str], says: str) -> None:
    path.write_text(entry("a", "one"))
    run = askimage("keys", "new", *arguments, "--file", path)
    assert run.exit_code == 1
    assert run.output.startswith("askimage: ")  # and no key
    assert says in run.output
    assert path.read_text() == entry("a", "one")
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_cannot_be_replaced_stays_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path.write_text(entry("a", "one"))
    monkeypatch.setattr("app.commands.keys.os.replace", full)
    run = askimage("keys", "new", "b", "--file", path)
    assert (run.exit_code, run.output.strip()) == (
        1,
        f"askimage: cannot write the keys file {path}: No space left on device",
    )
    assert path.read_text() == entry("a", "one")
    assert os.listdir(path.parent) == [path.name]


def test_a_link_to_the_file_stays_a_link(path: Path) -> None:
    (path.parent / "real").mkdir()
    path.symlink_to("real/keys.toml")
    assert askimage("keys", "new", "a", "--file", path).exit_code == 0
    assert path.is_symlink()
    assert [key.name for key in read_keys(path.parent / "real" / "keys.toml").keys] == ["a"]


def test_keys_made_at_the_same_time_are_all_kept(path: Path) -> None:
    names = [f"app-{number}" for number in range(16)]
    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(lambda name: _append(path, entry(name, name)), names))
    assert sorted(key.name for key in read_keys(path).keys) == sorted(names)


def test_a_new_key_goes_to_the_file_of_the_settings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASKIMAGE_AUTH__KEYS_FILE", str(path))
    assert askimage("keys", "new", "a").exit_code == 0
    assert [key.name for key in read_keys(path).keys] == ["a"]


def test_without_a_file_the_entry_is_printed_for_pasting(path: Path) -> None:
    run = askimage("keys", "new", "a", "--tier", "gold", "--image-tokens", "900/minute")
    assert run.exit_code == 0, run.output
    key, _, pasted = run.stdout.partition("\n")
    path.write_text(pasted + '[tiers.gold]\nmax_class = "realtime"\n')
    assert KeyStore(AuthSettings(keys_file=path)).client(key, "192.0.2.7").tier.image_tokens == "900/minute"
    assert askimage("keys", "new", "a", "--requests", "many").exit_code == 1


def test_list_shows_names_tiers_and_limits_but_no_hashes(path: Path) -> None:
    path.write_text(entry("a", "one") + entry("b", "two", tier="bulk", requests="9/minute"))
    run = askimage("keys", "list", "--file", path)
    assert [line.split() for line in run.stdout.splitlines()[1:]] == [
        ["a", "standard", "-", "-"],
        ["b", "bulk", "9/minute", "-"],
    ]
    assert sha256("one") not in run.stdout
    missing = askimage("keys", "list")
    assert (missing.exit_code, "--file" in missing.output) == (1, True)


@pytest.mark.parametrize("way", ["option", "variable"])
def test_ask_sends_its_key_and_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    (tmp_path / "sign.png").write_bytes(b"an image")
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"reasoning": None, "answer": "red"})

    client = httpx.Client
    monkeypatch.setattr(
        "app.commands.ask.httpx.Client", lambda **options: client(transport=httpx.MockTransport(answer), **options)
    )
    if way == "variable":
        monkeypatch.setenv("ASKIMAGE_AUTH__KEY", "schlüssel")
    options = ["--key", "schlüssel"] if way == "option" else []
    run = askimage("ask", "sign.png", "What?", "--priority", "batch", *options)
    assert run.exit_code == 0, run.output
    (request,) = seen
    headers = dict(request.headers.raw)
    assert (headers[b"Authorization"], headers[b"X-Priority"]) == ("Bearer schlüssel".encode(), b"batch")


@pytest.mark.parametrize("key", ["", "two words", "line\n", "nul\0"])
def test_ask_refuses_a_key_that_cannot_be_sent_without_repeating_it(tmp_path: Path, key: str) -> None:
    (tmp_path / "sign.png").write_bytes(b"an image")
    run = askimage("ask", "sign.png", "What?", "--key", key)
    assert run.exit_code == 1
    assert "--key" in run.output
    assert not key or key not in run.output
