"""Alert rules, scrape configuration and dashboard: they use metrics that exist, and the rules fire."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.health.model import State
from gpunodes.views import metrics

from tests.unit.test_addon_role import with_settings

FOLDER = Path(__file__).parents[2] / "roles" / "addon" / "files" / "monitoring"
RULES = FOLDER / "rules.yml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's package prometheus) is not installed")

SICK = 'gpunodes_machine_health_state{machine="gpu-1",state="hung"}'
LOST = 'gpunodes_machine_health_state{machine="gpu-2",state="unreachable"}'
# Alert -> series and their values for an hour, when it is looked at, and the labels of its machine.
FIRING: dict[str, tuple[list[tuple[str, str]], str, dict[str, str]]] = {
    "GpunodesMachineSick": ([(SICK, "1x60")], "1m", {"machine": "gpu-1", "state": "hung"}),
    "GpunodesMachineUnreachable": ([(LOST, "1x60")], "20m", {"machine": "gpu-2", "state": "unreachable"}),
    "GpunodesMachineDegraded": (
        [(SICK.replace("hung", "degraded"), "1x60")],
        "40m",
        {"machine": "gpu-1", "state": "degraded"},
    ),
    "GpunodesMachineNeedsRepair": (
        [('gpunodes_machine_needs_repair{machine="gpu-1"}', "1x60")],
        "1m",
        {"machine": "gpu-1"},
    ),
    "GpunodesGpusMissing": (
        [('gpunodes_gpus_seen{machine="gpu-1"}', "7x60"), ('gpunodes_gpus_expected{machine="gpu-1"}', "8x60")],
        "10m",
        {"machine": "gpu-1"},
    ),
    "GpunodesScanTooOld": ([("gpunodes_scan_timestamp_seconds", "0x200")], "2h", {}),
    "GpunodesScanMissing": ([("up", "1x200")], "2h", {}),
    "GpunodesScanFails": ([("gpunodes_scan_failures_total", "0+1x60")], "40m", {}),
}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard_queries() -> Iterator[str]:
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def promtool(*arguments: str | Path) -> None:
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_dashboard_use_metrics_and_states_that_exist() -> None:
    known = {metric.name for metric in metrics.METRICS}
    queries = [*(rule["expr"] for rule in rules()), *dashboard_queries()]
    assert queries
    used = {name for query in queries for name in re.findall(r"\bgpunodes_\w+", query)}
    assert used <= known
    states = {
        state for query in queries for given in re.findall(r'state=~?"([^"]+)"', query) for state in given.split("|")
    }
    assert states == {state.value for state in State}


UNITS = {"s", "short", "none", "percent", "percentunit", "bytes"}
"""Those of Grafana that the dashboard may use: it shows any other word behind the number."""


def test_the_dashboard_s_panels_are_a_grid_with_known_units_and_one_data_source() -> None:
    board = json.loads((FOLDER / "dashboard.json").read_text())
    variables = {each["name"]: each["type"] for each in board["templating"]["list"]}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        assert 0 <= x < x + w <= 24, panel["title"]
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert cells, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        overrides = [one for each in panel["fieldConfig"]["overrides"] for one in each["properties"]]
        units = [one["value"] for one in overrides if one["id"] == "unit"]
        assert {panel["fieldConfig"]["defaults"].get("unit", "none"), *units} <= UNITS
    assert variables["datasource"] == "datasource"
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(panels)))
    assert used <= set(variables)


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in {"critical", "warning"}


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", RULES)


@needs_promtool
def test_promtool_accepts_the_dashboard_s_queries(tmp_path: Path) -> None:
    queries = [query.replace("$machine", ".*") for query in dashboard_queries()]
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", path)


def test_every_alert_has_a_case() -> None:
    assert list(FIRING) == [rule["alert"] for rule in rules()]


@needs_promtool
@pytest.mark.parametrize("alert", FIRING)
def test_alerts_fire_and_end(tmp_path: Path, alert: str) -> None:
    series, moment, labels = FIRING[alert]
    (rule,) = [rule for rule in rules() if rule["alert"] == alert]
    tests = [
        case(alert, series, moment, [{"exp_labels": {**labels, **rule["labels"]}}]),
        case(alert, HEALTHY, moment, []),
    ]
    path = tmp_path / "test.yml"
    # The texts of annotations are not part of these cases.
    plain = [{key: value for key, value in each.items() if key != "annotations"} for each in rules()]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "gpunodes", "rules": plain}]}))
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", path)


HEALTHY = [
    ('gpunodes_machine_health_state{machine="gpu-1",state="healthy"}', "1x200"),
    (SICK, "0x200"),
    (LOST, "0x200"),
    ('gpunodes_machine_needs_repair{machine="gpu-1"}', "0x200"),
    ('gpunodes_gpus_seen{machine="gpu-1"}', "8x200"),
    ('gpunodes_gpus_expected{machine="gpu-1"}', "8x200"),
    ("gpunodes_scan_failures_total", "0x200"),
    ("gpunodes_scan_timestamp_seconds", "0+60x200"),
]


def case(alert: str, series: list[tuple[str, str]], moment: str, expected: list[dict[str, Any]]) -> dict[str, Any]:
    """A case for `promtool test rules`."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "alert_rule_test": [{"eval_time": moment, "alertname": alert, "exp_alerts": expected}],
    }


