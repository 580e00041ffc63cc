"""The registry of a cluster: its address and share, its objects, what nodes trust, and the image that verifies it."""

from __future__ import annotations

import gzip
import io
import ipaddress
import json
import platform
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpunodes.ansible.module_utils import ledger
from gpunodes.ansible.module_utils.cluster import registry as published
from gpunodes.ansible.module_utils.host import spec
from gpunodes.ansible.module_utils.host.converge import converge
from gpunodes.errors import WrongInput
from gpunodes.planner import registry, registry_image, reports, storage
from gpunodes.planner.desired import Desired, desired

from tests.hostile import ATTACKS, cluster_report
from tests.stand_ins import given, gpu_machine

SHARES: list[dict[str, Any]] = [
    {"name": "training", "server": "nas.example", "path": "/export/training", "size": "900Gi"},
    {"name": "images", "path": "/srv/images", "size": "1Ti", "namespaces": ["default", "ml"]},
]
SETTINGS: dict[str, Any] = {
    "gpunodes_storage": SHARES,
    "gpunodes_registry_share": "images",
    "gpunodes_registry_address": "",
    "gpunodes_registry_image": "docker.io/library/registry:3.0.0",
    "gpunodes_service_subnet": "10.96.0.0/12",
}
CA = "-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----\n"


def requested(**more: Any) -> registry.Request:
    return registry.requested(SETTINGS | {f"gpunodes_{name}": value for name, value in more.items()}, "10.0.0.9")


@pytest.mark.parametrize(
    ("subnet", "expected"), [("10.96.0.0/12", "10.96.0.15"), ("10.7.0.0/24", "10.7.0.15"), ("10.0.0.0/27", "10.0.0.15")]
)
def test_the_address_is_one_that_kubernetes_gives_to_nobody_by_itself(subnet: str, expected: str) -> None:
    """It is in the band for fixed addresses, and neither that of the API nor that of the cluster's DNS."""
    found = requested(service_subnet=subnet)
    assert found.address == f"{expected}:5000"
    network = ipaddress.IPv4Network(subnet)
    # kubernetes, pkg/registry/core/service/ipallocator: calculateRangeOffset
    band = min(max(16, network.num_addresses // 16), 256)
    assert network[10] < ipaddress.IPv4Address(found.host) <= network[band]


def test_the_address_of_the_setting_is_taken() -> None:
    assert requested(registry_address="10.96.200.7").address == "10.96.200.7:5000"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"registry_address": "10.95.0.1"}, "gpunodes_registry_address is '10.95.0.1'; wanted: an address of Services"),
        ({"registry_address": "10.96.0.0"}, "gpunodes_registry_address is '10.96.0.0'"),
        ({"registry_address": "10.96.0.300"}, "gpunodes_registry_address is '10.96.0.300'"),
        ({"service_subnet": "10.96.0.0/28"}, "gpunodes_service_subnet is 10.96.0.0/28, which is too small"),
        ({"registry_share": "other"}, "gpunodes_registry_share is 'other', which gpunodes_storage does not have"),
        ({"registry_share": ""}, "gpunodes_storage has the shares training, images"),
        ({"storage": []}, "gpunodes_storage has no share"),
    ],
)
def test_wrong_settings_are_one_sentence(more: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongInput, match="^" + message.replace("(", r"\(")):
        requested(**more)


def test_the_only_share_needs_no_name() -> None:
    assert requested(registry_share="", storage=SHARES[:1]).folder == "nas.example:/export/training/gpunodes-registry"


def test_the_share_gets_a_claim_in_the_namespace_of_the_registry() -> None:
    found = requested()
    volume, claim = found.volumes
    assert volume["metadata"]["name"] == "gpunodes-images.gpunodes-registry"
    assert claim["metadata"]["namespace"] == registry.NAMESPACE
    assert found.folder == "10.0.0.9:/srv/images/gpunodes-registry"
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


def test_a_share_without_namespaces_is_for_the_registry_only() -> None:
    alone = [{**SHARES[1], "namespaces": []}]
    assert list(storage.problems(alone)) == []
    assert storage.objects(alone, "10.0.0.9") == storage.claims(alone) == []
    found = requested(storage=alone)
    assert (found.others, len(found.volumes)) == ([], 2)
    assert requested().others == ["default", "ml"]


