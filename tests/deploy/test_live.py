"""A real Prometheus scrapes the real service: every query of every board gives figures, and an alert fires.

A second target stands in for a service with GPUs, which this machine has not; the devices are made up, the series are
those of our own telemetry.
"""

import re
import time
from collections.abc import Iterator

import httpx
import pytest
from live_prometheus import OPERATIONS, Prometheus, ServiceWithGpus, board_queries, prometheus, series_names
from test_rules import rules

from support import picture, wait_for

QUESTION = {"question": "What do you see?", "max_tokens": "8"}
PATIENCE = 60


@pytest.fixture(scope="module")
def gpu_service() -> Iterator[ServiceWithGpus]:
    service = ServiceWithGpus()
    yield service
    service.close()


@pytest.fixture(scope="module")
def live(server: str, gpu_service: ServiceWithGpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, once it has scraped both services."""
    targets = [server.removeprefix("http://"), gpu_service.target]
    with prometheus(tmp_path_factory.mktemp("prometheus"), targets) as running:
        wait_for(lambda: running.targets() == dict.fromkeys(targets, "up"), 30, "both are scraped")
        yield running


def traffic(server: str) -> None:
    """Questions of each class, one without time, one without a picture in its file, one whose client leaves."""
    with httpx.Client(base_url=server, timeout=60) as client:

        def ask(file: bytes, headers: dict[str, str], **fields: str) -> int:
            data = QUESTION | fields
            return client.post("/v1/ask", data=data, files={"image": file}, headers=headers).status_code

        assert [ask(picture(), {"X-Priority": each}) for each in ("realtime", "normal", "batch")] == [200] * 3
        assert ask(picture(), {}, deadline_ms="1") == 504
        assert ask(b"no picture", {}) == 415
        data = QUESTION | {"stream": "true", "max_tokens": "200"}
        with client.stream("POST", "/v1/ask", data=data, files={"image": picture()}) as reply:
            next(reply.iter_lines())


@pytest.fixture(scope="module")
def missing(server: str, live: Prometheus) -> list[str]:
    """Queries of boards that give no figures, however long one asks the service questions."""
    queries = board_queries()
    end = time.monotonic() + PATIENCE
    while queries and time.monotonic() < end:
        traffic(server)
        queries = [(place, query) for place, query in queries if not live.has(query)]
    return [f"{place}: {query}" for place, query in queries]


def test_every_query_of_every_board_gives_figures(missing: list[str]) -> None:
    assert not missing


def test_every_series_of_boards_rules_and_runbook_is_scraped_or_recorded(live: Prometheus, missing: list[str]) -> None:
    queries = [query for _, query in board_queries()] + [rule["expr"] for rule in rules("alert") + rules("record")]
    named = set(re.findall(r"askimage_\w+", OPERATIONS.read_text())).union(*map(series_names, queries))
    assert named - set(live.get("label/__name__/values")) == set()


def test_every_rule_is_evaluated_without_error(live: Prometheus, missing: list[str]) -> None:
    evaluated = [rule for group in live.get("rules")["groups"] for rule in group["rules"]]
    assert len(evaluated) == len(rules("alert") + rules("record"))
    assert {rule["name"]: rule.get("lastError") for rule in evaluated if rule["health"] != "ok"} == {}


def test_an_alert_fires(live: Prometheus, gpu_service: ServiceWithGpus, missing: list[str]) -> None:
    assert live.alerts("firing") == []
    gpu_service.enter("dead")
    wait_for(lambda: live.alerts("firing") != [], 15, "an alert fires")
    (alert,) = live.alerts("firing")
    assert alert["labels"] == {
        "alertname": "AskimageEngineDead",
        "job": "askimage",
        "instance": gpu_service.target,
        "severity": "page",
    }
    assert alert["annotations"]["runbook_url"] == "docs/operations.md#askimageenginedead"
