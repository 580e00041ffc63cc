"""HTTP proxies from the inventory to the modules, by Ansible itself; and what of the controller uses no proxy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes.ansible.module_utils.host import keys
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.proxies import Proxies
from gpunodes.engine import runner
from gpunodes.engine.power import Access, PowerProblem, kinds

from tests import forward_proxy, redfish
from tests.playbooks import FOLDER, roles_of

pytestmark = pytest.mark.long

SECRET = "s%40fe!word"
INVENTORY = {
    "control_plane": {"hosts": {"control-1": {"ansible_host": "192.0.2.1"}}},
    "workers": {"hosts": {"worker-1": {"ansible_host": "192.0.2.2"}, "worker-2": {"ansible_host": "198.51.100.9"}}},
    "all": {
        "vars": {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "gpunodes_http_proxy": f"http://builder:{SECRET}@proxy.test:3128",
            "gpunodes_no_proxy": ["192.0.2.0/24"],
            "gpunodes_control_plane_endpoint": "api.test:6443",
        }
    },
}
PLAY = """
- hosts: worker-1
  gather_facts: false
  module_defaults: %s
  roles:
    - role: settings
      tags: never
  tasks:
    - ansible.builtin.debug:
        msg: "{{ {'found': [settings_proxies, desired_proxies, desired_endpoint]} | to_json }}"
    - gpunodes.bootstrap.host:
        wanted: {services: [{name: containerd, proxied: true}], proxies: "{{ settings_proxies }}"}
      check_mode: true
      diff: true
"""


def plays_that_prepare() -> list[tuple[str, dict[str, Any]]]:
    plays = [(path.name, play) for path in FOLDER.glob("*.yml") for play in yaml.safe_load(path.read_text())]
    return [(name, play) for name, play in plays if "host_diff" in {role["role"] for role in roles_of(play)}]


def test_every_play_that_prepares_machines_passes_the_credentials() -> None:
    plays = plays_that_prepare()
    names = {"gpu_install.yml", "init_master.yml", "join.yml", "prepare.yml", "registration.yml", "up.yml"}
    assert {name for name, _ in plays} == names
    option = {"proxy_credentials": "{{ settings_proxy_credentials }}"}
    for _, play in plays:
        assert play["module_defaults"] == {f"gpunodes.bootstrap.{name}": option for name in ("host", "host_diff")}


def played(folder: Path, defaults: Any) -> subprocess.CompletedProcess[str]:
    inventory = folder / "hosts.yml"
    inventory.write_text(yaml.safe_dump(INVENTORY))
    (folder / "play.yml").write_text(PLAY % json.dumps(defaults))
    wiring = ["--extra-vars", f"@{FOLDER}/group_vars/all.yml"]
    return subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-vvv", "-i", inventory, *wiring, folder / "play.yml"],
        env={**os.environ, **runner.environment(inventory), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_password_reaches_the_module_and_no_output(tmp_path: Path) -> None:
    (_, play), *_ = plays_that_prepare()
    done = played(tmp_path, play["module_defaults"])
    assert done.returncode == 0, done.stdout
    line = next(line for line in done.stdout.splitlines() if '"msg":' in line and "found" in line)
    settings, desired, endpoint = json.loads(json.loads("{" + line.strip().rstrip(",") + "}")["msg"])["found"]
    assert settings == desired
    assert endpoint == "api.test:6443"
    assert settings["https"] == "http://{credentials}@proxy.test:3128"
    # The machines in an excepted network need no entries of their own.
    assert settings["no_proxy"][-4:] == ["control-1", "worker-1", "worker-2", "198.51.100.9"]
    assert "192.0.2.0/24" in settings["no_proxy"]
    assert "proxy-containerd.env" in done.stdout
    assert SECRET not in done.stdout + done.stderr


def test_a_play_without_the_credentials_fails(tmp_path: Path) -> None:
    done = played(tmp_path, {})
    assert done.returncode != 0
    assert "the credentials of the proxy http://proxy.test:3128 are missing" in done.stdout
    assert SECRET not in done.stdout + done.stderr


def test_a_bmc_is_never_reached_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """BMCs are in a management network; sushy uses requests, which by default obeys these variables."""

    with forward_proxy.running() as proxy:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        server = redfish.fake("obeys")
        access = Access("redfish", f"http://127.0.0.1:{server.server_port}", user="a", password="b")
        assert kinds.connect("gpu-1", access).state()
        server.shutdown()
        server.server_close()
        with pytest.raises(PowerProblem):
            kinds.connect("gpu-1", Access("redfish", "127.0.0.2:9", user="a", password="b")).state()
        assert proxy.records == []


def test_the_proxy_of_tests_is_a_program_too(tmp_path: Path) -> None:
    """A machine test runs it on the host of the lab; it ends with its standard input."""
    (tmp_path / "credentials").write_text("a:b\n")
    options = ["--port=0", f"--credentials-file={tmp_path / 'credentials'}", "--host=mirror.test=127.0.0.1"]
    started = subprocess.Popen(
        [sys.executable, forward_proxy.__file__, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with started:
        assert started.stdout
        address = json.loads(started.stdout.readline())["listening"]
        for credentials in ("", "a:b@"):
            url = address.replace("//", f"//{credentials}")
            with pytest.raises(MachineProblem):
                keys.fetch("http://mirror.test:9/", Proxies(url, url))
        out, _ = started.communicate("", timeout=30)
    assert [json.loads(line)["status"] for line in out.splitlines()] == [407, 502]
