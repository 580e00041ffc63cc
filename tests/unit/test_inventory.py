"""Selecting machines, and the errors for invalid edit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from gpunodes import settings
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.health.model import Action
from gpunodes.inventory import Inventory, edit, loader
from gpunodes.inventory.names import check_address, check_pattern
from gpunodes.model import Kubeconfig, Role
from gpunodes.operations import checked
from gpunodes.planner import gpu, versions
from gpunodes.views import document

from tests.bench import selection
from tests.command import run

PLAIN = """\
control_plane:
  hosts:
    control-1:
      ansible_host: 10.0.0.1
workers:
  hosts:
    worker-1:
      ansible_host: 10.0.0.11
    worker-2:
      ansible_host: 10.0.0.12
    worker-3:
  children:
    rack_b:
      hosts:
        gpu-[1:3]:
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "hosts.yml"
    file.write_text(PLAIN)
    return file


@pytest.fixture
def templated(tmp_path: Path) -> Path:
    """Two inventories that differ only in the site; addresses are made of it."""
    address = 'ansible_host: "{{ inventory_hostname }}.{{ site }}.example.com"'
    for site in ("prod", "lab"):
        (tmp_path / f"{site}.yml").write_text(
            f"all: {{vars: {{site: {site}, {address}}}}}\ncontrol_plane: {{hosts: {{control-1: }}}}\n"
            "workers: {hosts: {worker-1: }}\n"
        )
    return tmp_path


def test_a_template_of_an_address_is_rendered_everywhere(templated: Path) -> None:
    """History, records and identities of machines go by it: clusters of one template would share them."""
    prod, lab = (Inventory(templated / f"{site}.yml") for site in ("prod", "lab"))
    assert [each.address for each in prod.machines()] == ["control-1.prod.example.com", "worker-1.prod.example.com"]
    assert (prod.cluster, lab.cluster) == ("control-1.prod.example.com", "control-1.lab.example.com")
    assert [each.name for each in prod.select(["worker-1.prod.example.com"])] == ["worker-1"]


@pytest.mark.parametrize(
    ("site", "sentence"),
    [("{{ nowhere }}", "ansible_host of control-1 cannot be rendered"), ("-o", "control-1"), ("a b", "control-1")],
)
def test_a_template_of_an_address_without_a_usable_value_is_wrong_input(
    templated: Path, site: str, sentence: str
) -> None:
    path = templated / "prod.yml"
    path.write_text(path.read_text().replace("{{ inventory_hostname }}.{{ site }}.example.com", "{{ site }}"))
    path.write_text(path.read_text().replace("site: prod", f'site: "{site}"'))
    with pytest.raises(WrongInput, match=sentence):
        Inventory(path).machines()


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["worker-*"], ["worker-1", "worker-2", "worker-3"]),
        (["worker-2", "worker-1", "worker-2"], ["worker-2", "worker-1"]),
        (["10.0.0.11"], ["worker-1"]),
        (["rack_b"], ["gpu-1", "gpu-2", "gpu-3"]),
        (["worker-*:!worker-2"], ["worker-1", "worker-3"]),
        (["gpu-[13]"], ["gpu-1", "gpu-3"]),
    ],
)
def test_patterns_select(path: Path, patterns: list[str], names: list[str]) -> None:
    assert [machine.name for machine in Inventory(path).select(patterns, Role.WORKER)] == names


def test_selecting_each_machine_by_name_costs_little_more_than_one_pattern(tmp_path: Path) -> None:
    """Each name had the cost of the whole inventory: all names of 1,000 took 500 times as long as one pattern."""
    inventory = Inventory(selection.write(tmp_path, 500))
    assert selection.ratio(inventory, 500) < 50


def test_no_pattern_selects_all_of_the_role(path: Path) -> None:
    assert [machine.address for machine in Inventory(path).select([], Role.CONTROL_PLANE)] == ["10.0.0.1"]


