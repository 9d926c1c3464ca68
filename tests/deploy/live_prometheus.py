"""What the tests of `deploy/` share: its files, a real Prometheus on a port of its own, a service that has a GPU."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server

from app.engine.gpu import GpuReading, Gpus
from app.engine.telemetry import Telemetry
from support import ROOT, answers, free_port, wait_for

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
OPERATIONS = ROOT / "docs" / "operations.md"
BOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))
}
VARIABLES = {"$__rate_interval": "30s", "$job": "askimage", "$instance": ".*", "$class": ".*"}


def program(name: str) -> str:
    """Path of a program that Debian's package prometheus brings."""
    path = shutil.which(name, path="/usr/bin:/usr/local/bin")
    if path is None:
        pytest.fail(f"these tests need {name} (Debian: apt-get install prometheus)")
    return path


def board_queries() -> list[tuple[str, str]]:
    """(where, PromQL) of each query of a board, with its variables filled in."""
    found = []
    for board in BOARDS.values():
        for panel in board["panels"]:
            place = f"{board['uid']}: {panel['title']}"
            found += [(f"{place} {target['refId']}", _filled(target["expr"])) for target in panel["targets"]]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
                found.append((f"{board['uid']}: ${variable['name']}", _filled(f"count by ({label}) ({series})")))
    return found


def _filled(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def series_names(query: str) -> set[str]:
    """Names of the service's series, and of recorded ones, in PromQL."""
    words = re.findall(r"[a-zA-Z_:][\w:]*", re.sub(r'"[^"]*"', "", query))
    return {word for word in words if ":" in word or word.startswith(("askimage_", "http_", "process_"))}


class FakeGpus(Gpus):
    """A stand-in for NVML: two devices that are well."""

    def __init__(self) -> None:
        pass

    def readings(self) -> list[GpuReading]:
        return [GpuReading(index, "H200", 60 << 30, 140 << 30, 0.75, 64, 512.5, 0, 0) for index in range(2)]


class ServiceWithGpus:
    """The series of a service with GPUs, and no service: its telemetry alone, on a port of its own.

    Attributes:
        target: Its host and port.
    """

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.telemetry = Telemetry(FakeGpus(), registry)
        self.enter("ready")
        self._server, self._thread = start_http_server(0, "127.0.0.1", registry)
        self.target = f"127.0.0.1:{self._server.server_port}"

    def enter(self, state: str) -> None:
        """Say that the engine's state is another."""
        for each in ("loading", "ready", "draining", "failed", "dead"):
            self.telemetry.state.labels(each).set(each == state)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Prometheus:
    """A client of a running Prometheus."""

    def __init__(self, address: str) -> None:
        self._http = httpx.Client(base_url=address, timeout=10)

    def get(self, path: str, **parameters: str) -> Any:
        reply = self._http.get(f"/api/v1/{path}", params=parameters)
        assert reply.status_code == 200, reply.text
        return reply.json()["data"]

    def has(self, query: str) -> bool:
        """Does a query give figures?"""
        return any(not math.isnan(float(each["value"][1])) for each in self.get("query", query=query)["result"])

    def alerts(self, state: str) -> list[dict[str, Any]]:
        return [alert for alert in self.get("alerts")["alerts"] if alert["state"] == state]

    def targets(self) -> dict[str, str]:
        """Health of each target."""
        return {each["labels"]["instance"]: each["health"] for each in self.get("targets")["activeTargets"]}


@contextmanager
def prometheus(folder: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    """Run Prometheus with the configuration of `deploy/`, but every second and on other targets."""
    configuration = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(PROMETHEUS / each) for each in configuration["rule_files"]]
    (scraped,) = configuration["scrape_configs"]
    scraped["static_configs"] = [{"targets": list(targets)}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_port()}"
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--storage.tsdb.path={folder / 'data'}"], stdout=log, stderr=log)
        try:
            wait_for(lambda: answers(f"http://{address}/-/ready", 200), 30, "Prometheus is ready")
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait(30)
