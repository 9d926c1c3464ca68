"""Boards and panels as the dictionaries that Grafana 10 and later read, and the PromQL that they have in common.

A panel answers one question, which is its description. A panel whose alert fires leads to the alert's runbook.
"""

from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]

RUNBOOK = "docs/operations.md"  # where those who read the boards find it; an address is better
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = 'job="$job", instance=~"$instance"'
COLUMNS = 24


def only(name: str, also: str = "") -> str:
    """A series of the chosen instances; `also` is further matchers."""
    return f"{name}{{{CHOSEN}{', ' + also if also else ''}}}"


def recorded(name: str, also: str = "") -> str:
    """What a recording rule made; those are over all instances of the job."""
    return f'{name}{{job="$job"{", " + also if also else ""}}}'


def rate(name: str, by: str = "", also: str = "") -> str:
    """Rise per second, added up by label."""
    return f"sum{f' by ({by})' if by else ''} (rate({only(name, also)}[$__rate_interval]))"


def mean(name: str, also: str = "") -> str:
    """Mean observation of a histogram."""
    return f"{rate(name + '_sum', also=also)} / {rate(name + '_count', also=also)}"


def quantiles(name: str, by: str = "", also: str = "", shares: Iterable[float] = (0.5, 0.99)) -> list[tuple[str, str]]:
    """Queries for quantiles of a histogram, by label."""
    labels = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",") if label)
    grouped = rate(f"{name}_bucket", f"{by}, le" if by else "le", also)
    return [(f"histogram_quantile({share:g}, {grouped})", f"{labels} p{share * 100:g}".strip()) for share in shares]


def share(part: str, whole: str) -> str:
    """Part of a whole, 0-1; 0 while there is nothing to have a part of."""
    return f"{part} / ({whole} > 0) or vector(0)"


def panel(
    title: str,
    question: str,
    queries: Sequence[tuple[str, str]],
    unit: str = "short",
    *,
    kind: str = "timeseries",
    alerts: Sequence[str] = (),
    limit: float | None = None,
    stacked: bool = False,
) -> Json:
    """One panel.

    Args:
        title: What it shows.
        question: What it answers.
        queries: Pairs of PromQL and legend.
        unit: Grafana's name of the unit.
        kind: Grafana's name of the panel type.
        alerts: Alerts whose runbook entries it links.
        limit: Where an alert's bound lies; drawn as a line, or colours a figure.
        stacked: Whether the series add up to something.
    """
    steps: list[Json] = [{"color": "green", "value": None}]
    if limit is not None:
        steps.append({"color": "red", "value": limit})
    defaults: Json = {"unit": unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    options: Json
    if kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 30 if stacked else 0,
            "stacking": {"mode": "normal" if stacked else "none"},
            "thresholdsStyle": {"mode": "off" if limit is None else "line"},
        }
        legend = {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"], "showLegend": True}
        options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    elif kind == "heatmap":
        options = {"calculate": False, "yAxis": {"unit": unit}, "color": {"mode": "scheme", "scheme": "Blues"}}
    elif kind == "table":
        options = {"showHeader": True}
    else:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    return {
        "type": kind,
        "title": title,
        "description": question,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "links": [
            {"title": f"Runbook: {alert}", "url": f"${{runbook}}#{alert.lower()}", "targetBlank": True}
            for alert in alerts
        ],
        "targets": [
            _target(letter, query, legend, kind) for letter, (query, legend) in zip("ABCDEFGH", queries, strict=False)
        ],
    }


def _target(letter: str, query: str, legend: str, kind: str) -> Json:
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "expr": query,
        "legendFormat": legend,
        "format": {"table": "table", "heatmap": "heatmap"}.get(kind, "time_series"),
        "instant": kind == "table",
        "range": kind != "table",
        "exemplar": kind == "timeseries" and "_bucket" in query,
    }


def board(name: str, title: str, about: str, *rows: Sequence[Json], variables: Sequence[Json] = ()) -> Json:
    """A dashboard of rows, each of which shares the width among its panels.

    Args:
        name: End of its address.
        title: Its title.
        about: What one looks at it for.
        rows: Panels from the top down.
        variables: Variables beside those that all boards have.
    """
    panels: list[Json] = []
    top = 0
    for row in rows:
        width, height = COLUMNS // len(row), 5 if all(each["type"] == "stat" for each in row) else 9
        for column, each in enumerate(row):
            place = {"x": column * width, "y": top, "w": width, "h": height}
            panels.append({"id": len(panels) + 1, "gridPos": place} | each)
        top += height
    return {
        "uid": f"askimage-{name}",
        "title": f"askimage / {title}",
        "description": about,
        "tags": ["askimage"],
        "schemaVersion": 38,  # Grafana 10.0; later ones bring it up to date when they load it
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "links": [
            {"type": "dashboards", "title": "askimage", "tags": ["askimage"], "includeVars": True, "keepTime": True}
        ],
        "templating": {"list": [*_VARIABLES, *variables]},
        "panels": panels,
    }


def _query_variable(name: str, label: str, query: str, **more: Any) -> Json:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        **more,
    }


def choice(name: str, label: str, values: Sequence[str]) -> Json:
    """A variable with fixed values, any number of which may be chosen."""
    everything = {"text": "All", "value": "$__all"}
    options = [everything, *({"text": each, "value": each} for each in values)]
    return {
        "type": "custom",
        "name": name,
        "label": label,
        "query": ",".join(values),
        "options": [{"selected": each is everything} | each for each in options],
        "current": {"text": ["All"], "value": ["$__all"]},
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
    }


_VARIABLES = (
    {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"},
    _query_variable("job", "Job", "label_values(askimage_engine_state, job)"),
    _query_variable(
        "instance",
        "Instance",
        'label_values(askimage_engine_state{job="$job"}, instance)',
        multi=True,
        includeAll=True,
        allValue=".*",
        current={"text": ["All"], "value": ["$__all"]},
    ),
    {"type": "constant", "name": "runbook", "query": RUNBOOK, "hide": 2},
)