def test_a_pattern_without_match_names_the_nearest(path: Path) -> None:
    with pytest.raises(WrongInput, match=r"'wrker-1' matches no machine.*worker-1") as error:
        Inventory(path).select(["wrker-1"])
    assert error.value.exit_code is ExitCode.WRONG_INPUT


def test_a_pattern_without_match_or_neighbour_lists_some_machines(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("workers: {hosts: {" + ", ".join(f"gpu-{number}: " for number in range(1, 31)) + "}}\n")
    with pytest.raises(WrongInput, match=r"it has: gpu-1, gpu-2, .*gpu-10 and 20 more") as error:
        Inventory(file).select(["zzz"])
    assert "ansible-inventory" not in str(error.value)


def test_a_machine_of_the_wrong_group_is_refused(path: Path) -> None:
    with pytest.raises(WrongInput, match="control-1 is not in the group workers"):
        Inventory(path).select(["control-1"], Role.WORKER)


@pytest.mark.parametrize("pattern", ["a;b", "$(reboot)", "a b", "`id`", "x|y", "../x", ""])
def test_shell_characters_are_refused(pattern: str) -> None:
    with pytest.raises(WrongInput):
        check_pattern(pattern)


@pytest.mark.parametrize("address", ["10.0.0.999", "1.2.3", "-x", "a b", "a..b", ""])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(WrongInput):
        check_address(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1", "gpu-1.rack.example"])
def test_good_addresses_pass(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", r"hosts.yml:1: the inventory is a list"),
        ("workers\n", r"hosts.yml:1: the inventory is a single value"),
        ("workers:\n  hosts:\n    a: [\n", r"hosts.yml:4: "),
        ("workers:\n  a1:\n", r"hosts.yml:2: 'a1' in the group workers"),
        ("workers:\n  hosts:\n    'a;b':\n", r"hosts.yml:3: 'a;b' is not a machine name"),
        ("workers:\n  hosts:\n  - a\n", r"hosts.yml:3: hosts of workers is a list"),
        ("workers:\n  hosts:\n    a: 10.0.0.1\n", r"hosts.yml:3: the machine a is a single value"),
        ("workers:\n\thosts:\n", r"hosts.yml:2: "),
    ],
)
def test_a_malformed_inventory_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text(text)
    with pytest.raises(WrongInput, match=message):
        Inventory(file)


def test_group_vars_that_are_not_a_mapping_name_their_line(path: Path) -> None:
    folder = path.parent / "group_vars"
    folder.mkdir()
    (folder / "all.yml").write_text("\n- gpunodes_network\n")
    with pytest.raises(WrongInput, match=r"all.yml:2: the file is a list"):
        Inventory(path)


def test_the_error_for_a_missing_inventory_names_init_master(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="init-master ADDRESS"):
        checked.inventory(tmp_path / "hosts.yml")


def test_the_first_control_plane_creates_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("control_plane:\n  hosts:\n    b:\n    a:\n")
    found = Inventory(file)
    assert [machine.name for machine in found.control_planes()] == ["b", "a"]
    assert found.control_plane().name == "b"
    file.write_text("workers:\n  hosts:\n    b:\n")
    with pytest.raises(WrongInput, match="no machine in the group control_plane"):
        Inventory(file).control_planes()


def test_an_inventory_behind_a_link_is_changed_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "dotfiles").mkdir()
    link, file = tmp_path / "hosts.yml", tmp_path / "dotfiles/hosts.yml"
    edit.add(file, Role.CONTROL_PLANE, ["10.0.0.1"], {})
    link.symlink_to(file)
    edit.add(link, Role.WORKER, ["10.0.0.2"], {})
    assert link.is_symlink()
    assert [each.address for each in Inventory(file).machines()] == ["10.0.0.1", "10.0.0.2"]


