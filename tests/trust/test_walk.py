"""Every playbook and command with machines and a cluster whose every string is an attack: no attack runs.

Ansible is real; the machines are stand-ins (tests/hostile.py), since no real machine reports all attacks at once.
tests/machines has one that does.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes import cli, kubeconfig
from gpunodes.cli import (
    addon,
    autoscale,
    certs,
    endpoint,
    etcd,
    gpu,
    jupyter,
    maintenance,
    operating_system,
    provision,
    registry,
    rollout,
    runtime,
    storage,
    upgrade,
)
from gpunodes.cli.gpu import upgrade as gpu_upgrade
from gpunodes.engine import runner
from gpunodes.inventory import Inventory
from gpunodes.model import Event, TaskEnded, printable

from tests.hostile import ATTACKS, CANARY, PIN, Machines, cluster_report, hostile, machine_report, machines, unprintable
from tests.trust.test_scans import WALKED

ROOT = Path(__file__).parents[2]
PLAYBOOKS = sorted(path.name for path in (ROOT / "playbooks").glob("*.yml"))
MACHINES = ("control-1", "worker-1", "worker-2")
"""The machines of most inventories."""
NODES = ("control-1", "worker-2")
NUMBERS = {name: number for number, name in enumerate((*MACHINES, *(f"worker-{more}" for more in range(3, 7))), 1)}
GROUPS = {"control_plane": ["control-1"], "workers": ["worker-1", "worker-2"], "storage": ["worker-2"]}
SHARES = {"gpunodes_storage": [{"name": "training", "path": "/srv/training", "size": "1Gi"}]}
REGISTRY = {"address": "10.96.0.15:5000", "ca": "-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----\n"}
SETTINGS = {"gpunodes_gpu_reboot": False, "gpunodes_cuda_versions": ["13.0"]}
SHOWN = ATTACKS[1]
PENDING = ["node", "containerd", "kubernetes", "docker", "cri_dockerd", "gpu_driver", "cuda", "container_toolkit"]
"""The parts that the machines report as pending."""
ACTING = (
    "certificates_renewed",
    "control_plane_settings",
    "docker_images",
    "etcd_restore_aborted",
    "etcd_restored",
    "etcd_stopped",
    "gpu_idle",
    "host_undo",
    "kube_objects",
    "kubeadm_init",
    "kubeadm_join",
    "kubeadm_join_control_plane",
    "kubeadm_reset",
    "etcd_member",
    "nfs_unmounted",
    "nfs_unused",
    "node_removed",
    "prepared",
    "shared_folders",
    "storage_claims",
)
LEVEL = {"level": "kubelet", "state": "failed", "fact": "none", "wanted": "one", "remedy": "look"}


def report(name: str, shown: str = SHOWN) -> dict[str, Any]:
    """A machine's valid report: only its free text is hostile. Those that are not among NODES are in no cluster."""
    made = machine_report(name, NUMBERS[name], swap=list(ATTACKS))
    made |= {"product_uuid": name + ATTACKS[0], "machine_id": name + ATTACKS[1]}
    made["os"]["name"] = shown
    # A command may read it minutes later, on a controller with much work: then its clock would be behind.
    made["time"] += 55
    made["sources"] = [{"name": ATTACKS[1], "url": ATTACKS[2], "ok": True, "error": ATTACKS[3]}]
    if name in NODES:
        role = "control_plane" if name == "control-1" else "worker"
        made["kubernetes"] = {"role": role, "ca_hash": PIN, "server": ATTACKS[1]}
    return made


BURN_IN = {
    "tool": ATTACKS[0],
    "summary": ATTACKS[1],
    "failed": ATTACKS[2],
    "refused": "",
    "seconds": 1.0,
    "results": [{"test": ATTACKS[3], "gpu": ATTACKS[4], "state": "failed", "message": ATTACKS[5]}],
}


def certificates(shown: str = SHOWN) -> list[dict[str, Any]]:
    own = {"name": "apiserver", "path": "/etc/kubernetes/pki/apiserver.crt", "subject": shown, "problem": shown}
    return [{**own, "not_after": end, "renewal": "renew"} for end in (None, -(1 << 62), 0, 1 << 62)]


def drift(shown: str = SHOWN) -> dict[str, Any]:
    """Differences of which every free text is an attack."""
    one = {"component": shown, "name": shown, "running": shown, "wanted": None, "kind": "foreign"}
    return {"managed": True, "problem": "", "unverified": True, "left_out": 1, "differences": [one]}


def kubelets(shown: str = SHOWN) -> dict[str, Any]:
    """Settings of kubelets; the values, and the reasons of those that did not respond, are free text."""
    found = {"featureGates": '{"AllBeta": true}', "podPidsLimit": json.dumps(shown), "providerID": json.dumps(shown)}
    return {
        "problem": "",
        "cluster": {"cgroupDriver": json.dumps(shown)},
        "nodes": {"control-1": found},
        "silent": {"worker-2": shown},
    }


def cluster(shown: str = SHOWN, names: Sequence[str] = NODES) -> dict[str, Any]:
    made = cluster_report({name: NUMBERS[name] for name in names})
    made["certificates"] = certificates(shown)
    for node in made["nodes"]:
        node |= {"ready": False, "reason": shown, "product_uuid": node["name"] + ATTACKS[0], "machine_id": ATTACKS[1]}
        node |= {"uid": ATTACKS[1], "addresses": list(ATTACKS), "maintenance": shown}
        node["managed"]["labels"] = {
            **dict.fromkeys(("gpunodes.dev/pool", "gpunodes.dev/firewall"), shown),
            ATTACKS[1]: ATTACKS[1],
        }
        node["managed"]["taints"] = hostile(node["managed"]["taints"])
    return made


UPGRADE: dict[str, Any] = {
    **dict.fromkeys(("kubeadm", "kubelet"), "1.36.3"),
    **{name: {} for name in ("images", "arguments", "gates", "kubelet_gates", "offered")},
    "kubelet_arguments": [],
    "unpackaged": [],
    "lost": [],
    "unfinished": False,
    "fetched": {"version": "1.36.3", "missing": [], "unasked": ""},
    "deprecated": [],
    "cluster": None,
}
"""A result of upgrade_facts, without its free text."""
ADDON: dict[str, Any] = {"name": "kube-flannel-ds", "wanted": ["flannel:v2"], "running": {"flannel:v1": 3}}


