"""Shared storage: what is wrong with a setting, and what a server, a node and the cluster get."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gpunodes import settings
from gpunodes.ansible.module_utils import data_directory, in_use
from gpunodes.ansible.module_utils.host.spec import data_folders
from gpunodes.errors import WrongInput
from gpunodes.model import Role
from gpunodes.planner import firewall, pools, ports, storage

GIVEN = {"name": "training", "server": "nas.example", "path": "/export/training", "size": "900Gi"}
OWN = {"name": "scratch", "path": "/srv/scratch", "size": "1Ti", "namespaces": ["default", "ml"]}


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [
        ("/data", True),
        ("/data/disk", True),
        ("/data/disk/kubelet", True),
        ("/data/disk/docker/volumes", True),
        ("/data/disk/training", False),
        ("/data/disk2", False),
    ],
)
def test_no_share_has_the_data_of_services_on_another_disk(path: str, is_refused: bool) -> None:
    assert bool(list(storage.moved([{**OWN, "path": path}], "/data/disk"))) is is_refused
    assert not list(storage.moved([{**GIVEN, "path": path}], "/data/disk"))


@pytest.mark.parametrize("folder", data_folders("docker").values())
def test_it_is_where_a_machine_has_it(folder: str) -> None:
    assert list(storage.moved([{**OWN, "path": data_directory.source("/data/disk", folder)}], "/data/disk"))


def test_a_right_setting_has_no_problem() -> None:
    assert not list(storage.problems([GIVEN, OWN, {**GIVEN, "name": "root", "path": "/", "options": ["nfsvers=4.1"]}]))
    assert storage.shares([]) == ()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("x", "is no list"),
        ([1], "has 1 as entry 1"),
        ([{**GIVEN, "pool": 1}], "has 'pool' in training"),
        ([{**GIVEN, "name": "Training"}], "names a share 'Training'"),
        ([{**GIVEN, "name": "a" * 64}], "names a share"),
        ([{**GIVEN, "server": "nas example"}], "has the server 'nas example'"),
        ([{**GIVEN, "server": ""}], "has the server ''"),
        ([{**GIVEN, "server": "-o"}], "has the server '-o'"),
        ([{**GIVEN, "path": "export"}], "has the path 'export'"),
        ([{**GIVEN, "path": "/export/../etc"}], "has the path '/export/../etc'"),
        ([{**GIVEN, "path": "/export/a b"}], "has the path '/export/a b'"),
        ([{**GIVEN, "path": "/export/*(rw)"}], "has the path"),
        ([{**OWN, "path": "/"}], "has the path '/'"),
        ([{**OWN, "path": "/etc"}], "which the system needs"),
        ([{**OWN, "path": "/etc/x"}], "which the system needs"),
        ([{**OWN, "path": "/var/lib/kubelet"}], "which the system needs"),
        ([{**OWN, "path": "/var/lib/etcd/member"}], "which the system needs"),
        ([{**GIVEN, "size": "much"}], "has the size 'much'"),
        ([{**GIVEN, "size": "0"}], "has the size '0'"),
        ([{**GIVEN, "options": "hard"}], "has options 'hard'"),
        ([{**GIVEN, "options": ["hard;reboot"]}], "has options"),
        ([{**GIVEN, "namespaces": ["a", "a"]}], "has namespaces"),
        ([{**GIVEN, "namespaces": "ml"}], "has namespaces"),
        ([GIVEN, {**GIVEN, "path": "/other"}], "has several shares named training"),
        ([OWN, {**OWN, "name": "other"}], "has several shares that serve /srv/scratch"),
        ([OWN, {**OWN, "name": "other", "path": "/srv/scratch/a/b"}], "which is in the share /srv/scratch"),
    ],
)
def test_each_wrong_share_has_one_sentence(value: Any, found: str) -> None:
    [(sentence, wanted)] = storage.problems(value)
    assert found in sentence
    assert wanted
    with pytest.raises(WrongInput, match=re.escape(found)):
        storage.shares(value)


def test_the_same_folder_of_two_servers_is_no_conflict() -> None:
    assert not list(storage.problems([GIVEN, {**GIVEN, "name": "b", "server": "nas2.example"}]))


def test_a_server_exports_to_addresses_only_and_as_the_same_file_system_for_ever() -> None:
    found = storage.server("apt", [GIVEN, OWN], ["10.0.0.2", "10.0.0.1", "node-1", "127.0.0.1", "*"])
    assert [package.name for package in found.software.packages] == ["nfs-kernel-server"]
    [file] = found.exports.files
    assert file.path == in_use.OWN_EXPORTS == "/etc/exports.d/gpunodes.exports"
    [line] = file.content.splitlines()[1:]
    path, *clients = line.split(" ")
    assert path == "/srv/scratch"
    assert [each.partition("(")[0] for each in clients] == ["10.0.0.1", "10.0.0.2"]
    needed = (",root_squash,", ",subtree_check,", ",insecure,", ",fsid=")
    assert all(option in each for option in needed for each in clients)
    again = storage.server("dnf", [OWN], ["10.0.0.1"]).exports.files[0].content
    assert re.findall(r"fsid=([0-9a-f-]{36})", again) == re.findall(r"fsid=([0-9a-f-]{36})", line)[:1]
    assert found.folders == ["/srv/scratch"]
    assert found.firewall.ports == {"tcp 2049": ["10.0.0.1", "10.0.0.2"]}
    # Other exports must not restart the server.
    assert not found.exports.services
    assert {found.software.section, found.exports.section} == {"nfs_server"}


def test_an_export_without_a_known_client_is_refused() -> None:
    with pytest.raises(WrongInput, match="no address of a node is known"):
        storage.server("apt", [OWN], ["node-1"])
    assert storage.server("apt", [], []).exports.files[0].content == "# Managed by gpunodes.\n"


def test_nodes_get_the_client_only_with_shares() -> None:
    given = {"gpunodes_storage": [GIVEN], "gpunodes_pod_subnet": "10.244.0.0/16"}
    assert not storage.clients({**given, "gpunodes_storage": []}, "apt")
    assert storage.clients(given, "apt")["nfs_client"].packages[0].name == "nfs-common"
    assert storage.clients(given, "dnf")["nfs_client"].packages[0].name == "nfs-utils"


@pytest.mark.parametrize(("named", "pool"), [({}, ""), ({"h100": {}}, "h100")])
def test_the_group_is_no_pool(named: dict[str, Any], pool: str) -> None:
    """A worker that serves stays in its pool, and in none if it has none."""
    given = settings.resolve({"gpunodes_pools": named})
    groups = [storage.GROUP, "workers", "h100"]
    assert pools.labels(given, groups).get(pools.POOL_LABEL, "") == pool


def test_only_the_machine_that_serves_opens_the_port() -> None:
    assert storage.serves([OWN], ["storage", "workers"])
    assert not storage.serves([GIVEN], ["storage"])
    assert not storage.serves([OWN], ["workers"])
    for role in (Role.CONTROL_PLANE, Role.WORKER):
        assert "tcp 2049" not in [port.text for port in ports.of(role)]
        assert firewall.wanted(role, ["10.0.0.1"], "10.244.0.0/16", storage=True).ports["tcp 2049"] == ["10.0.0.1"]


def test_each_namespace_gets_a_volume_that_only_its_claim_can_bind() -> None:
    found = storage.objects([GIVEN, OWN], "10.0.0.9")
    volumes = [each for each in found if each["kind"] == "PersistentVolume"]
    claims = [each for each in found if each["kind"] == "PersistentVolumeClaim"]
    assert len(volumes) == len(claims) == 3
    for volume, claim in zip(volumes, claims, strict=True):
        reference = volume["spec"]["claimRef"]
        assert (reference["namespace"], reference["name"]) == (
            claim["metadata"]["namespace"],
            claim["metadata"]["name"],
        )
        assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
        assert volume["spec"]["storageClassName"] == claim["spec"]["storageClassName"] == ""
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert volume["spec"]["mountOptions"] == ["hard", "nconnect=4", "noresvport", "nfsvers=4.2"]
    assert volumes[0]["spec"]["nfs"] == {"server": "nas.example", "path": "/export/training"}
    assert volumes[1]["spec"]["nfs"] == {"server": "10.0.0.9", "path": "/srv/scratch"}
    assert storage.claims([OWN]) == [{"namespace": name, "name": "scratch"} for name in ("default", "ml")]
    assert storage.servers([GIVEN, OWN], "10.0.0.9") == ["nas.example", "10.0.0.9"]
    assert storage.folders([GIVEN, {**OWN, "namespaces": []}], "10.0.0.9") == storage.sources(volumes)
    assert storage.folders([GIVEN, OWN], "") == ["nas.example:/export/training"]
    assert {tuple(each["spec"]["accessModes"]) for each in found} == {("ReadWriteMany",)}, "pods on all nodes"
    assert storage.sources(volumes) == ["nas.example:/export/training", "10.0.0.9:/srv/scratch"]


def test_names_of_volumes_are_never_the_same() -> None:
    one = storage.shares([{**GIVEN, "name": "a-b", "namespaces": ["c"]}])[0].volume("c")
    other = storage.shares([{**GIVEN, "name": "a", "namespaces": ["b-c"]}])[0].volume("b-c")
    assert one != other


def test_objects_of_others_and_fields_that_cannot_change_are_refused() -> None:
    wanted = storage.objects([GIVEN], "")
    keys = [(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in wanted]
    assert not storage.conflicts(wanted, {})
    assert not storage.conflicts(wanted, dict(zip(keys, wanted, strict=True)))
    foreign = {**wanted[1], "metadata": {"name": "training", "namespace": "default"}}
    [error] = storage.conflicts(wanted, {keys[1]: foreign})
    assert "PersistentVolumeClaim default/training exists, and is not of gpunodes" in str(error)
    moved = storage.objects([{**GIVEN, "server": "old.example"}], "")[0]
    [error] = storage.conflicts(wanted, {keys[0]: moved})
    assert "exists with old.example:/export/training; wanted: nas.example:/export/training" in str(error)
    larger = storage.objects([{**GIVEN, "size": "1Gi"}], "")[1]
    [error] = storage.conflicts(wanted, {keys[1]: larger})
    assert "exists with 1Gi; wanted: 900Gi, which cannot be changed" in str(error)


@pytest.mark.parametrize(
    ("size", "written"),
    [("1024Gi", "1Ti"), ("2048Gi", "2Ti"), ("1024Mi", "1Gi"), ("1000G", "1T"), ("2000", "2k")],
)
def test_a_size_is_the_same_as_the_api_server_writes_it(size: str, written: str) -> None:
    """In the canonical form of its quantities (k8s.io/apimachinery, pkg/api/resource, Quantity.CanonicalizeBytes)."""
    wanted, present = (storage.objects([{**GIVEN, "size": each}], "") for each in (size, written))
    keys = [(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in wanted]
    assert not storage.conflicts(wanted, dict(zip(keys, present, strict=True)))
    [error] = storage.conflicts(storage.objects([{**GIVEN, "size": "3Ti"}], ""), {keys[1]: present[1]})
    assert f"exists with {written}; wanted: 3Ti, which cannot be changed" in str(error)


def test_what_the_cluster_reports_of_a_volume_is_checked() -> None:
    hostile = [{"spec": {"nfs": {"server": server, "path": "/x"}}} for server in ("-o", "a b", "{{ x }}", "a\n")]
    assert storage.sources([*hostile, {"spec": {"nfs": {"server": "a", "path": "/../b"}}}, {"spec": None}, {}]) == []


def test_pods_that_have_ended_keep_their_claim() -> None:
    def pod(name: str, claim: str, phase: str) -> dict[str, Any]:
        volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}, {"name": "e", "emptyDir": {}}]
        return {
            "metadata": {"namespace": "ml", "name": name},
            "spec": {"volumes": volumes},
            "status": {"phase": phase},
        }

    pods = [pod("a", "scratch", "Running"), pod("b", "scratch", "Succeeded"), pod("c", "other", "Running")]
    assert storage.users([*pods, pod("d", "scratch", "Pending")], {("ml", "scratch")}) == ["ml/a", "ml/b", "ml/d"]


def test_the_address_of_the_server_is_that_of_its_node_if_one_is_set() -> None:
    assert storage.address("10.0.0.5", "") == "10.0.0.5"
    assert storage.address("10.0.0.5", "192.0.2.5") == "192.0.2.5"
    assert storage.address("10.0.0.5", "192.0.2.0/24") == "10.0.0.5"