def test_addresses_are_added_to_an_inventory(tmp_path: Path) -> None:
    file = tmp_path / "inventory" / "hosts.yml"
    edit.add(file, Role.CONTROL_PLANE, ["10.0.0.1"], {"ansible_user": "admin"})
    edit.add(file, Role.WORKER, ["10.0.0.2"], {})
    found = Inventory(file)
    assert found.control_plane().address == "10.0.0.1"
    assert found.variables("10.0.0.1")["ansible_user"] == "admin"
    assert [machine.name for machine in found.machines(Role.WORKER)] == ["10.0.0.2"]
    assert found.variables("10.0.0.2")["ansible_user"] == "admin"


def test_an_inventory_with_passwords_stays_private(tmp_path: Path) -> None:
    """It was as readable as any new file after the next join by address."""
    file = tmp_path / "hosts.yml"
    edit.add(file, Role.CONTROL_PLANE, ["10.0.0.1"], {})
    file.chmod(0o600)
    change = edit.Tentative(file)
    steps = (
        lambda: edit.add(file, Role.WORKER, ["10.0.0.2", "10.0.0.3"], {}),
        lambda: change.drop(["10.0.0.2"]),
        change.undo,
    )
    for step in steps:
        step()
        assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["hosts.yml"]


def test_an_inventory_of_the_user_is_not_changed(path: Path) -> None:
    before = path.read_text()
    with pytest.raises(WrongInput, match=r"10\.0\.0\.9 is not in"):
        edit.add(path, Role.WORKER, ["10.0.0.9"], {})
    assert path.read_text() == before
    assert yaml.safe_load(before)


def test_templates_of_a_connection_are_rendered(path: Path) -> None:
    path.write_text(
        PLAIN + "  vars:\n    secret: s\n    ansible_become_password: '{{ secret }}'\n    other: '{{ secret }}'\n"
    )
    connection = Inventory(path).connection("worker-1")
    assert connection["ansible_become_password"] == "s"
    assert connection["other"] == "{{ secret }}"


def test_a_wrong_connection_can_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    edit.add(path, Role.CONTROL_PLANE, ["10.0.0.1"], {"ansible_user": "wrong", "ansible_port": 22})
    edit.reconnect(path, Inventory(path).machines(), {"ansible_user": "right"})
    variables = Inventory(path).variables("10.0.0.1")
    assert (variables["ansible_user"], variables["ansible_port"]) == ("right", 22)


