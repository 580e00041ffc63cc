"""Machines as they are: two networks, a second disk, an active firewall, and a proxy as the only way to packages.

The default route leads into a network in which the machines do not reach each other: a node that used its address there
would be alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from . import pods
from .conftest import BARE, CHECKOUT, NAME, STATE, LabSpec, Operator, lines

LAB = LabSpec("debian13", workers=1, up_options=("--second-network", "--data-disk"))
MACHINES = ("control-1", "worker-1")
IMAGE = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"
PASSWORD = "Proxy-p4ss"
PORT = 3128
# An administrator's own rules. SSH alone is open.
FIREWALL = """flush ruleset
table inet filter {
    chain input {
        type filter hook input priority filter; policy drop;
        ct state established,related accept
        iif lo accept
        icmp type echo-request accept
        tcp dport 22 accept
    }
    chain forward { type filter hook forward priority filter; policy drop; }
}
"""
# BARE, the names in the firewall, and the limits that a node raises.
UNDONE = f"{{ {BARE}\n}}; nft list ruleset | grep gpunodes; sysctl fs.inotify kernel.pid_max"
_bare: dict[str, list[str]] = {}


@pytest.fixture(scope="module")
def proxy(operator: Operator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A forward proxy in the lab's namespace, the only way to the mirror; gives the file of its records."""
    folder = tmp_path_factory.mktemp("proxy")
    credentials, records = folder / "credentials", folder / "records"
    credentials.touch(mode=0o600)
    credentials.write_text(f"operator:{PASSWORD}")
    inside = ("ip", "netns", "exec", f"gpunodes-{NAME}")
    # The machines reach the lab's bridge by lab0; the proxy, in the same namespace, reaches it by lo.
    rule = ("INPUT", "-i", "lab+", "-p", "tcp", "--dport", "80", "-j", "REJECT")
    address = gateway(operator)
    program = (sys.executable, str(CHECKOUT / "tests/forward_proxy.py"), "--listen", address)
    with records.open("w") as output:
        process = subprocess.Popen(
            [
                *(*inside, *program, "--port", str(PORT), "--credentials-file", str(credentials)),
                *("--host", f"mirror.lab={address}"),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
        )
        subprocess.run([*inside, "iptables", "-A", *rule], check=True)
        try:
            yield records
        finally:
            subprocess.run([*inside, "iptables", "-D", *rule], check=True)
            assert process.stdin
            process.stdin.close()
            process.wait(10)


def gateway(operator: Operator) -> str:
    """The lab's bridge, as the machines see it."""
    hosts = yaml.safe_load((operator.folder / "inventory" / "hosts.yml").read_text())["all"]["children"]
    first: str = hosts["control_plane"]["hosts"]["control-1"]["ansible_host"]
    return f"{first.rpartition('.')[0]}.1"


def write_settings(operator: Operator, **settings: str) -> None:
    """Replace the settings that this test adds to the lab's inventory."""
    folder = operator.folder / "inventory" / "group_vars" / "all"
    if not folder.is_dir():
        lab = folder.with_suffix(".yml")
        text = lab.read_text()
        lab.unlink()
        folder.mkdir()
        (folder / "lab.yml").write_text(text)
    own = folder / "own.yml"
    own.touch(mode=0o600)
    own.write_text(yaml.safe_dump(settings))


def with_proxy(operator: Operator) -> dict[str, str]:
    """The settings of the cluster."""
    return {
        "gpunodes_data_directory": "/data",
        "gpunodes_http_proxy": f"http://operator:{PASSWORD}@{gateway(operator)}:{PORT}",
        # The lists of hosts without a proxy stay the same when the worker is added, and reached by another name.
        "gpunodes_no_proxy": f".test,worker-1,{gateway(operator).rpartition('.')[0]}.21",
    }


def test_the_machines_have_a_firewall(operator: Operator) -> None:
    operator.each(MACHINES, "{ apt-get -qq update && apt-get -qqy install nftables; } >/dev/null 2>&1")
    for machine in MACHINES:
        operator.ssh(machine, f"cat >/etc/nftables.conf <<'END'\n{FIREWALL}END\nsystemctl enable --now nftables")
    _bare.update(operator.each(MACHINES, UNDONE))


def test_without_the_proxy_preflight_reports_the_package_sources(operator: Operator, proxy: Path) -> None:
    assert proxy.exists()
    found = operator.document("preflight", code=1)["findings"]
    assert {finding["check"] for finding in found if finding["severity"] == "error"} == {"sources"}


def test_a_proxy_that_refuses_is_reported_without_its_password(operator: Operator, proxy: Path) -> None:
    assert proxy.exists()
    wrong = {"gpunodes_http_proxy": f"http://operator:wr0ng-p4ss@{gateway(operator)}:{PORT}"}
    write_settings(operator, **with_proxy(operator) | wrong)
    done = operator.gpunodes("preflight", code=1)
    assert "407" in done.stdout + done.stderr
    assert "wr0ng" not in done.stdout + done.stderr


def test_a_range_of_the_machines_own_network_is_refused(operator: Operator) -> None:
    second = gateway(operator).replace("10.213.", "10.214.").rpartition(".")[0]
    write_settings(operator, **with_proxy(operator), gpunodes_pod_subnet=f"{second}.0/24")
    done = operator.gpunodes("init-master", "control-1", code=1)
    assert "nothing was changed" in done.stdout
    assert f"{second}.0/24" in done.stdout + done.stderr


def test_ports_in_use_are_refused_with_their_holder(operator: Operator, proxy: Path) -> None:
    """That of kube-proxy's health, and the UDP port of the network add-on."""
    assert proxy.exists()
    write_settings(operator, **with_proxy(operator))
    bind = "import socket, time; s = socket.socket(type=socket.SOCK_DGRAM); s.bind((str(), 8472)); time.sleep(3600)"
    operator.ssh("worker-1", "systemd-run --quiet --unit=squatter python3 -m http.server 10256")
    operator.ssh("worker-1", f"systemd-run --quiet --unit=squatter-udp python3 -c '{bind}'")
    operator.ssh(
        "worker-1", "for n in 1 2 3 4 5 6 7 8 9; do ss -Hltn 'sport = 10256' | grep -q . && break; sleep 2; done"
    )
    try:
        found = operator.document("preflight", "worker-1", code=1)["findings"]
    finally:
        operator.ssh("worker-1", "systemctl stop squatter squatter-udp")
    facts = " ".join(finding["fact"] for finding in found if finding["severity"] == "error")
    assert "10256" in facts, facts
    assert "8472" in facts, facts
    assert "squatter" in facts or "python3" in facts, facts


def test_init_uses_the_address_by_which_it_was_reached(operator: Operator, proxy: Path) -> None:
    write_settings(operator, **with_proxy(operator))
    inventory = operator.folder / "inventory" / "hosts.yml"
    text = inventory.read_text()
    hosts = yaml.safe_load(text)
    # The worker is not known yet: the control plane's firewall lets it in when it joins.
    del hosts["all"]["children"]["workers"]
    inventory.write_text(yaml.safe_dump(hosts))
    try:
        operator.gpunodes("init-master", "control-1")
    finally:
        inventory.write_text(text)
    own = gateway(operator).rpartition(".")[0] + ".11"
    manifest = operator.ssh("control-1", "cat /etc/kubernetes/manifests/kube-apiserver.yaml")
    assert f"--advertise-address={own}" in manifest
    assert f"initial-advertise-peer-urls=https://{own}:2380" in operator.ssh(
        "control-1", "cat /etc/kubernetes/manifests/etcd.yaml"
    )
    assert PASSWORD not in manifest
    targets = [json.loads(line).get("target", "") for line in proxy.read_text().splitlines()]
    assert any(target.endswith(".deb") for target in targets)  # apt
    assert any("/v2/" in target for target in targets)  # containerd


def test_a_worker_joins_through_the_firewall_at_the_address_that_is_set(operator: Operator, proxy: Path) -> None:
    """It is reached by a name: without gpunodes_node_address it gets the address of its default route."""
    assert proxy.exists()
    network = gateway(operator).rpartition(".")[0]
    inventory = operator.folder / "inventory" / "hosts.yml"
    text = inventory.read_text()
    hosts = yaml.safe_load(text)
    worker = hosts["all"]["children"]["workers"]["hosts"]["worker-1"]
    reached = f"-o HostName={worker['ansible_host']} -o HostKeyAlias={worker['ansible_host']}"
    worker |= {"ansible_host": "worker-1.test", "ansible_ssh_common_args": reached}
    worker["gpunodes_node_address"] = f"{network}.0/24"
    inventory.write_text(yaml.safe_dump(hosts))
    try:
        operator.gpunodes("join", "worker-1")
    finally:
        inventory.write_text(text)
    addresses = r"""jsonpath={range .items[*]}{.status.addresses[?(@.type=="InternalIP")].address}{" "}{end}"""
    assert set(operator.kubectl("get", "nodes", "-o", addresses).split()) == {f"{network}.11", f"{network}.21"}
    public = r"jsonpath={range .items[*]}{.metadata.annotations.flannel\.alpha\.coreos\.com/public-ip}{' '}{end}"
    assert set(operator.kubectl("get", "nodes", "-o", public).split()) == {f"{network}.11", f"{network}.21"}
    for machine in MACHINES:
        policy = operator.ssh(machine, "nft list chain inet filter input")
        assert "policy drop" in policy
    assert f"{network}.21" in operator.ssh("control-1", "nft list chain inet filter gpunodes_input")


def test_limits_are_those_of_a_node_with_many_pods(operator: Operator) -> None:
    keys = "fs.inotify.max_user_instances fs.inotify.max_user_watches"
    for found in operator.each(MACHINES, f"sysctl -n {keys}").values():
        assert [int(value) >= least for value, least in zip(found, (8192, 524288), strict=True)] == [True, True]
    for found in operator.each(MACHINES, "cat /etc/gpunodes/kubelet.conf.d/10-pod-pids-limit.conf").values():
        assert json.loads("".join(found))["podPidsLimit"] == 16384


def test_pods_of_two_nodes_reach_each_other_and_the_services(operator: Operator) -> None:
    """Through both firewalls, over the network add-on: the DNS server runs on the control plane."""
    script = "nslookup kubernetes.default.svc.cluster.local && wget -qO- --no-check-certificate https://kubernetes.default/livez"
    pods.start(operator, "reach", IMAGE, script, {}, nodeName="worker-1")
    node, log = pods.ended(operator, "reach")
    assert node == "worker-1"
    assert "Address" in log


def test_the_data_is_on_the_second_disk(operator: Operator) -> None:
    for machine in MACHINES:
        for folder in ("/var/lib/kubelet", "/var/lib/containerd"):
            assert operator.ssh(machine, f"findmnt -no SOURCE --target {folder}").startswith("/dev/vdb"), folder
        # The images are there.
        assert int(operator.ssh(machine, "du -xsm /data").split()[0]) > 100
        # A mount of a pod appears once.
        mounts = operator.ssh(machine, "findmnt -rno TARGET | grep /pods/").split()
        assert len(mounts) == len({*mounts})
        assert not [mount for mount in mounts if mount.startswith("/data")]


def test_the_password_of_the_proxy_is_private(operator: Operator) -> None:
    for machine in MACHINES:
        readable = f"grep -rlF {PASSWORD} /etc /run /var/lib/gpunodes /var/log 2>/dev/null"
        for path in operator.ssh(machine, readable, code=None).split():
            assert operator.ssh(machine, f"stat -c %a {path}").strip() in {"600", "640", "400"}, path
        assert PASSWORD not in operator.ssh(machine, "systemctl show containerd kubelet")
    assert PASSWORD not in "\n".join(operator.output)
    state = Path(operator.environment["XDG_STATE_HOME"])
    logs = [path for path in state.rglob("*") if path.is_file() and PASSWORD in path.read_text(errors="replace")]
    assert logs == []


def test_a_second_run_changes_nothing(operator: Operator, proxy: Path) -> None:
    assert proxy.exists()
    before = operator.each(MACHINES, STATE)
    document = operator.document("up")
    assert {machine["outcome"] for machine in document["machines"]} == {"unchanged"}
    assert operator.each(MACHINES, STATE) == before


def test_another_address_of_a_node_is_refused(operator: Operator) -> None:
    second = gateway(operator).replace("10.213.", "10.214.").rpartition(".")[0]
    write_settings(operator, **with_proxy(operator), gpunodes_node_address=f"{second}.0/24")
    done = operator.gpunodes("join", "worker-1", code=1)
    assert "nothing was changed" in done.stdout
    assert f"gpunodes_node_address selects {second}.21" in done.stdout + done.stderr
    write_settings(operator, **with_proxy(operator))


def test_reset_restores_the_machines(operator: Operator) -> None:
    operator.gpunodes("reset", "--yes", "worker-1", "control-1")
    for machine in MACHINES:
        assert lines(operator.ssh(machine, UNDONE)) == _bare[machine]
        assert operator.ssh(machine, "ls -A /data").split() == ["lost+found"]