def answers(name: str, shown: str = SHOWN) -> dict[str, Any]:
    """A machine's result of each module, with additional keys in each result.

    ``shown`` is the attack where only one fits.
    """
    more = {
        "ansible_facts": {
            **dict.fromkeys(("ansible_connection", "ansible_host", "ansible_python_interpreter"), "local"),
            **dict.fromkeys(("wiring_node_name", "drain_node", "ready_node", "kubeconfig_path"), "/nowhere"),
            "worker_control_plane": "localhost",
        },
        "warnings": list(ATTACKS),
        "deprecations": [shown],
        "_ansible_verbose_always": True,
        "diff": {"before": ATTACKS[6], "after": ATTACKS[1]},
        "add_host": {"host_name": "evil", "groups": ["control_plane"]},
        "exception": shown,
    }
    own: dict[str, Any] = {
        "host_facts": {"host_facts": report(name, shown)},
        "cluster_info": {"cluster": cluster(shown)},
        "certificate_ends": {"certificates": certificates(shown)},
        "etcd_members": {"etcd": {"problem": shown, "members": []}},
        "control_plane_drift": {"control_plane_drift": drift(shown)},
        "kubelet_settings": {"kubelet_settings": kubelets(shown)},
        "host_diff": {
            "pending": PENDING + list(ATTACKS),
            "versions": {"kubeadm": ATTACKS[1], "containerd": ATTACKS[3]},
        },
        "host": {"actions": list(ATTACKS), "versions": {"kubeadm": ATTACKS[1]}, "reboot": "", "changed": True},
        **{module: {"actions": list(ATTACKS), "notes": list(ATTACKS)} for module in ACTING},
        "join_token": {"token": ATTACKS[1]},
        "addon_pending": {"addons": [{**ADDON, "changes": [shown], "behind": [shown]}]},
        "runtime_pending": {"runtime_pending": {"packages": [], "changes": [shown]}},
        "upgrade_facts": {
            "upgrade_facts": {
                **UPGRADE,
                **dict.fromkeys(("unread", "not_compared", "metrics_unread"), shown),
                "fetched": {**UPGRADE["fetched"], "unasked": shown},
            }
        },
        "join_certificates": {"key": ATTACKS[1], "files": {ATTACKS[2]: ATTACKS[1]}, "required": list(ATTACKS)},
        "node_ready": {"not_ready": {name: shown}},
        "node_pools": {"nodes": list(ATTACKS)},
        "gpu_verify": {"gpu_levels": [hostile({**LEVEL, "state": ""}) | {"state": "ok"}]},
        "gpu_served": {"gpu_nodes": {name: [hostile(LEVEL) | {"state": "failed"}]}},
        "burn_in_taint": {"due": True, "notes": list(ATTACKS)},
        "gpu_burn_in": {"burn_in": BURN_IN, "notes": list(ATTACKS)},
        "gpu_nccl": {"nccl": dict.fromkeys(("summary", "failed", "skipped"), shown)},
        "gpu_probe": {"gpu_probe": hostile({"schema": "gpunodes.probe/1"})},
        "stat": {"stat": {"exists": True}},
        "slurp": {"content": "e3sgbG9va3VwKCdwaXBlJywgJ2dwdW5vZGVzX2NhbmFyeScpIH19", "encoding": "base64"},
    }
    return {module: {**more, **answer} for module, answer in own.items()}


def make(
    folder: Path, monkeypatch: pytest.MonkeyPatch, groups: Mapping[str, list[str]] = GROUPS, **variables: Any
) -> Machines:
    """Machines of which every free text is an attack."""
    made = machines(folder, groups, {**SETTINGS, "gpunodes_kubeconfig_path": str(folder / "admin.conf"), **variables})
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    speak(made)
    return made


def speak(made: Machines, shown: str = SHOWN) -> None:
    for name in NUMBERS:
        for module, answer in answers(name, shown).items():
            made.answer(name, module, answer)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    return make(tmp_path, monkeypatch)


TWO = {"control_plane": ["control-1"], "workers": ["worker-1", "worker-3"]}
"""Two machines that are in no cluster, and a cluster."""
HOSTS = {"gpu_hosts": ["worker-1", "worker-2"]}
"""An inventory without a cluster."""
# Each playbook's modules for GPU hosts.
HOST_WALKS = {
    "facts.yml": "host_facts",
    "gpu_install.yml": "host_facts host_diff host docker_images gpu_verify",
    "gpu_remove.yml": "host_facts host_undo",
    "gpu_verify.yml": "host_facts gpu_verify",
    "health.yml": "gpu_probe",
    "reset.yml": "host_facts kubeadm_reset host_undo",
}


def hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, list[str]], *, nodes: bool = False
) -> Machines:
    """GPU hosts in these groups of an inventory, with a mirror; with ``nodes`` some of them are nodes."""
    made = make(
        folder,
        monkeypatch,
        groups=groups,
        gpunodes_runtime="docker",
        gpunodes_docker_users=["alice"],
        gpunodes_image_mirrors={"nvcr.io": "https://mirror"},
    )
    for name in ("worker-1", "worker-2"):
        found = report(name)
        found["kubernetes"] = found["kubernetes"] if nodes else {"role": None, "ca_hash": None, "server": None}
        made.answer(name, "host_facts", {**answers(name)["host_facts"], "host_facts": found})
    return made