def test_connections_in_an_inventory_of_the_user_are_not_changed(path: Path) -> None:
    machines = Inventory(path).select(["worker-1"])
    with pytest.raises(WrongInput, match="gpunodes did not create"):
        edit.reconnect(path, machines, {"ansible_user": "x"})
    assert path.read_text() == PLAIN


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("gpunodes_containerd_sorce", "docker", "is not a setting.*the nearest: gpunodes_containerd_source"),
        ("gpunodes_runtime", "nope", "'nope'; wanted: one of containerd, docker"),
        ("gpunodes_image_mirrors", ["a"], "wanted: type dict"),
        ("gpunodes_kubernetes_version", 1.36, "type str, in quotes"),
        ("gpunodes_kubernetes_version", ["1.36"], "wanted: type str"),
        ("gpunodes_pod_subnet", "banana", "'banana'; wanted: a network in CIDR notation"),
        ("gpunodes_pod_subnet", "10.96.1.0/24", "overlaps gpunodes_service_subnet"),
        ("gpunodes_kubernetes_version", "latest", 'wanted: a minor or an exact version, such as "1.36"'),
        ("gpunodes_control_plane_endpoint", "https://api:6443", "wanted: HOST:PORT"),
        ("gpunodes_docker_packages_url", "mirror.example/docker", "wanted: an http or https URL"),
        ("gpunodes_docker_packages_fingerprint", "abc", "40 hexadecimal digits"),
        ("gpunodes_image_mirrors", {"registry.k8s.io": "mirror"}, "URLs by registry"),
        ("gpunodes_driver_branch", "new", 'such as "580"'),
        ("gpunodes_cuda_versions", ["12"], "such as"),
        ("gpunodes_repair_max_unavailable", "0", "a percentage such as 10%"),
        ("gpunodes_repair_unhealthy_percent", 200, "a percentage, 0 to 100"),
        ("gpunodes_drain_timeout", -1, "a number of seconds"),
        ("gpunodes_pod_subnet", "10.0.0.0/16,fd00::/56", "clusters with IPv6 are not supported"),
        ("gpunodes_service_subnet", "fd01::/112", "clusters with IPv6 are not supported"),
        ("gpunodes_control_plane_endpoint", "[fd00::1]:6443", "clusters with IPv6 are not supported"),
        ("gpunodes_node_address", "2001:db8::1", "clusters with IPv6 are not supported"),
        ("gpunodes_node_address", "eth1", "an IPv4 address of the machine, or a network such as 10.0.0.0/24"),
        ("gpunodes_node_address", "10.0.0.1; reboot", "an IPv4 address of the machine"),
        ("gpunodes_node_address", ["10.0.0.1"], "wanted: type str"),
        ("gpunodes_drain_timeout", "soon", "wanted: type int"),
        ("gpunodes_node_taints", [{"key": "a", "effect": "Never"}], "NoSchedule"),
        ("gpunodes_node_labels", {"rack": "r 7"}, "labels of a node"),
        ("gpunodes_pools", ["h100"], "wanted: type dict"),
        ("gpunodes_pools", {"h 100": {}}, "such as {h100: {max: 4, priority: 50}, cpu: {}}"),
        ("gpunodes_pools", {"h100": {"size": 3}}, "such as {h100: {max: 4, priority: 50}, cpu: {}}"),
        ("gpunodes_feature_gates", {"Foo": "maybe"}, "true or false"),
        ("gpunodes_time_service", "chrony", "one of leave, install"),
        ("gpunodes_time_servers", ["ntp.example\nserver evil"], "host names or addresses"),
        ("gpunodes_time_servers", ["-x"], "host names or addresses"),
        ("gpunodes_monitoring_retention", "15 days", "such as 15d or 12h"),
        ("gpunodes_monitoring_memory", "2G", "such as 2Gi"),
        ("gpunodes_monitoring_claim", "a\nb: c", "PersistentVolumeClaim"),
        ("gpunodes_monitoring_targets", ["10.0.0.1"], "a list of HOST:PORT"),
        ("gpunodes_monitoring_targets", ["http://10.0.0.1:9836"], "a list of HOST:PORT"),
        ("gpunodes_monitoring_alertmanagers", ["a:9093\nb"], "a list of HOST:PORT"),
        ("gpunodes_data_directory", "data", "such as /data"),
        ("gpunodes_data_directory", "/", "such as /data"),
        ("gpunodes_data_directory", "/data/", "such as /data"),
        ("gpunodes_data_directory", "/data/../etc", "such as /data"),
        ("gpunodes_data_directory", "/data\nOptions=suid", "such as /data"),
        ("gpunodes_data_directory", "/da ta", "such as /data"),
        ("gpunodes_pod_pids_limit", 0, "1024 to 4194304, or -1"),
        ("gpunodes_component_arguments", {"kubelet": {"v": "2"}}, "by apiServer, controllerManager, scheduler, etcd"),
        ("gpunodes_component_arguments", {"scheduler": {"leader-elect": False}}, "arguments in quotes"),
        ("gpunodes_component_arguments", {"etcd": {"heartbeat-interval": 500}}, "arguments in quotes"),
        ("gpunodes_component_arguments", {"etcd": {"--name=x": "y"}}, "arguments in quotes"),
        ("gpunodes_component_arguments", {"etcd": ["heartbeat-interval=500"]}, "arguments in quotes"),
        ("gpunodes_pod_pids_limit", "many", "wanted: type int"),
        ("gpunodes_bmc_password", ["secret"], "^gpunodes_bmc_password of worker-1 cannot be used; wanted: type str"),
    ],
)
def test_invalid_settings(key: str, value: object, message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        settings.report_all(Path("hosts.yml"), {"worker-1": list(settings.problems({key: value}))})


def test_all_wrong_settings_of_all_machines_are_one_error() -> None:
    wrong: dict[str, object] = {"gpunodes_pod_subnet": "banana", "gpunodes_runtime": "nope"}
    machines = {"a": wrong, "b": {**wrong, "gpunodes_gpu_timeout": 0}}
    with pytest.raises(WrongInput) as raised:
        settings.report_all(
            Path("hosts.yml"), {name: list(settings.problems(variables)) for name, variables in machines.items()}
        )
    assert [problem.found for problem in raised.value.problems] == [
        "gpunodes_pod_subnet of a, b is 'banana'",
        "gpunodes_runtime of a, b is 'nope'",
        "gpunodes_gpu_timeout of b is 0",
    ]
    assert json.loads(document.error(raised.value))["problems"][1] == {
        "found": "gpunodes_runtime of a, b is 'nope'",
        "wanted": "one of containerd, docker",
        "remedy": "correct these settings of the inventory hosts.yml",
    }


@pytest.mark.parametrize(
    "command",
    [
        *("up", "join w1", "init-master", "preflight", "remove w1 --yes", "reset w1 --yes"),
        *("gpu plan", "gpu verify", "gpu install w1", "gpu burn-in w1", "gpu remove w1 --yes"),
        *("status", "kubeconfig", "health", "health --reboot-hung", "repair w1 --yes", "power w1 status"),
        *("maintenance on w1 --reason disk", "maintenance off w1", "maintenance list", "uncordon w1"),
    ],
)
def test_wrong_settings_stop_a_command_before_it_contacts_a_machine(tmp_path: Path, command: str) -> None:
    (tmp_path / "hosts.yml").write_text(
        "control_plane: {hosts: {c1: {ansible_host: 192.0.2.1, gpunodes_pod_subnet: banana}}}\n"
        "workers:\n"
        "  hosts: {w1: {ansible_host: 192.0.2.2}, w2: {ansible_host: 192.0.2.3, gpunodes_health_xids: {79: often}}}\n"
        "  vars: {gpunodes_repair_max_unavailable: many, gpunodes_repair_max_unavailble: 1}\n"
        "all: {vars: {gpunodes_kubernetes_version: '1.99'}}\n"
    )
    done = run(tmp_path, *command.split(), "-i", "hosts.yml", variables={"XDG_STATE_HOME": str(tmp_path / "state")})
    assert done.returncode == 2
    page = "`gpunodes help --page settings`"
    budget, typo = "gpunodes_repair_max_unavailable", "gpunodes_repair_max_unavailble"
    assert done.stderr.splitlines() == [
        (
            "error: gpunodes_pod_subnet of c1 is 'banana'; wanted: a network in CIDR notation, such as 10.244.0.0/16; "
            "clusters with IPv6 are not supported"
        ),
        f"error: {budget} of w1, w2 is 'many'; wanted: a number of machines, or a percentage such as 10%",
        f"error: {typo} of w1, w2 is not a setting; wanted: a setting of {page}; the nearest: {budget}",
        "error: gpunodes_health_xids of w2 is {79: 'often'}; wanted: actions by code, such as {79: repair}",
        f"error: gpunodes cannot install Kubernetes 1.99; wanted: one of {', '.join(versions.minors())}",
        "hint: correct these settings of the inventory hosts.yml",
    ]
    assert not (tmp_path / "state" / "gpunodes" / "runs").exists()


def test_pools_that_do_not_exist_or_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(
        "workers:\n  vars: {gpunodes_pools: {h100: {}, h10: {}, dc1: {}}}\n  children:\n"
        "    dc1: {hosts: {a: {}, b: {}, c: {}}}\n    h100: {hosts: {a: {}, b: {gpunodes_pool: spare}}}\n"
    )
    with pytest.raises(WrongInput) as raised:
        checked.inventory(path)
    assert [str(problem.fact) for problem in raised.value.problems] == [
        "gpunodes_pools of a, b, c names h10, which is no group; wanted: groups of the inventory; the nearest: h100",
        (
            "gpunodes_pools of a names dc1 and h100, and the machine is in all of these groups; "
            "wanted: one of them, or the machine's pool in gpunodes_pool"
        ),
    ]
    path.write_text(path.read_text().replace(", h10: {}, dc1: {}", ""))
    assert len(checked.inventory(path).machines()) == 3


def test_every_action_can_be_the_site_s_own() -> None:
    actions = {code: action.value for code, action in enumerate(Action)}
    assert list(settings.problems({"gpunodes_health_xids": actions, "gpunodes_health_sxids": actions})) == []


def test_valid_settings() -> None:
    valid = {
        "gpunodes_pod_subnet": "10.0.0.0/16",
        "gpunodes_service_subnet": "10.1.0.0/16",
        "gpunodes_control_plane_endpoint": "10.2.0.1:6443",
        "gpunodes_node_address": "10.2.0.0/16",
        "gpunodes_cuda_versions": ["12.4", "13.0"],
        "gpunodes_pools": {"h100": {}, "v100": None},
        "gpunodes_docker_packages_url": "http://mirror.lab/docker/linux/{system}",
        "gpunodes_repair_max_unavailable": "10%",
        "gpunodes_drain_timeout": "900",
        "gpunodes_node_taints": [{"key": "a", "effect": "NoExecute"}],
        "gpunodes_node_labels": {"example.com/rack": "r7", "empty": ""},
        "gpunodes_feature_gates": {"Foo": True},
        "gpunodes_docker_packages_fingerprint": "9DC8 5822 9FC7 DD38 854A E2D8 8D81 803C 0EBF CD88",
    }
    assert list(settings.problems(valid)) == []
    assert list(settings.problems({**settings.defaults(), "gpunodes_runtime": "{{ later }}", "other": 1.5})) == []


def test_booleans_and_numbers_of_an_ini_inventory_have_their_type(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.ini"
    hosts.write_text(
        "[control_plane]\ncontrol-1\n[workers]\ngpu-1 gpunodes_gpu_taint=false gpunodes_unsupported_os=No\n"
        "[workers:vars]\ngpunodes_burn_in=yes\ngpunodes_gpu_timeout='900'\ngpunodes_burn_in_nccl_bandwidth='1.5'\n"
    )
    found = settings.resolve(checked.inventory(hosts).variables("gpu-1"))
    names = ("gpu_taint", "unsupported_os", "burn_in", "gpu_timeout", "burn_in_nccl_bandwidth")
    assert [found[f"gpunodes_{name}"] for name in names] == [False, False, True, 900, 1.5]
    assert gpu.taints(found, gpus=True) == []
    assert not gpu.requested_of(found, "1.36").unsupported_os


@pytest.mark.parametrize("setting", ["gpunodes_unsupported_os=perhaps", "gpunodes_gpu_timeout=long"])
def test_a_text_that_is_neither_boolean_nor_number_is_wrong_input(tmp_path: Path, setting: str) -> None:
    hosts = tmp_path / "hosts.ini"
    hosts.write_text(f"[control_plane]\ncontrol-1\n[workers]\ngpu-1 {setting}\n")
    done = run(tmp_path, "preflight", "-i", str(hosts))
    key, _, value = setting.partition("=")
    assert done.returncode == ExitCode.WRONG_INPUT
    assert f"{key} of gpu-1 is '{value}'; wanted: type" in done.stderr


def test_settings_are_converted_by_their_declared_type() -> None:
    """The texts of booleans are Ansible's."""
    from ansible.module_utils.parsing import convert_bool

    declared = {
        name: option["type"]
        for name, option in settings._options().items()
        if option["type"] in {"bool", "int", "float"} and name in settings.defaults()
    }
    assert set(settings._not_text()) - {"gpunodes_bmc_verify"} == declared.keys()
    for name, kind in declared.items():
        text, value = {"bool": ("off", False), "int": ("7", 7), "float": ("7.5", 7.5)}[kind]
        assert settings.resolve({name: text})[name] == value, name
        assert settings.resolve({name: "neither"})[name] == "neither"
    texts = {each for each in convert_bool.BOOLEANS if isinstance(each, str)}
    assert {each: settings._boolean(each) for each in texts} == {each: convert_bool.boolean(each) for each in texts}
    assert texts | {"1.0", "0.0"} == {*settings._TRUE, *settings._FALSE}


def test_a_dry_run_leaves_the_inventory_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "inventory" / "hosts.yml"
    with edit.tentative(file, dry_run=True):
        edit.add(file, Role.CONTROL_PLANE, ["10.0.0.1"], {})
        assert Inventory(file).unknown(["10.0.0.1", "10.0.0.9"]) == ["10.0.0.9"]
    assert list(tmp_path.iterdir()) == []
    with edit.tentative(file, dry_run=False):
        edit.add(file, Role.CONTROL_PLANE, ["10.0.0.1"], {})
    before = file.read_bytes()
    with edit.tentative(file, dry_run=True):
        edit.add(file, Role.WORKER, ["10.0.0.2"], {})
    assert file.read_bytes() == before


def test_wrong_input_leaves_the_inventory_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "inventory" / "hosts.yml"

    def mistyped() -> None:
        with edit.tentative(file, dry_run=False):
            edit.add(file, Role.CONTROL_PLANE, ["10.0.0.1"], {})
            raise WrongInput("x")

    with pytest.raises(WrongInput):
        mistyped()
    assert list(tmp_path.iterdir()) == []


def test_machines_that_were_added_can_be_dropped(tmp_path: Path) -> None:
    file = tmp_path / "inventory" / "hosts.yml"
    with edit.tentative(file, dry_run=False):
        edit.add(file, Role.CONTROL_PLANE, ["10.0.0.1"], {"ansible_user": "a"})
    before = yaml.safe_load(file.read_text())
    with edit.tentative(file, dry_run=False) as change:
        edit.add(file, Role.WORKER, ["10.0.0.2", "10.0.0.3"], {})
        change.drop(["10.0.0.2"])
        assert list(yaml.safe_load(file.read_text())["workers"]["hosts"]) == ["10.0.0.3"]
        change.drop(["10.0.0.3"])
    assert yaml.safe_load(file.read_text()) == before


def test_changes_of_others_survive_a_dry_run_and_wrong_input(tmp_path: Path) -> None:
    """A dry run takes minutes: a user may edit the inventory meanwhile, and their own one is never written."""
    file = tmp_path / "inventory" / "hosts.yml"
    edit.add(file, Role.CONTROL_PLANE, ["10.0.0.1"], {})
    with edit.tentative(file, dry_run=True):
        edit.add(file, Role.WORKER, ["10.0.0.2"], {})
        edited = f"{file.read_text()}# edited\n"
        file.write_text(edited)
    assert file.read_text() == edited
    with edit.tentative(file, dry_run=True):
        file.write_text("workers: {}\n")
    assert file.read_text() == "workers: {}\n"


def test_a_folder_is_read_without_what_ansible_ignores(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(PLAIN)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "more.ini").write_text("[workers]\nmore-1\n")
    (tmp_path / "hosts.yml.bak").write_text("- no\n- inventory\n")
    (tmp_path / ".cache").mkdir()
    for number in range(loader._MOST_ENTRIES):
        (tmp_path / ".cache" / f"{number}.yml").write_text("- no inventory\n")
    assert "control-1" in [machine.name for machine in Inventory(tmp_path).machines()]


def test_a_folder_that_is_no_inventory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    script = tmp_path / "0.sh"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    script.chmod(0o755)
    for number in range(loader._MOST_ENTRIES):
        (tmp_path / f"{number}.log").touch()
    with pytest.raises(WrongInput, match="holds more than 300 files and folders; wanted: an inventory"):
        Inventory(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_yaml_file_of_a_folder_that_is_no_inventory_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(PLAIN)
    (tmp_path / "site.yml").write_text("- hosts: all\n")
    with pytest.raises(WrongInput, match=r"site\.yml:1: the inventory is a list"):
        Inventory(tmp_path)


def test_a_kubeconfig_is_for_inventories_without_control_planes(tmp_path: Path) -> None:
    """That of the user counts before that of the settings, whose templates are rendered."""
    path, given = tmp_path / "hosts.yml", "gpunodes_api_kubeconfig: '~/{{ x }}.conf', gpunodes_api_context: c, x: a"
    path.write_text(f"workers: {{hosts: {{w1: }}, vars: {{{given}}}}}\n")
    assert Inventory(path).kubeconfig == Kubeconfig(Path.home() / "a.conf", "c")
    assert Inventory(path, Kubeconfig(Path("b"))).kubeconfig == Kubeconfig(Path("b"))
    path.write_text(f"control_plane: {{hosts: {{c1: }}}}\nworkers: {{hosts: {{w1: }}}}\nall: {{vars: {{{given}}}}}\n")
    with pytest.raises(WrongInput, match=r"c1.*leave gpunodes_api_kubeconfig out, or empty the group control_plane"):
        checked.inventory(path)
    path.write_text("workers: {hosts: {w1: }, vars: {gpunodes_api_kubeconfig: a.conf}}\n")
    with pytest.raises(WrongInput, match="wanted: an absolute path, or one that begins with ~/"):
        checked.inventory(path)
    path.write_text("workers: {hosts: {w1: }}\n")
    assert checked.inventory(path).kubeconfig is None


@pytest.mark.parametrize("context", ["", "gpunodes_api_context: other"])
def test_an_inventory_has_one_kubeconfig(tmp_path: Path, context: str) -> None:
    """Machines of the second cluster would be looked for in the first; GPU hosts have no cluster."""
    path, given = tmp_path / "hosts.yml", "gpunodes_api_kubeconfig: /a.conf"
    hosts = f"{{w1: {{{given}}}, w2: {{{given if context else ''}{', ' if context else ''}{context}}}}}"
    path.write_text(f"workers: {{hosts: {hosts}}}\n")
    with pytest.raises(WrongInput, match=r"w1 and w2 of .* differ in gpunodes_api_kubeconfig or gpunodes_api_context"):
        checked.inventory(path)
    path.write_text(f"workers: {{hosts: {{w1: }}, vars: {{{given}}}}}\ngpu_hosts: {{hosts: {{g1: }}}}\n")
    assert checked.inventory(path).kubeconfig == Kubeconfig(Path("/a.conf"))


def test_a_command_that_needs_control_planes_says_so_of_a_kubeconfig(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("workers: {hosts: {w1: }, vars: {gpunodes_api_kubeconfig: /a.conf}}\n")
    with pytest.raises(WrongInput, match=r"only the kubeconfig /a\.conf.*--page other-clusters"):
        checked.inventory(path, checked.Needs.CLUSTER)
    path.write_text("workers: {hosts: {w1: }}\n")
    with pytest.raises(WrongInput, match="add it to the inventory"):
        checked.inventory(path, checked.Needs.CLUSTER)


def test_a_share_of_data_that_was_moved_is_refused(tmp_path: Path) -> None:
    """That of a node which serves no share does not count."""
    path, share = tmp_path / "hosts.yml", "{name: t, path: /data, size: 1Gi}"
    given = "{gpunodes_data_directory: /data}"
    text = "workers: {{hosts: {{w1: {worker}}}}}\nstorage: {{hosts: {{s1: {server}}}}}\n"
    text += f"all: {{{{vars: {{{{gpunodes_storage: [{share.replace('{', '{{').replace('}', '}}')}]}}}}}}}}\n"
    path.write_text(text.format(worker="", server=given))
    with pytest.raises(WrongInput, match=r"has the path '/data' in t, where gpunodes_data_directory has other data"):
        checked.inventory(path)
    path.write_text(text.format(worker=given, server=""))
    assert len(checked.inventory(path).machines()) == 1