def configuration(folder: Path, **settings: Any) -> Path:
    """The configuration of the add-on monitoring, as one file: promtool 2.42 knows no scrape_config_files."""
    [made] = [
        each["data"]
        for each in with_settings("monitoring", **settings)
        if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", "prometheus")
    ]
    for name, text in made.items():
        (folder / name).write_text(text)
    main = yaml.safe_load(made["prometheus.yml"])
    for name in main.pop("scrape_config_files"):
        main["scrape_configs"] += yaml.safe_load(made[name])["scrape_configs"]
    path = folder / "whole.yml"
    path.write_text(yaml.safe_dump(main))
    return path


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return {each["job_name"]: each for each in yaml.safe_load(path.read_text())["scrape_configs"]}


@needs_promtool
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gpunodes_serving_certificates": "no"},
        {"gpunodes_monitoring_targets": []},
        {"gpunodes_monitoring_alertmanagers": ["alerts.example:9093"]},
    ],
    ids=str,
)
def test_promtool_accepts_the_configuration_of_the_add_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = configuration(tmp_path, **settings)
    whole = yaml.safe_load(path.read_text())
    for job in whole["scrape_configs"]:
        # Debian builds Prometheus without the discovery by Kubernetes.
        for found in job.pop("kubernetes_sd_configs", ()):
            assert set(found) <= {"role", "namespaces", "selectors"}
            assert found["role"] in {"node", "pod"}
    path.write_text(yaml.safe_dump(whole))
    promtool("check", "config", "--syntax-only", path)


def test_kubelets_are_scraped_only_where_their_certificates_can_be_verified(tmp_path: Path) -> None:
    with_them = jobs(configuration(tmp_path))
    without = jobs(configuration(tmp_path, gpunodes_serving_certificates="no"))
    assert set(with_them) - set(without) == {"kubelet", "cadvisor"}
    for each in with_them.values():
        assert "insecure_skip_verify" not in str(each)
        assert ("authorization" in each) is (each.get("scheme") == "https") is ("ca_file" in str(each))


@pytest.mark.long
def test_without_metrics_of_gpunodes_there_are_no_alerts_about_them(tmp_path: Path) -> None:
    made = yaml.safe_load(configuration(tmp_path).read_text())
    assert (made["rule_files"], "gpunodes" in jobs(tmp_path / "whole.yml")) == (["rules.yml"], True)
    made = yaml.safe_load(configuration(tmp_path, gpunodes_monitoring_targets=[]).read_text())
    assert ("rule_files" in made, "gpunodes" in jobs(tmp_path / "whole.yml")) == (False, False)


def test_no_machine_reports_metrics_of_another_kind(tmp_path: Path) -> None:
    """A machine chooses what its exporters say: not the health of others."""
    kept = {
        "gpunodes": "gpunodes_x",
        "node-exporter": "node_x",
        "kube-state-metrics": "kube_x",
        "dcgm-exporter": "DCGM_x",
    }
    for name, job in jobs(configuration(tmp_path)).items():
        if name == "prometheus":
            continue
        for job_of, metric in kept.items():
            rules_of = [(each["action"], each["regex"]) for each in job["metric_relabel_configs"]]
            is_kept = all((re.fullmatch(regex, metric) is not None) is (action == "keep") for action, regex in rules_of)
            assert is_kept is (job_of == name), (name, metric)
        assert job.get("honor_labels", False) is False
        if name in {"node-exporter", "dcgm-exporter", "kubelet", "cadvisor"}:
            assert {"sample_limit", "body_size_limit", "label_value_length_limit"} <= set(job)
