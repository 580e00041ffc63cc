"""The built collection in an environment that has Ansible and nothing else of gpunodes.

`make test-package` builds both.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

BUILD = Path(__file__).parents[2] / "build"
ANSIBLE = BUILD / "ansible" / "bin"
pytestmark = pytest.mark.skipif(not ANSIBLE.exists(), reason="needs build/ansible; run `make test-package`")
CONFIG = """[defaults]
callbacks_enabled = gpunodes.bootstrap.printable
inject_facts_as_vars = False
"""
HERE = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the collection, Ansible's settings for it, and an inventory whose only machine is this one."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "ansible.cfg").write_text(CONFIG)
    inventory = {"all": {"vars": HERE, "children": {"control_plane": {"hosts": {"this-machine": {}}}}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    [archive] = BUILD.glob("gpunodes-bootstrap-*.tar.gz")
    ansible(folder, "ansible-galaxy", "collection", "install", "--offline", str(archive))
    return folder


def ansible(home: Path, program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Ansible; its output must not name a Python error."""
    environment = {"PATH": f"{ANSIBLE}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LC_ALL": "C.UTF-8", **more}
    done = subprocess.run(
        [str(ANSIBLE / program), *arguments], cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "Error:" not in done.stderr
    return done


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
