"""Prometheus' own tools like what is in `deploy/prometheus/`; each alert has a runbook entry and a test."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_prometheus import OPERATIONS, PROMETHEUS, program

from app.settings import variables
from support import ROOT

RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
TESTS = PROMETHEUS / "rules" / "tests" / "alerts.yml"


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules of a kind: `alert` or `record`."""
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def anchors(page: Path) -> set[str]:
    """Anchors of a Markdown page's headings, as GitHub makes them for one word."""
    return {line.lstrip("#").strip().lower() for line in page.read_text().splitlines() if line.startswith("#")}


ALERTS = [rule["alert"] for rule in rules("alert")]


@pytest.mark.parametrize(
    "arguments",
    [["check", "config", "prometheus.yml"], ["check", "rules", *map(str, RULES)], ["test", "rules", str(TESTS)]],
    ids=" ".join,
)
def test_promtool_finds_nothing_wrong(arguments: list[str]) -> None:
    done = subprocess.run([program("promtool"), *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_an_alert_leads_to_its_runbook_entry(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(ROOT / page)
    assert rule["labels"]["severity"] in {"page", "ticket", "info"}


def test_the_runbook_has_no_entry_without_an_alert() -> None:
    entries = {anchor for anchor in anchors(OPERATIONS) if anchor.startswith("askimage")}
    assert entries == {alert.lower() for alert in ALERTS}


def test_the_runbook_links_to_entries_and_names_settings_that_exist() -> None:
    text = OPERATIONS.read_text()
    assert set(re.findall(r"\(#(\w+)\)", text)) <= anchors(OPERATIONS)
    assert set(re.findall(r"ASKIMAGE_\w+", text)) <= variables().keys()


def test_each_alert_fires_in_one_of_promtools_tests_and_does_not_in_another() -> None:
    checks = [check for test in yaml.safe_load(TESTS.read_text())["tests"] for check in test["promql_expr_test"]]
    firing = {alert for check in checks for alert in ALERTS if f'"{alert}"' in str(check["exp_samples"])}
    assert firing == set(ALERTS)
    # The expressions name no alert, so that one that has no business in a test makes it fail.
    assert not [check["expr"] for check in checks if any(alert in check["expr"] for alert in ALERTS)]
    assert {"count by (alertname) (ALERTS)"} <= {check["expr"] for check in checks if not check["exp_samples"]}


def test_names_of_rules_are_unique() -> None:
    names = ALERTS + [rule["record"] for rule in rules("record")]
    assert len(names) == len(set(names))