def test_the_pod_gets_neither_the_key_of_the_ca_nor_the_password() -> None:
    made = registry.deployment(requested(), "certificate", "login")
    pod = made["spec"]["template"]["spec"]
    [mounted] = [each["secret"] for each in pod["volumes"] if "secret" in each]
    assert [each["key"] for each in mounted["items"]] == ["htpasswd", "tls.crt", "tls.key"]
    assert made["spec"]["strategy"] == {"type": "Recreate"}
    # The Service is called registry: links to it would be read as configuration, REGISTRY_PORT.
    assert pod["enableServiceLinks"] is False


def test_it_runs_on_a_control_plane_where_no_worker_takes_it() -> None:
    """All of them may have the taint of GPUs."""
    pod = registry.deployment(requested(), "certificate", "login")["spec"]["template"]["spec"]
    taint = "node-role.kubernetes.io/control-plane"
    assert pod["tolerations"] == [{"key": taint, "operator": "Exists", "effect": "NoSchedule"}]
    [preferred] = pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"] == {"matchExpressions": [{"key": taint, "operator": "DoesNotExist"}]}


def test_a_new_certificate_or_login_replaces_the_pod() -> None:
    given = (("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"))
    before, same, *after = (registry.deployment(requested(), *each)["spec"] for each in given)
    assert before == same
    assert before["template"] not in [each["template"] for each in after]


def test_each_runtime_gets_the_file_that_it_reads() -> None:
    both = registry.trust("10.96.0.15:5000", CA, {"containerd", "docker"})
    folder = "/etc/containerd/certs.d/10.96.0.15:5000"
    contents = {each.path: each.content for each in both.files}
    assert contents[f"{folder}/ca.crt"] == contents["/etc/docker/certs.d/10.96.0.15:5000/ca.crt"] == CA
    assert contents[f"{folder}/hosts.toml"].splitlines()[1:] == [
        'server = "https://10.96.0.15:5000"',
        f'ca = "{folder}/ca.crt"',
    ]
    assert [each.path for each in registry.trust("10.96.0.15:5000", CA, {"docker"}).files] == [
        "/etc/docker/certs.d/10.96.0.15:5000/ca.crt"
    ]
    # containerd is restarted for no file of it.
    assert both.services == ()


@pytest.mark.parametrize(
    ("docker", "runtime", "folders"),
    [
        ("", "containerd", {"containerd"}),
        ("docker.io", "containerd", {"containerd", "docker"}),
        ("", "docker", {"docker"}),
    ],
)
def test_a_node_of_a_cluster_with_a_registry_trusts_it(docker: str, runtime: str, folders: set[str]) -> None:
    """Also one that joins later; people's Docker on a node as well."""
    facts = gpu_machine(
        {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": None}
    )
    facts["gpu"]["runtimes"] = {docker: "26.1.5"} if docker else {}
    published = {"address": "10.96.0.15:5000", "ca": CA}
    made = desired(given(facts, gpunodes_runtime=runtime, registry=published))
    assert isinstance(made, Desired), made
    assert {each.path.split("/")[2] for each in made.wanted["registry_trust"].files} == folders
    without = desired(given(facts, gpunodes_runtime=runtime))
    assert isinstance(without, Desired), without
    assert "registry_trust" not in without.wanted


@pytest.mark.parametrize("address", ["", "../../x", "10.96.0.15", "host:5000", *ATTACKS])
def test_what_is_no_address_makes_no_path(address: str) -> None:
    with pytest.raises(WrongInput):
        registry.trust(address, CA, {"containerd"})


def test_what_was_written_is_removed_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "FOLDER", str(tmp_path / "ledger"))
    monkeypatch.setattr(ledger, "PATH", str(tmp_path / "ledger" / "ledger.json"))
    files = {path: f"{tmp_path}{path}" for path in registry._files("10.96.0.15:5000", CA)}
    (tmp_path / "etc" / "containerd").mkdir(parents=True)
    monkeypatch.setattr(registry, "_files", lambda _, ca: dict.fromkeys(files.values(), ca))
    monkeypatch.setattr(spec, "data_folders", lambda _: {})
    own = spec.Spec(files=tuple(spec.File(path, CA, owner=_user()) for path in files.values()))
    assert len(converge(own).actions) == 3
    assert converge(own).actions == []
    gone = registry.distrust("10.96.0.15:5000")
    (tmp_path / "etc" / "containerd" / "certs.d" / "10.96.0.15:5000" / "mine").touch()
    assert [each.partition(" ")[0] for each in converge(gone).actions] == ["remove"] * 4
    left = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "etc").rglob("*") if path.name == "mine")
    assert left == ["etc/containerd/certs.d/10.96.0.15:5000/mine"], "a file of somebody else keeps its folder"
    assert not (tmp_path / "etc" / "docker" / "certs.d" / "10.96.0.15:5000").exists()
    assert converge(gone).actions == []


