"""To which kubelet a worker returns: by its facts, its ledger, and the upgrade that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

ROOT = Path(__file__).parents[2]


def rendered(name: str, **more: Any) -> str:
    """A variable of the playbooks, with further variables."""
    wiring = DataLoader().load_from_file(str(ROOT / "playbooks/group_vars/all.yml"), trusted_as_template=True)
    return str(Templar(DataLoader(), variables=wiring | more).template(wiring[name]))


@pytest.mark.parametrize(
    ("installed", "before", "target", "expected"),
    [
        # Nothing was replaced: it stays, whatever an earlier upgrade left in the ledger.
        ("1.36.3-1.1", "1.35.4", "1.37.2", "1.36.3"),
        ("1.36.3-150500.1.1", "", "1.37.2", "1.36.3"),
        # The kubelet was replaced, or half of it: the ledger was written before.
        ("1.37.2-1.1", "1.36.3", "1.37.2", "1.36.3"),
        (None, "1.36.3", "1.37.2", "1.36.3"),
        # `gpunodes upgrade rollback` has no target.
        ("1.37.2-1.1", "1.36.3", "", "1.36.3"),
        ("{{ lookup('pipe', 'id') }}", "1.36.3", "1.37.2", "1.36.3"),
        ("1.36.3.4", "", "1.37.2", ""),
    ],
)
def test_a_worker_returns_to_the_kubelet_that_it_had_when_the_upgrade_began(
    installed: str | None, before: str, target: str, expected: str
) -> None:
    machine = {"packages": {"kubelet": installed}, "kubernetes": {"before": before}}
    given = {"settings_machine": machine, "ansible_run_tags": ["undo"]} | ({"upgrade_target": target} if target else {})
    assert rendered("upgrade_undo_version", **given) == expected
    assert rendered("desired_target", **given) == expected


def test_the_command_that_returns_a_worker_fetches_the_older_packages_first() -> None:
    machine = {"packages": {"kubelet": "1.36.3-1.1"}, "kubernetes": {"before": "1.35.4"}}
    given = {"settings_machine": machine, "ansible_run_tags": ["prepare"], "wiring_docker": False, "group_names": []}
    assert rendered("upgrade_prepare_version", **given, upgrade_returns=True) == "1.35.4"
    assert rendered("desired_target", **given, upgrade_returns=True) == "1.35.4"
    assert rendered("upgrade_prepare_images", **given, upgrade_returns=True) == "[]"
    assert rendered("upgrade_prepare_version", **given, upgrade_target="1.37.2") == "1.37.2"
    check, fetch = yaml.safe_load((ROOT / "playbooks/tasks/upgrade_prepare.yml").read_text())
    assert check["ansible.builtin.import_role"] == {"name": "upgrade_undo", "tasks_from": "check"}
    assert check["when"] == "wiring_upgrade_returns"
    assert fetch["ansible.builtin.import_role"] == {"name": "upgrade_prepare"}


def test_a_worker_that_returns_must_report_the_version() -> None:
    """Its node may still be Ready of the newer kubelet."""
    *_, last = yaml.safe_load((ROOT / "playbooks/tasks/upgrade_undo.yml").read_text())
    assert last["ansible.builtin.import_role"] == {"name": "upgrade_verify"}
    assert last["vars"] == {
        "upgrade_verify_kubelet": "{{ wiring_upgrade_version }}",
        "upgrade_verify_daemons": False,
    }
    machine = {"packages": {"kubelet": "1.37.2-1.1"}, "kubernetes": {"before": "1.36.3"}}
    given = {"settings_machine": machine, "ansible_run_tags": ["undo"], "upgrade_target": "1.37.2"}
    assert rendered("wiring_upgrade_version", **given) == "1.36.3"
