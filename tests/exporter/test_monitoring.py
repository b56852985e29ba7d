"""The alert rules and the dashboard ask for metrics and labels that the exporter's page has, and for nothing else."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from durable_core.exporter.metrics import METRICS, Series, Type, exposed
from durable_core.exporter.page import rendered

DOCS = Path(__file__).resolve().parents[2] / "docs"
ALERTS = yaml.safe_load((DOCS / "monitoring" / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
BOARD = json.loads((DOCS / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))
RUNBOOK = DOCS / "runbook.md"

LABELS_OF = {
    name: {*metric.labels, *({"le"} if name.endswith("_bucket") and metric.type is Type.HISTOGRAM else ())}
    for metric in METRICS
    for name in exposed(metric)
}
SELECTOR = re.compile(r"\b(durable_\w+)(?:\{([^}]*)\})?")


def asked(expression: str) -> set[str]:
    """The metrics of an expression; fails where one, or a label that is asked of it, is not on the page."""
    found = set()
    for name, matchers in SELECTOR.findall(expression):
        assert name in LABELS_OF, f"no metric {name}"
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
            assert label in LABELS_OF[name], f"{name} has no label {label}"
        found.add(name)
    labels = set.union(*(LABELS_OF[name] for name in found)) if found else set()
    for listed in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression):
        assert {label.strip() for label in listed.split(",")} <= labels, expression
    assert expression.count("(") == expression.count(")")
    return found


EXPRESSIONS = {
    **{alert["alert"]: alert["expr"] for alert in ALERTS},
    **{f"{one['title']} {two['refId']}": two["expr"] for one in BOARD["panels"] for two in one["targets"]},
}


@pytest.mark.parametrize("named", EXPRESSIONS)
def test_an_expression_asks_for_what_the_page_has(named):
    assert asked(EXPRESSIONS[named])


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_how_urgent_it_is_and_where_its_runbook_begins(alert):
    assert re.fullmatch(r"Durable([A-Z][a-z]+)+", alert["alert"])
    assert alert["labels"] == {"severity": alert["labels"]["severity"]}
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert re.fullmatch(r"\d+[mh]", alert["for"])
    assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
    shown = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    assert shown <= set.union(*(LABELS_OF[name] for name in asked(alert["expr"])))


def test_each_alert_has_a_name_and_a_heading_of_its_own():
    names = [alert["alert"] for alert in ALERTS]
    assert len(names) == len({name.lower() for name in names})
    if RUNBOOK.exists():
        headings = re.findall(r"^#+ +(.+?)\s*$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(names) <= set(headings)


def test_the_panels_of_the_dashboard_lie_beside_each_other():
    places = {(p["gridPos"]["x"] + dx, p["gridPos"]["y"]) for p in BOARD["panels"] for dx in range(p["gridPos"]["w"])}
    assert len(places) == sum(panel["gridPos"]["w"] for panel in BOARD["panels"])
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    (query,) = [v["query"]["query"] for v in BOARD["templating"]["list"] if v["type"] == "query"]
    assert asked(query)


def test_what_may_wake_a_person_is_watched_for_without_workers_and_without_the_database():
    pages = {alert["alert"] for alert in ALERTS if alert["labels"]["severity"] == "page"}
    assert pages == {"DurableExporterDown", "DurableQueueLate", "DurableNoWorkers", "DurableSweeperStalled"}


@pytest.mark.parametrize("wrong", ["durable_nothing", 'durable_up{queue="a"}', "sum by (host) (durable_paused)"])
def test_an_expression_that_asks_for_more_is_found(wrong):
    with pytest.raises(AssertionError):
        asked(wrong)


# --- by Prometheus' own tool, where a machine has it -------------------------------------------------


@pytest.fixture
def promtool():
    """Prometheus' linter; no package of Python brings it."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool, which comes with Prometheus, is not on this machine")

    def _promtool(*line, page=None):
        done = subprocess.run([found, *line], input=page, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr

    return _promtool


def test_promtool_takes_the_rules_and_they_fire_when_they_are_to(promtool):
    promtool("check", "rules", str(DOCS / "monitoring" / "alerts.yaml"))
    promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yaml")))


def test_promtool_takes_the_expressions_of_the_dashboard(promtool, tmp_path):
    panels = [target["expr"].replace("$queue", ".*") for panel in BOARD["panels"] for target in panel["targets"]]
    rules = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(panels)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "panels.yaml"))


def test_promtool_takes_a_page_on_which_every_metric_stands(promtool):
    series = []
    for metric in METRICS:
        one = Series(metric)
        labels = tuple("x" for _ in metric.labels)
        if metric.type is Type.HISTOGRAM:
            one.observe(labels, 3, 2, 5.0)
        else:
            one.values[labels] = 1.0
        series.append(one)
    promtool("check", "metrics", page=rendered(series, "text/plain")[0].decode())