def _user() -> str:
    import os
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


@pytest.mark.parametrize(
    "published", [{"address": "10.96.0.15:5000", "ca": CA}, {"address": "10.96.0.15:5000", "ca": CA + CA}, None]
)
def test_a_registry_in_the_report_of_a_cluster_is_valid(published: Any) -> None:
    assert reports.cluster_problem(cluster_report({"control-1": 1}) | {"registry": published}) == ""


@pytest.mark.parametrize("attack", [*ATTACKS, "10.96.0.15:5000/../..", CA + "x"])
def test_a_registry_in_the_report_of_a_cluster_has_a_form(attack: str) -> None:
    for wrong in ({"address": attack, "ca": CA}, {"address": "10.96.0.15:5000", "ca": attack}):
        assert reports.cluster_problem(cluster_report({"control-1": 1}) | {"registry": wrong})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"address": "10.96.0.15:5000", "ca": CA}),
        ({"address": "registry.example:5000"}, None),
        ({"ca.crt": CA + "{{ x }}"}, None),
        ({"ca.crt": None}, None),
        (None, None),
    ],
)
def test_a_control_plane_reports_what_registry_up_published_and_nothing_else(change: Any, expected: Any) -> None:
    """Otherwise the whole report of the cluster would be invalid, and with it every command."""
    found: Any = None
    client = SimpleNamespace(find=lambda _: found)
    labels = {"app.kubernetes.io/managed-by": "gpunodes"}
    data = {"address": "10.96.0.15:5000", "ca.crt": CA}
    found = None if change is None else {"metadata": {"labels": labels}, "data": {**data, **change}}
    assert published.published(client) == expected  # type: ignore[arg-type]  # as the module's client
    found = {"metadata": {}, "data": data}
    assert published.published(client) is None  # type: ignore[arg-type]  # as above


def test_the_image_that_verifies_is_complete_and_each_time_another_one() -> None:
    image = registry_image.made("amd64", "1")
    manifest = json.loads(image.manifest)
    config, layer = image.blobs
    for descriptor, blob in ((manifest["config"], config), (manifest["layers"][0], layer)):
        assert (descriptor["digest"], descriptor["size"]) == (registry_image.digest(blob), len(blob))
    packed = gzip.decompress(layer)
    assert json.loads(config)["rootfs"]["diff_ids"] == [registry_image.digest(packed)]
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert [(each.name, each.mode) for each in tar] == [("run", 0o755), ("nonce", 0o644)]
    assert registry_image.made("amd64", "1") == image
    assert registry_image.made("amd64", "2").blobs[1] != layer


def test_the_program_of_the_image_runs(tmp_path: Path) -> None:
    own = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine())
    if own is None:
        pytest.skip(f"there is no program for {platform.machine()}")
    path = tmp_path / "run"
    path.write_bytes(registry_image._program(own))
    path.chmod(0o755)
    assert subprocess.run([path], check=False).returncode == 0


@pytest.mark.parametrize("address", ["10.0.5.5:5000", "10.97.0.15:5000", "999.96.0.15:5000", ""])
def test_a_registry_that_is_no_service_of_the_cluster_is_not_trusted(address: str) -> None:
    """Who may make namespaces could publish a CA for the registry of another user."""
    facts = gpu_machine(
        {"address": "0000:3b:00.0", "vendor": "10de", "device": "2330", "class": "030200", "driver": None}
    )
    service = {"address": "10.96.0.15:5000", "ca": CA}
    settings: dict[str, Any] = {"gpunodes_service_subnet": "10.96.0.0/16"}
    made = desired(given(facts, registry={**service, "address": address}, **settings))
    assert isinstance(made, Desired)
    assert "registry_trust" not in made.wanted
    made = desired(given(facts, registry=service, **settings))
    assert isinstance(made, Desired)
    assert "registry_trust" in made.wanted
