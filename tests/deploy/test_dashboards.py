"""The boards are what their generator writes, and each panel can be read without its author."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_prometheus import BOARDS, GRAFANA
from test_rules import ALERTS

from support import ROOT

PANELS = [(board["uid"], panel) for board in BOARDS.values() for panel in board["panels"]]


def test_the_boards_are_what_the_generator_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "deploy/grafana/generate.py", str(tmp_path)], cwd=ROOT, check=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in (GRAFANA / "dashboards").iterdir()}
    assert written == committed, "run deploy/grafana/generate.py"


def test_there_is_a_board_for_each_question() -> None:
    names = ("overview", "latency", "engine", "gpu", "images", "errors")
    assert {board["uid"] for board in BOARDS.values()} == {f"askimage-{name}" for name in names}


@pytest.mark.parametrize(
    ("uid", "panel"), PANELS, ids=lambda value: value if isinstance(value, str) else value["title"]
)
def test_a_panel_asks_a_question_and_says_in_what_unit_it_answers(uid: str, panel: dict[str, Any]) -> None:
    assert "?" in panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        assert target["legendFormat"] or panel["type"] == "table"
        assert "$job" in target["expr"] or "ALERTS" in target["expr"] or "objective" in target["expr"]


def test_panels_do_not_overlap() -> None:
    for board in BOARDS.values():
        taken: set[tuple[int, int]] = set()
        for place in (panel["gridPos"] for panel in board["panels"]):
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, board["uid"]
            assert max(x for x, _ in cells) < 24
            taken |= cells


def test_each_alert_has_a_panel_that_leads_to_its_runbook_entry() -> None:
    links = {link["url"] for _, panel in PANELS for link in panel["links"]}
    assert links == {f"${{runbook}}#{alert.lower()}" for alert in ALERTS}


def test_boards_have_the_variables_that_they_use_and_links_to_each_other() -> None:
    for board in BOARDS.values():
        names = {variable["name"] for variable in board["templating"]["list"]}
        assert names >= {"datasource", "job", "instance", "runbook"}
        assert ("class" in names) == ("$class" in str(board["panels"]))
        assert board["links"][0]["tags"] == board["tags"] == ["askimage"]
