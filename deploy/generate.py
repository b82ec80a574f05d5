"""Writes what others want in a form of their own: `python deploy/generate.py`.

Grafana's dashboards from the lists in panels.py, and prometheus/rules.yaml as the Prometheus
operator's PrometheusRule. The suite checks that what is committed is what this makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from panels import DASHBOARDS, Panel

HERE = Path(__file__).parent
# Grafana's grid is 24 wide; three panels stand beside each other.
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
# Lines that others are compared with, by how their legends begin: drawn red and dashed.
_BOUNDS = {"target", "ceiling", "limit", "size"}


def _targets(panel: Panel) -> Iterator[dict[str, Any]]:
    for number, (legend, expression) in enumerate(panel.queries):
        yield {
            "refId": chr(ord("A") + number),
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            # A cell's label comes from the scrape configuration; without one everything is shown.
            "expr": expression.replace("CELL", 'cell=~"$cell"'),
            "legendFormat": legend,
        }


def _graph(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"showPoints": "never"}},
            "overrides": [
                {
                    "matcher": {"id": "byFrameRefID", "options": target["refId"]},
                    "properties": [
                        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
                        {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
                    ],
                }
                for target in _targets(panel)
                if target["legendFormat"].split()[0] in _BOUNDS
            ],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": list(_targets(panel)),
    }


def dashboard(name: str) -> dict[str, Any]:
    """One of DASHBOARDS, as Grafana's JSON."""
    title, rows = DASHBOARDS[name]
    panels, y = list[dict[str, Any]](), 0
    for row in rows:
        place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        panels.append(
            {"type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        )
        y += 1
        for number, panel in enumerate(row.panels):
            down, across = divmod(number * _WIDTH, _COLUMNS)
            place = {"x": across, "y": y + down * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_graph(panel) | {"gridPos": place})
        y += -(-len(row.panels) * _WIDTH // _COLUMNS) * _HEIGHT
    for number, one in enumerate(panels, 1):
        one["id"] = number
    return {
        "uid": f"baton-{name}",
        "title": title,
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Baton",
                "tags": ["baton"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "cell",
                    "label": "Cell",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": {"query": "label_values(baton_workers, cell)", "refId": "cell"},
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "refresh": 2,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def operator_rules() -> str:
    """prometheus/rules.yaml for the Prometheus operator."""
    rules = (HERE / "prometheus" / "rules.yaml").read_text(encoding="utf-8")
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "baton", "labels": {"app.kubernetes.io/name": "baton"}},
        "spec": {"groups": yaml.safe_load(rules)["groups"]},
    }
    about = "# Written by deploy/generate.py from deploy/prometheus/rules.yaml.\n"
    return about + yaml.safe_dump(resource, sort_keys=False, width=1000)


def files() -> dict[Path, str]:
    """Path and text of everything that is written."""
    made = {HERE / "kubernetes" / "monitoring" / "rules.yaml": operator_rules()}
    for name in DASHBOARDS:
        path = HERE / "grafana" / "dashboards" / f"{name}.json"
        made[path] = json.dumps(dashboard(name), indent=1) + "\n"
    return made


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