@pytest.mark.parametrize("name", HOST_WALKS)
@pytest.mark.parametrize("control", [[], ["control-1"]], ids=["no cluster", "a cluster beside them"])
def test_a_playbook_with_stand_in_gpu_hosts_needs_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, control: list[str]
) -> None:
    """Plain ansible-playbook contacts the hosts and nothing else, also where the inventory has a control plane."""
    fleet = hosts(tmp_path, monkeypatch, {**HOSTS, **({"control_plane": control} if control else {})})
    done = played(fleet, name, "--limit", "gpu_hosts")
    check(fleet, done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout
    assert modules(fleet) == set(HOST_WALKS[name].split())
    assert {line.partition("/")[0] for line in fleet.asked} == {"worker-1", "worker-2"}


def test_a_stand_in_gpu_host_that_is_a_node_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = hosts(tmp_path, monkeypatch, HOSTS, nodes=True)
    for name, message in (
        ("gpu_install.yml", "worker-2: cluster: it is a node of a cluster"),
        ("gpu_remove.yml", "no control plane can be queried"),
    ):
        output = playbook(fleet, name)
        check(fleet, output)
        assert message in output.replace("\n", " ")
    assert modules(fleet) == {"host_facts"}


def odd(made: Machines) -> Machines:
    """The same machines with an attack in place of every string that they report, names included."""
    for name in NUMBERS:
        for module, answer in answers(name).items():
            made.answer(name, module, hostile(answer))
    return made


def check(made: Machines, output: str) -> None:
    """No attack ran, steered a terminal, wrote its own line, or created a machine or a file."""
    assert not made.ran
    assert unprintable(output) == []
    assert CANARY not in output.splitlines()
    assert {line.partition("/")[0] for line in made.asked} <= set(NUMBERS)
    assert not Path("/nowhere").exists()


def test_no_stand_in_is_queried_without_the_callback_that_makes_text_printable(
    fleet: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ansible continues without a missing callback; gpunodes does not."""
    monkeypatch.setenv("ANSIBLE_CALLBACKS_ENABLED", "none")
    assert "including its callback gpunodes.bootstrap.printable" in playbook(fleet, "facts.yml")
    assert fleet.asked == []


def played(made: Machines, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """ansible-playbook as an administrator calls it, from a checkout."""
    program = Path(sys.executable).parent / "ansible-playbook"
    line = [str(word) for word in (program, "-i", made.inventory, ROOT / "playbooks" / name, *words)]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, cwd=made.folder)


def playbook(made: Machines, name: str, *words: str) -> str:
    """The output of :func:`played`."""
    done = played(made, name, *words)
    return done.stdout + done.stderr


def reason(output: str, name: str) -> str:
    """Why a machine failed, in one line."""
    failed = re.findall(rf"^fatal: \[{name}[]\s].*?=> (.*(?:\n .*)*)", output, re.MULTILINE)
    assert failed, output
    return " ".join(" ".join(failed).split())


def modules(made: Machines) -> set[str]:
    """The modules that were sent to any machine."""
    return {line.partition("/")[2] for line in made.asked}


_FACTS = "host_facts cluster_info "
_PREPARE = "host_diff host kube_objects "
_VERIFY = "gpu_verify gpu_served node_pools "
# Each playbook's exit code with these machines, and its modules.
WALKS = {
    "addon.yml": (0, "cluster_info"),
    "autoscale.yml": (0, "image_loaded kube_objects"),
    "certs.yml": (0, "certificate_ends"),
    "certs_renew.yml": (0, _FACTS + "certificates_renewed"),
    "control_plane_settings.yml": (0, _FACTS + "control_plane_settings"),
    "kubelet_settings.yml": (2, _FACTS + "host node_ready"),
    "controller.yml": (0, ""),
    "drift.yml": (0, "control_plane_drift"),
    "endpoint_set.yml": (0, _FACTS + "api_certificate cluster_endpoint node_endpoint"),
    "etcd_restore.yml": (0, _FACTS + "etcd_stopped etcd_restored"),
    "etcd_restore_abort.yml": (0, _FACTS + "etcd_restore_aborted"),
    "facts.yml": (0, _FACTS),
    # 2: the verification of a node's GPUs fails, or a node is not ready.
    "gpu_burn_in.yml": (2, _FACTS + "burn_in_taint gpu_burn_in"),
    "gpu_install.yml": (2, _FACTS + _PREPARE + _VERIFY),
    "gpu_remove.yml": (0, _FACTS + "gpu_idle host_undo node_pools"),
    # Without the tag of a stage they only read.
    "gpu_upgrade.yml": (0, _FACTS),
    "gpu_verify.yml": (2, _FACTS + "gpu_verify gpu_served"),
    "health.yml": (0, "gpu_probe"),
    "init_master.yml": (2, _FACTS + _PREPARE + "kubeadm_init node_ready"),
    # 2: the control plane, which is a machine of this playbook, too, is not ready.
    "join.yml": (2, _FACTS + _PREPARE + _VERIFY + "join_token kubeadm_join node_ready"),
    # 2: the control plane's kubeconfig is invalid.
    "kubeconfig.yml": (2, "slurp stat"),
    "os_pending.yml": (0, "os_pending"),
    "os_upgrade.yml": (0, _FACTS),
    # 2: two of the machines are nodes already.
    "prepare.yml": (2, "host_facts"),
    "prepare_facts.yml": (0, "host_facts"),
    "registration.yml": (0, _FACTS + "host_diff node_pools"),
    "registry_down.yml": (0, "cluster_info host"),
    "registry_up.yml": (0, _FACTS + "host"),
    "remove.yml": (0, _FACTS + "etcd_member host_undo kubeadm_reset node_removed"),
    "reset.yml": (0, _FACTS + "etcd_member host_undo kubeadm_reset"),
    "revoke.yml": (0, "join_certificates join_token"),
    "runtime_pending.yml": (0, _FACTS + "runtime_pending"),
    "runtime_upgrade.yml": (0, _FACTS),
    "status.yml": (0, "certificate_ends cluster_info control_plane_drift etcd_members kubelet_settings"),
    # 2: without a version; test_an_upgrade_of_hostile_machines has one.
    "upgrade.yml": (2, _FACTS),
    "storage_down.yml": (0, "nfs_unmounted kube_objects host_undo"),
    "storage_server.yml": (0, _FACTS + "host shared_folders command"),
    "storage_up.yml": (0, _FACTS + "host kube_objects wait_for storage_claims"),
    "storage_verify.yml": (0, _FACTS + "wait_for storage_claims"),
    "upgrade_facts.yml": (0, "upgrade_facts"),
    "up.yml": (2, _FACTS + _PREPARE + _VERIFY + "kubeadm_init join_token kubeadm_join node_ready"),
}


def test_every_playbook_is_walked() -> None:
    assert sorted(WALKS) == PLAYBOOKS


def test_a_storage_server_is_asked_for_its_clients_before_it_ends(fleet: Machines) -> None:
    speak(fleet, ATTACKS[0])
    given = json.dumps({**SHARES, "nfs_server_state": "absent"})
    done = played(fleet, "storage_server.yml", "-e", given)
    check(fleet, done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout
    asked = [each.partition("/")[2] for each in fleet.asked]
    assert asked.index("nfs_unused") < asked.index("shared_folders") < asked.index("host_undo")


@pytest.mark.parametrize(("number", "name"), list(enumerate(WALKS)))
def test_a_playbook_with_stand_in_machines_whose_text_is_hostile(fleet: Machines, number: int, name: str) -> None:
    """Plain ansible-playbook runs to its end, and renders no text of a machine as a template."""
    code, asked = WALKS[name]
    more = {"endpoint_set.yml": "wiring_new_endpoint=10.0.0.10:6443", "autoscale.yml": "autoscaler_state=absent"}
    more |= {f"registry_{each}.yml": json.dumps({"wiring_given_registry": REGISTRY}) for each in ("up", "down")}
    more |= {each: json.dumps(SHARES) for each in WALKS if each.startswith("storage_")}
    given = ["-e", more[name]] if name in more else []
    speak(fleet, ATTACKS[number % len(ATTACKS)])
    done = played(fleet, name, *given)
    check(fleet, done.stdout + done.stderr)
    assert modules(fleet) == set(asked.split())
    assert done.returncode == code, done.stdout
    if name == "join.yml":
        # A join of workers changes one thing on the control plane's machine: its firewall.
        assert "control-1/host" in fleet.asked


def test_an_upgrade_of_hostile_machines(fleet: Machines) -> None:
    """It runs to its end, with the version that was asked for and no text of a machine."""
    speak(fleet)
    done = played(fleet, "upgrade.yml", "-e", "upgrade_target=1.36.9")
    check(fleet, done.stdout + done.stderr)
    own = {"upgrade_fetch", "host", "kubeadm_upgrade", "node_upgraded", "node_ready"}
    # The control plane is not ready: its add-ons stay as they are.
    assert modules(fleet) - {"docker_images"} == {"host_facts", "cluster_info", *own}, done.stdout


def test_a_kubelet_waits_for_its_control_plane(fleet: Machines) -> None:
    speak(fleet)
    done = played(fleet, "upgrade.yml", "-e", "upgrade_target=1.37.2", "--limit", "worker-1", "--tags", "apply")
    assert "a kubelet is never newer than its control plane" in " ".join(done.stdout.split())
    assert "kubeadm_upgrade" not in modules(fleet)


def test_a_worker_without_an_earlier_version_is_not_prepared_to_return(fleet: Machines) -> None:
    """So `upgrade rollback` learns it before the drain."""
    speak(fleet)
    done = played(fleet, "upgrade.yml", "-e", "upgrade_returns=true", "--tags", "prepare", "--limit", "worker-1")
    assert done.returncode
    assert "its version before the last upgrade is unknown" in " ".join(done.stdout.split())
    assert modules(fleet) == {"host_facts", "cluster_info"}


def test_a_control_plane_does_not_return_to_an_older_version(fleet: Machines) -> None:
    speak(fleet)
    done = played(fleet, "upgrade.yml", "--tags", "undo")
    assert done.returncode
    assert "a control plane cannot return to an older version" in " ".join(done.stdout.split())
    assert "its version before the last upgrade is unknown" in " ".join(
        played(fleet, "upgrade.yml", "--tags", "undo", "--limit", "worker-1").stdout.split()
    )
    assert modules(fleet) == {"host_facts", "cluster_info"}


# The driver, the toolkit, CUDA, and what every node has.
HOST_TASKS = 6


def test_all_that_is_installed_on_stand_in_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each role that changes a machine runs with the reports of machine and cluster."""
    mirrors = {"docker.io": "https://mirror"}
    fleet = make(tmp_path, monkeypatch, TWO, gpunodes_image_mirrors=mirrors)
    fleet.vary("worker-1", gpunodes_runtime="containerd")
    fleet.vary("worker-3", gpunodes_runtime="docker")
    done = played(fleet, "join.yml", "--limit", "workers")
    check(fleet, done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout
    assert fleet.asked.count("worker-1/host") == HOST_TASKS, done.stdout
    assert fleet.asked.count("worker-3/host") == HOST_TASKS + 2, done.stdout
    assert {line for line in fleet.asked if line.endswith("/docker_images")} == {"worker-3/docker_images"}


@pytest.mark.parametrize("groups", [GROUPS, {"workers": ["worker-1"]}], ids=["in a cluster's inventory", "alone"])
def test_a_stand_in_machine_is_prepared_without_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, list[str]]
) -> None:
    """The same roles as for a join; the control plane is neither asked nor needed in the inventory."""
    fleet = make(tmp_path, monkeypatch, groups)
    done = played(fleet, "prepare.yml", "--limit", "worker-1")
    check(fleet, done.stdout + done.stderr)
    assert (done.returncode, fleet.asked.count("worker-1/host")) == (0, HOST_TASKS), done.stdout
    assert modules(fleet) == {"host_facts", "host_diff", "host", "gpu_verify", "prepared"}
    assert {line.partition("/")[0] for line in fleet.asked} == {"worker-1"}


def test_a_prepared_stand_in_machine_is_reset_without_a_control_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make(tmp_path, monkeypatch, {"workers": ["worker-1"]})
    fleet.answer("worker-1", "cluster_info", {"cluster": None})
    done = played(fleet, "reset.yml")
    check(fleet, done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout
    assert {"host_undo", "kubeadm_reset"} <= modules(fleet)
    ended = gpunodes(fleet, "reset", "worker-1", "--dry-run")
    check(fleet, ended.stdout + ended.stderr)
    assert ended.returncode == 0, ended.stderr


def test_a_stand_in_machine_that_is_a_node_is_not_prepared(fleet: Machines) -> None:
    """Also if preflight is skipped: nothing is sent that could change it."""
    for words in ((), ("--skip-tags", "preflight")):
        done = played(fleet, "prepare.yml", "--limit", "worker-2", *words)
        assert "it is already a worker" in done.stdout
        assert done.returncode
        assert modules(fleet) == {"host_facts"}


def test_a_stand_in_machine_without_gpus_gets_the_expected_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is installed; the GPUs, which only copies of the disk have, are not verified."""
    fleet = make(tmp_path, monkeypatch, gpunodes_prepare_gpus=["2330"])
    own = report("worker-1")
    own["gpu"] = {**own["gpu"], "functions": [], "expected": ["2330"]}
    fleet.answer("worker-1", "host_facts", {"host_facts": own})
    done = played(fleet, "prepare.yml", "--limit", "worker-1")
    assert (done.returncode, fleet.asked.count("worker-1/host")) == (0, HOST_TASKS), done.stdout
    assert modules(fleet) == {"host_facts", "host_diff", "host", "prepared"}


def test_stand_in_machines_that_ask_for_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ansible does not reboot a machine of the connection `local`: the play ends there."""
    fleet = make(tmp_path, monkeypatch, TWO)
    for name, allowed in (("worker-1", False), ("worker-3", True)):
        fleet.vary(name, gpunodes_gpu_reboot=allowed)
        fleet.answer(name, "host", {**answers(name)["host"], "reboot": "".join(ATTACKS)})
    output = playbook(fleet, "join.yml", "--limit", "workers")
    check(fleet, output)
    assert "a reboot is required" in reason(output, "worker-1")
    assert "would reboot the control node" in reason(output, "worker-3")


def test_the_gpus_of_stand_in_machines_are_sliced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node only while it is drained."""
    sharing = {"mode": "mig", "profiles": {"1g.10gb": 7}}
    fleet = make(tmp_path, monkeypatch, gpunodes_gpu_sharing=sharing)
    for name in ("worker-1", "worker-2"):
        sliced = {**answers(name)["host"], "differs": True, "reboot": "".join(ATTACKS)}
        fleet.answer(name, "gpu_mig", sliced)
        own = report(name)
        own["gpu"]["functions"][0]["device"] = "2330"
        fleet.answer(name, "host_facts", {"host_facts": own})
    output = playbook(fleet, "join.yml", "--limit", "workers")
    check(fleet, output)
    assert "a reboot is required" in reason(output, "worker-1")
    assert "takes pods" in reason(output, "worker-2")
    assert [fleet.asked.count(f"{name}/gpu_mig") for name in ("worker-1", "worker-2")] == [2, 1]


def test_pods_leave_before_another_program_serves_the_gpus_of_a_stand_in_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make(tmp_path, monkeypatch, gpunodes_gpu_serving="dra")
    made = cluster()
    for node in made["nodes"]:
        node["gpus"] = 1
    fleet.answer("control-1", "cluster_info", {"cluster": made})
    output = playbook(fleet, "join.yml", "--limit", "worker-2")
    check(fleet, output)
    assert fleet.asked.count("control-1/gpu_idle") == 1, output
    assert "control-1/kube_objects" in fleet.asked


@pytest.mark.parametrize("name", ["facts.yml", "gpu_verify.yml", "health.yml", "join.yml", "remove.yml", "status.yml"])
def test_a_playbook_with_stand_in_machines_whose_every_string_is_hostile(fleet: Machines, name: str) -> None:
    check(odd(fleet), playbook(fleet, name))


def admin(**more: Any) -> dict[str, Any]:
    """A control plane's admin.conf as kubeadm writes it, with ``more`` for its user."""
    pem = base64.b64encode(b"-----BEGIN CERTIFICATE-----\n").decode()
    user = {"client-certificate-data": pem, "client-key-data": pem, **more}
    server = {"server": "https://10.0.0.1:6443", "certificate-authority-data": pem}
    return {"clusters": [{"name": "x", "cluster": server}], "users": [{"name": "x", "user": user}]}


@pytest.mark.parametrize("folder", ["", "kube"])
def test_a_playbook_writes_a_kubeconfig_as_the_command_does(fleet: Machines, tmp_path: Path, folder: str) -> None:
    """The file is private; an existing folder keeps its mode, a new one is private too."""
    target = tmp_path / "shared" / folder / "admin.conf"
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    inventory = json.loads(fleet.inventory.read_text())
    inventory["all"]["vars"]["gpunodes_kubeconfig_path"] = str(target)
    fleet.inventory.write_text(json.dumps(inventory))
    fleet.answer("control-1", "slurp", {"content": encoded(admin()), "encoding": "base64"})
    output = playbook(fleet, "kubeconfig.yml")
    assert target.exists(), output
    assert yaml.safe_load(target.read_text()) == kubeconfig.reduced(admin(), "control-1")
    assert target.stat().st_mode & 0o777 == 0o600
    assert shared.stat().st_mode & 0o7777 == 0o1777
    assert not folder or target.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_a_playbook_gives_a_kubeconfig_to_no_machine_with_the_controllers_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A machine may call itself so, and `gpunodes adopt` takes the names of nodes."""
    fleet = make(tmp_path, monkeypatch, {**GROUPS, "workers": [name]})
    fleet.answer("control-1", "slurp", {"content": encoded(admin()), "encoding": "base64"})
    output = playbook(fleet, "kubeconfig.yml")
    assert yaml.safe_load((tmp_path / "admin.conf").read_text()) == kubeconfig.reduced(admin(), "control-1"), output
    assert not [each for each in fleet.asked if each.startswith(name)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write over files of others")
def test_a_playbook_gives_a_kubeconfig_to_no_other_user_of_the_controller(fleet: Machines, tmp_path: Path) -> None:
    """Ansible's copy keeps the owner of a file that it replaces: another user may have made it, in a shared folder."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    target = shared / "admin.conf"
    target.touch()
    os.chown(target, 65534, 65534)
    inventory = json.loads(fleet.inventory.read_text())
    inventory["all"]["vars"]["gpunodes_kubeconfig_path"] = str(target)
    fleet.inventory.write_text(json.dumps(inventory))
    fleet.answer("control-1", "slurp", {"content": encoded(admin()), "encoding": "base64"})
    output = playbook(fleet, "kubeconfig.yml")
    assert "is not a file of this user" in output.replace("\n", " ")
    assert target.read_bytes() == b""


def test_a_playbook_takes_no_program_from_a_stand_in_control_plane(fleet: Machines, tmp_path: Path) -> None:
    """Otherwise an attacker on the control plane could run programs through the administrator's kubectl."""
    secret = base64.b64encode(b"-----BEGIN PRIVATE KEY-----\n").decode()
    wanted = admin(**{"client-key-data": secret, "exec": {"command": "gpunodes_canary"}})
    fleet.answer("control-1", "slurp", {"content": encoded(wanted), "encoding": "base64"})
    output = playbook(fleet, "kubeconfig.yml")
    assert not (tmp_path / "admin.conf").exists()
    assert "in its user: 'exec'" in output.replace("\n", " ")
    assert secret not in output


def test_a_playbook_quotes_no_line_of_a_kubeconfig_of_a_stand_in_that_is_no_yaml(fleet: Machines) -> None:
    """Ansible also prints the cause of an error; a YAML parser's error quotes the line, which may contain a key."""
    secret = base64.b64encode(b"-----BEGIN PRIVATE KEY-----\n").decode()
    text = f"users: [{{user: {{client-key-data: {secret} {{{secret}"
    fleet.answer("control-1", "slurp", {"content": base64.b64encode(text.encode()).decode(), "encoding": "base64"})
    output = playbook(fleet, "kubeconfig.yml")
    assert "of control-1 is not valid YAML" in output
    assert secret not in output


def encoded(document: Any) -> str:
    return base64.b64encode(yaml.safe_dump(document).encode()).decode()


def test_a_stand_in_machine_finishes_its_interrupted_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is already a node of the cluster."""
    fleet = make(tmp_path, monkeypatch, {**GROUPS, "workers": ["worker-1", "worker-2", "worker-3"]})
    for name, unfinished in (("worker-2", False), ("worker-3", True)):
        facts = report(name)
        facts["kubernetes"] = {"role": "worker", "ca_hash": PIN, "server": ATTACKS[1], "unfinished": unfinished}
        fleet.answer(name, "host_facts", {"host_facts": facts})
    known = cluster(names=(*NODES, "worker-3"))
    for node in known["nodes"]:
        node["uid"] = node["name"]
    fleet.answer("control-1", "cluster_info", {"cluster": known})
    output = playbook(fleet, "join.yml", "--limit", "workers")
    joined = {line for line in fleet.asked if line.endswith("/kubeadm_join")}
    assert joined == {"worker-1/kubeadm_join", "worker-3/kubeadm_join"}, output


RESERVED = ("ansible_facts", "changed", "diff", "exception", "failed", "invocation", "results", "warnings")


def test_a_stand_in_machine_with_ansible_s_reserved_keys_ends_no_run(fleet: Machines) -> None:
    """Ansible also reads reserved keys of a module's result, and expects them to have their types."""
    fleet.answer("worker-1", "host_facts", {"host_facts": report("worker-1"), "ansible_stats": 5})
    fleet.answer("worker-2", "host_facts", {"host_facts": report("worker-2"), **dict.fromkeys(RESERVED, 5)})
    output = playbook(fleet, "facts.yml")
    check(fleet, output)
    assert "PLAY RECAP" in output, output
    recap = output.partition("PLAY RECAP")[2]
    reached = {name for name in NUMBERS if re.search(rf"^{name} .* unreachable=0 ", recap, re.MULTILINE)}
    assert reached == set(MACHINES)
    assert re.search("^control-1 .* failed=0 ", recap, re.MULTILINE)


@pytest.mark.parametrize("gpus", [True, False])
def test_a_stand_in_machine_alone_is_control_plane_and_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gpus: bool
) -> None:
    """Its node gets labels, the device plugin and the verification of a worker's GPUs, without a group of workers."""
    settings = {**SETTINGS, "gpunodes_control_plane_schedulable": True, "gpunodes_pool": "all"}
    fleet = machines(tmp_path, {"control_plane": ["control-1"]}, settings)
    for name, value in fleet.environment.items():
        monkeypatch.setenv(name, value)
    made = machine_report("control-1", 1, swap=[])
    made["gpu"]["functions"] = made["gpu"]["functions"] if gpus else []
    fleet.answer("control-1", "host_facts", {"host_facts": made})
    fleet.answer("control-1", "cluster_info", {"cluster": None})
    fleet.answer("control-1", "host", {"actions": [], "versions": {"kubeadm": "1.36.3-1.1"}, "reboot": ""})
    fleet.answer("control-1", "gpu_verify", {"gpu_levels": [], "labels": {"gpunodes.dev/gpu-count": "1"}})
    fleet.answer("control-1", "kubeadm_init", {"actions": ["kubeadm init"], "changed": True})
    done = played(fleet, "up.yml")
    check(fleet, done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout
    seen = modules(fleet)
    assert {"kubeadm_init", "node_pools", "node_ready"} <= seen
    assert not {"kubeadm_join", "join_token"} & seen
    assert ({"gpu_verify", "gpu_served"} <= seen) == gpus
    assert fleet.asked.count("control-1/kube_objects") == 1 + gpus  # the network, and the device plugin


def test_an_invalid_cluster_report_is_refused_whatever_else_the_stand_in_reports(fleet: Machines) -> None:
    """Ansible lets a module report its own task as skipped."""
    for word in ({}, {"skipped": True}):
        made = cluster() | {"endpoint": "10.0.0.1:6443\nevil: true"}
        fleet.answer("control-1", "cluster_info", {"cluster": made, **word})
        output = playbook(fleet, "join.yml")
        check(fleet, output)
        assert "of its cluster, its answer is invalid: expected host:port in endpoint" in output
        assert "worker-1/kubeadm_join" not in fleet.asked


@pytest.mark.parametrize("name", ["init_master.yml", "join.yml", "up.yml", "gpu_install.yml"])
def test_a_run_with_known_facts_of_its_stand_in_machines(fleet: Machines, tmp_path: Path, name: str) -> None:
    """As the commands do it: the facts of preflight enter the following play."""
    facts = {machine: report(machine) for machine in MACHINES}
    known = {} if name == "init_master.yml" else cluster()
    seen: list[Event] = []
    play = runner.Play(name, Inventory(fleet.inventory), MACHINES, ["preflight"], facts=facts, cluster=known)
    (tmp_path / "run").mkdir()
    ended = runner.run(play, tmp_path / "run", seen.append)
    check(fleet, ended.log.read_text())
    assert modules(fleet) == set(WALKS[name][1].split()) - {"host_facts", "cluster_info"}
    assert {event.machine for event in seen} <= set(MACHINES)


def test_a_cluster_of_thousands_of_stand_in_nodes_is_read_whole(fleet: Machines, tmp_path: Path) -> None:
    """ansible-runner empties a result of more than 700 kB: the nodes were lost."""
    made = cluster()
    made["nodes"] = [{**made["nodes"][0], "name": f"node-{number}"} for number in range(3000)]
    assert len(json.dumps(made)) > 1_000_000
    fleet.answer("control-1", "cluster_info", {"cluster": made})
    seen: list[Event] = []
    (tmp_path / "run").mkdir()
    runner.run(runner.Play("status.yml", Inventory(fleet.inventory), ["control-1"]), tmp_path / "run", seen.append)
    (answer,) = [each.result["cluster"] for each in seen if isinstance(each, TaskEnded) and "cluster" in each.result]
    assert len(answer["nodes"]) == len(made["nodes"])


def gpunodes(made: Machines, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from gpunodes.cli import main; main()", *words, "-i", str(made.inventory)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=made.folder)


_STATUS = "cluster_info control_plane_drift kubelet_settings "
_JOIN = "join_token kubeadm_join gpu_verify node_pools "
# Each command's exit code with these machines, the modules that it sends, and what it shows. A dry run that stops at
# preflight would send no more than _FACTS.
COMMANDS = {
    "preflight": (0, "host_facts " + _STATUS, SHOWN),
    "status": (3, _STATUS + "certificate_ends etcd_members", SHOWN),
    "certs": (3, "certificate_ends", SHOWN),
    "certs renew --dry-run": (0, _FACTS + "certificates_renewed", SHOWN),
    "gpu plan": (0, _FACTS, "nvidia-driver-pinning-580"),
    "report --no-scan -o -": (3, "host_facts certificate_ends etcd_members " + _STATUS, SHOWN),
    "upgrade plan 1.37": (1, "host_facts upgrade_facts " + _STATUS, SHOWN),
    "os plan worker-1": (1, _FACTS + "os_pending", "it did not report what is pending"),
    "runtime plan worker-2": (0, _FACTS + "runtime_pending", SHOWN),
    "addon plan": (0, "cluster_info addon_pending", SHOWN),
    "gpu upgrade plan worker-1 --driver 580": (1, _FACTS, "no driver is installed"),
    "init-master control-1 --dry-run": (0, _FACTS + _PREPARE + "control_plane_drift kubeadm_init", SHOWN),
    "join worker-1 --dry-run": (0, _FACTS + _PREPARE + _JOIN, "worker-1  would change"),
    "up --dry-run": (0, _FACTS + _PREPARE + _JOIN + "control_plane_drift kubeadm_init", "worker-1   would change"),
    "prepare worker-1 --dry-run": (0, "host_facts host_diff host gpu_verify prepared", "would change"),
    "remove worker-2 --dry-run": (0, _FACTS + "kubeadm_reset host_undo node_removed", SHOWN),
    "reset worker-2 --dry-run --yes": (0, _FACTS + "kubeadm_reset host_undo", SHOWN),
    "gpu install worker-1 --dry-run": (0, _FACTS + "host_diff host gpu_verify", "worker-1  would change"),
    "gpu remove worker-2 --dry-run": (0, _FACTS + "gpu_idle host_undo node_pools", SHOWN),
    "gpu verify worker-2": (0, _FACTS + "gpu_verify gpu_served", "worker-2  1"),
    # The burn-in of these machines fails.
    "gpu burn-in worker-2 --dry-run": (1, _FACTS + "burn_in_taint gpu_burn_in", "#jinja2: variable_start_string"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_with_stand_in_machines_whose_text_is_hostile(fleet: Machines, command: str) -> None:
    """Text of machines is shown without control characters, and no command runs it."""
    done = gpunodes(fleet, *command.split())
    check(fleet, done.stdout + done.stderr)
    assert "a bug in gpunodes" not in done.stderr
    code, asked, shown = COMMANDS[command]
    assert (done.returncode, modules(fleet)) == (code, set(asked.split())), done
    assert shown in done.stdout + done.stderr


_ROLLED = "its playbook is walked above; cli/test_plan_commands.py has hostile plans, test_rolling_hostile.py the rest"
_RECORDS = "test_rolling_resume.py has hostile records of roll-outs, test_rolling_hostile.py hostile machines and nodes"
_AUTOSCALER = "its playbook is walked above; test_autoscale_commands.py has a hostile cluster, with hostile states"
_ADDONS = "its playbook is walked above; test_addons.py has hostile reports, and tests/trust/test_upgrades.py"
_REGISTRY = (
    "its playbooks are walked above; test_registry_commands.py has a hostile cluster, and views/test_hostile_lines.py"
)
_STORAGE = "its playbooks are walked above; test_storage_commands.py has a hostile cluster and hostile machines"
_LOGINS = "test_registries.py: what stands in the cluster is hostile there"
_NOTEBOOKS = "test_notebooks.py: a hostile cluster"
_ALONE = "it contacts no machine"
# Those that reach machines without Ansible are in test_scans.py. Files are in tests/unit/operations or tests/unit.
ELSEWHERE = {
    "adopt": "planner/test_adoption.py has hostile clusters; its machines are read as by preflight",
    "ports": _ALONE,
    "kubeconfig": "test_kubeconfig.py: what a control plane sends, test_users.py: users of a hostile cluster",
    "completion": _ALONE,
    "dashboard": "test_dashboard.py: what the cluster reports is hostile there",
    "etcd backup": "test_etcd_backup.py: what a machine sends is hostile there",
    "etcd restore": "its playbooks are walked above; test_etcd_archive.py has hostile files, "
    "test_etcd_commands.py hostile nodes and machines",
    "etcd timer": _ALONE,
    "endpoint set": "its playbook is walked above; test_endpoint_set.py has hostile machines and nodes",
    "gpu upgrade start": _ROLLED,
    "os upgrade": _ROLLED,
    "autoscale up": _AUTOSCALER,
    "autoscale status": _AUTOSCALER,
    "autoscale down": _AUTOSCALER,
    "addon list": _ADDONS,
    "addon up": _ADDONS,
    "addon verify": _ADDONS,
    "addon down": _ADDONS,
    "addon upgrade": _ADDONS,
    "jupyter up": _NOTEBOOKS,
    "jupyter open": f"{_NOTEBOOKS}; what a pod sends goes to the browser only",
    "jupyter list": _NOTEBOOKS,
    "jupyter verify": "engine/test_jupyter.py: a hostile server",
    "jupyter down": _NOTEBOOKS,
    "runtime upgrade": _ROLLED,
    "registry list": _LOGINS,
    "registry login": _LOGINS,
    "registry logout": _LOGINS,
    "registry up": _REGISTRY,
    "registry status": _REGISTRY,
    "registry open": _REGISTRY,
    "registry verify": f"{_REGISTRY}; engine/test_registry_client.py has a hostile registry",
    "registry down": _REGISTRY,
    "rollout apply": "its playbooks are walked above; test_drift.py and test_kubelets.py have hostile reports",
    "rollout abandon": _RECORDS,
    "rollout resume": _RECORDS,
    "rollout status": _RECORDS,
    "upgrade rollback": f"{_ROLLED}; planner/test_reports.py: an earlier version is one",
    "upgrade start": _ROLLED,
    "storage up": _STORAGE,
    "storage verify": _STORAGE,
    "storage down": _STORAGE,
    "content": _ALONE,
    "gates": _ALONE,
    "help": _ALONE,
    "init-control-plane": "it is init-master",
    "lab": "it creates its own machines",
    "playbook": "the playbooks are walked above",
    "provision seed": f"{_ALONE}; test_provision_seed.py has hostile keys, names and paths",
    "serve-metrics": "it scans as health does; views/test_metrics.py has hostile verdicts",
    "version": _ALONE,
}


def test_every_command_is_walked() -> None:
    """Here, among the scans, or with a reason why not."""
    groups = {"gpu": gpu.COMMANDS, "maintenance": maintenance.COMMANDS, "provision": provision.COMMANDS}
    groups |= {"etcd": etcd.COMMANDS, "upgrade": upgrade.COMMANDS, "os": operating_system.COMMANDS}
    groups |= {"rollout": rollout.COMMANDS, "endpoint": endpoint.COMMANDS, "gpu upgrade": gpu_upgrade.COMMANDS}
    groups |= {"runtime": runtime.COMMANDS, "addon": addon.COMMANDS, "autoscale": autoscale.COMMANDS}
    groups |= {"jupyter": jupyter.COMMANDS, "registry": registry.COMMANDS}
    groups |= {"storage": storage.COMMANDS}
    everything = {name for name in cli.COMMANDS if name not in groups}
    everything |= {f"{group} {name}" for group, names in groups.items() for name in names}
    everything |= {f"certs {name}" for name in certs.COMMANDS}
    everything -= set(groups)
    walked = {name for name in everything for line in (*COMMANDS, *WALKED) if f"{line} ".startswith(f"{name} ")}
    assert everything - walked == set(ELSEWHERE)


def test_each_attack_is_shown_as_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the name of a machine's system, and in the reason why its node is not ready; each has another attack."""
    attacks = dict(zip(NUMBERS, ATTACKS, strict=True))
    fleet = make(tmp_path, monkeypatch, {"control_plane": ["control-1"], "workers": list(NUMBERS)[1:]})
    known = cluster()
    known["nodes"] = [cluster(attack, list(NUMBERS))["nodes"][place] for place, attack in enumerate(ATTACKS)]
    assert {node["name"]: node["reason"] for node in known["nodes"]} == attacks
    known["certificates"] = [each for attack in ATTACKS for each in certificates(attack)]
    differences = [each for attack in ATTACKS for each in drift(attack)["differences"]]
    for name, attack in attacks.items():
        own = answers(name, attack)
        own["cluster_info"]["cluster"] = known
        own["certificate_ends"]["certificates"] = known["certificates"]
        own["control_plane_drift"]["control_plane_drift"]["differences"] = differences
        own["etcd_members"]["etcd"]["problem"] = "".join(ATTACKS)
        for module, answer in own.items():
            fleet.answer(name, module, answer)
    for command in ("preflight", "status"):
        done = gpunodes(fleet, command)
        check(fleet, done.stdout + done.stderr)
        for attack in ATTACKS:
            assert printable(attack).strip() in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["status", "gpu verify", "join worker-1 --dry-run"])
def test_a_command_with_stand_in_machines_whose_every_string_is_hostile(fleet: Machines, command: str) -> None:
    """An invalid report is its machine's failure, with a sentence."""
    done = gpunodes(odd(fleet), *command.split())
    check(fleet, done.stdout + done.stderr)
    assert "a bug in gpunodes" not in done.stderr
    assert done.returncode in {1, 3}
    assert "its answer is invalid" in done.stdout + done.stderr
