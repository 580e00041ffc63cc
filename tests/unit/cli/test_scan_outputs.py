"""`gpunodes health` with --metrics and --notify, on machines that do not respond, on saved logs, and after a repair."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from gpunodes import settings
from gpunodes.cli import health
from gpunodes.engine import fleet as fleets

from tests import repair_fleet
from tests.command import run
from tests.webhooks import receiver

SECRET = "T000-s3cret"
XID79 = "[100.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=a, GPU has fallen off the bus.\n"
SICK = 'gpunodes_machine_health_state{machine="kern.log",state="sick"} 1\n'
LOST = 'gpunodes_machine_health_state{machine="gpu-1",state="unreachable"} 1\n'


def gpunodes(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "hosts.yml").write_text("workers: {hosts: {gpu-1: {ansible_host: 127.0.0.1, ansible_port: 1}}}\n")
    (folder / "kern.log").write_text(XID79)
    given = {"no_proxy": "*", "XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder), **variables}
    return run(folder, *words, variables=given)


def private(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """The address of the webhook is in no output and in no file."""
    assert SECRET not in done.stdout + done.stderr
    for path in folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--metrics", "none/g.prom"), "there is no folder none; wanted: a file in a folder that this user can write"),
        (("--metrics", "g.txt"), "node exporter does not read g.txt; wanted: a name that ends in .prom"),
        (("--metrics", "/proc/g.prom"), "the folder /proc cannot be written"),
        (("--from", "kern.log", "--metrics", "none/g.prom"), "there is no folder none"),
        (
            ("--from", "kern.log", "--notify", f"http://127.0.0.1:1/{SECRET}"),
            "--from reads saved logs; wanted: no --notify",
        ),
        (("--notify", SECRET), "the address for notices is not the URL of a webhook"),
        (("--notify-form", "slack"), "--notify-form is for notices; wanted: --notify, or GPUNODES_NOTIFY_URL"),
        (("--notify-form", "pigeon", "--notify", "http://127.0.0.1:1/"), "pigeon"),
        (("--reboot-hung", "--dry-run", "--metrics", "g.prom"), "--dry-run changes nothing; wanted: no --metrics"),
    ],
)
def test_wrong_input_ends_with_2_before_the_scan(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = gpunodes(tmp_path, "health", "-i", "hosts.yml", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "scanning" not in done.stderr
    assert "a bug in gpunodes" not in done.stderr
    assert SECRET not in done.stderr
    assert not list(tmp_path.glob(".*prom*"))


def test_metrics_of_a_scan(tmp_path: Path) -> None:
    done = gpunodes(tmp_path, "health", "-i", "hosts.yml", "--metrics", "g.prom", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["machines"][0]["state"] == "unreachable"
    text = (tmp_path / "g.prom").read_text()
    assert LOST in text
    assert 'gpunodes_repairs_total{outcome="repaired"} 0\n' in text


def test_metrics_of_saved_logs(tmp_path: Path) -> None:
    # A notice of saved logs is refused; an address in the environment is for other scans.
    variables = {"GPUNODES_NOTIFY_URL": f"http://127.0.0.1:1/{SECRET}"}
    done = gpunodes(tmp_path, "health", "--metrics", "g.prom", "--from", "kern.log", **variables)
    assert done.returncode == 3
    assert "warning" not in done.stderr
    assert SICK in (tmp_path / "g.prom").read_text()
    assert not (tmp_path / "state").exists()


def test_a_change_is_posted_once(tmp_path: Path) -> None:
    with receiver() as (at, received):
        for _ in range(2):
            done = gpunodes(tmp_path, "health", "-i", "hosts.yml", GPUNODES_NOTIFY_URL=f"http://{at}/{SECRET}")
            assert (done.returncode, "warning" in done.stderr) == (3, False)
            private(tmp_path, done)
    ((path, _, body),) = received
    assert path == f"/{SECRET}"
    notice = json.loads(body)
    assert [(each["name"], each["before"], each["state"]) for each in notice["machines"]] == [
        ("gpu-1", "healthy", "unreachable")
    ]
    entries = json.loads(gpunodes(tmp_path, "history", "--json").stdout)["entries"]
    assert [(each["kind"], each["what"]) for each in entries] == [("state", "unreachable")]


def test_the_form_can_be_chosen(tmp_path: Path) -> None:
    with receiver() as (at, received):
        gpunodes(tmp_path, "health", "-i", "hosts.yml", "--notify", f"http://{at}/{SECRET}", "--notify-form", "slack")
    assert json.loads(received[0][2])["text"].startswith("gpu-1: unreachable (was healthy)")


def test_a_failed_notice_is_a_warning(tmp_path: Path) -> None:
    with receiver(lambda handler: handler.send_response(500)) as (at, _):
        done = gpunodes(
            tmp_path,
            "health",
            "-i",
            "hosts.yml",
            "--json",
            "--metrics",
            "g.prom",
            GPUNODES_NOTIFY_URL=f"http://{at}/{SECRET}",
        )
    assert done.returncode == 3
    assert "warning: the notice to 127.0.0.1 failed: it responds with HTTP status 500" in done.stderr
    assert json.loads(done.stdout)["schema"] == "gpunodes.health/1"
    assert LOST in (tmp_path / "g.prom").read_text()
    private(tmp_path, done)


def test_metrics_that_cannot_be_written_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "gpunodes").mkdir()
    (tmp_path / "state" / "gpunodes" / "history.jsonl").mkdir()
    done = gpunodes(tmp_path, "health", "-i", "hosts.yml", "--metrics", "g.prom")
    assert done.returncode == 3
    assert "warning: the history cannot be read" in done.stderr
    assert not (tmp_path / "g.prom").exists()


def test_the_state_after_the_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repair_fleet.hurry(monkeypatch, tmp_path / "state")
    place = repair_fleet.fleet(2, sick=["w1"])
    given = {**settings.defaults(), **place.settings()}
    monkeypatch.setattr(place, "settings", lambda: given)
    monkeypatch.setattr(fleets, "InventoryFleet", lambda *_: place)
    inventory, metrics = tmp_path / "hosts.yml", tmp_path / "g.prom"
    inventory.write_text("control_plane: {hosts: {c1: {}}}\nworkers: {hosts: {w0: {}, w1: {}}}\n")
    words = ["workers", "-i", str(inventory), "--reboot-hung", "--yes", "--metrics", str(metrics)]
    with receiver() as (at, received):
        monkeypatch.setenv("no_proxy", "*")
        done = CliRunner().invoke(health.command, [*words, "--notify", f"http://{at}/{SECRET}"], standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 0), done.output
    assert 'gpunodes_machine_health_state{machine="w1",state="healthy"} 1\n' in metrics.read_text()
    # The scan before the repair is no state to report: the machine was healthy, and is.
    assert received == []
