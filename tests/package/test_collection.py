"""The built collection with Ansible alone, on this machine; tests/machines runs it on machines of the lab."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests import collection

pytestmark = pytest.mark.skipif(
    not collection.ENVIRONMENT.exists(), reason="needs build/ansible; run `make test-package`"
)
HERE = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with Ansible's settings for the collection, and an inventory whose only machine is this one."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "ansible.cfg").write_text(collection.CONFIG)
    inventory = {"all": {"vars": HERE, "children": {"control_plane": {"hosts": {"this-machine": {}}}}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    return folder


def ansible(home: Path, program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Ansible; its output must not name a Python error."""
    done = collection.run(home, program, *arguments, environment=environment)
    assert "Traceback" not in done.stdout + done.stderr
    assert "Error:" not in done.stderr
    return done


def test_every_module_of_the_plugins_is_in_the_archive() -> None:
    """Each file that they import can be imported, with nothing of gpunodes but the archive."""
    folder = collection.ENVIRONMENT / "collections/ansible_collections/gpunodes/bootstrap/plugins/plugin_utils"
    names = [
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for path in folder.rglob("*.py")
    ]
    assert {"gpunodes.planner.desired", "gpunodes.identity.matcher", "gpunodes.health.judge"} <= set(names)
    program = f"import importlib\nfor name in {sorted(names)}: importlib.import_module(name)"
    python = [str(collection.ENVIRONMENT / "bin/python"), "-c", program]
    subprocess.run(python, cwd=folder, env={"PYTHONDONTWRITEBYTECODE": "1"}, check=True)


def test_a_playbook_reads_and_checks_a_machine(home: Path) -> None:
    """Preflight judges this machine by the tables that the collection brings; in check mode nothing changes."""
    done = ansible(home, "ansible-playbook", "-i", "hosts.yml", "--check", "gpunodes.bootstrap.init_master")
    assert "TASK [gpunodes.bootstrap.settings : Read the machine]" in done.stdout
    assert "TASK [gpunodes.bootstrap.preflight : Check all machines]" in done.stdout
    assert "this-machine" in done.stdout.partition("Check all machines]")[2]


def test_a_playbook_without_the_callback_is_refused(home: Path) -> None:
    (home / "bare.cfg").write_text("[defaults]\ninject_facts_as_vars = False\n")
    playbook = ("ansible-playbook", "-i", "hosts.yml", "gpunodes.bootstrap.facts")
    done = ansible(home, *playbook, ANSIBLE_CONFIG="bare.cfg")
    assert done.returncode != 0
    assert "including its callback gpunodes.bootstrap.printable" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["host", "cluster_info", "kubeadm_join"])
def test_modules_have_documentation(home: Path, name: str) -> None:
    assert f"gpunodes.bootstrap.{name}" in ansible(home, "ansible-doc", f"gpunodes.bootstrap.{name}").stdout


def test_settings_have_documentation(home: Path) -> None:
    done = ansible(home, "ansible-doc", "-t", "role", "gpunodes.bootstrap.settings")
    assert "gpunodes_kubernetes_version" in done.stdout
