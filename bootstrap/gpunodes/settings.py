"""The settings of a cluster: the inventory's variables `gpunodes_*`, and defaults from the role `settings`.

The only place of the defaults is ``roles/settings/defaults/main.yml``.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpunodes.ansible.module_utils import proxies
from gpunodes.errors import WrongInput, together


def content() -> Path:
    """The collection's folder (`playbooks`, `roles`, `plugins`): of the installed package, or of the checkout."""
    package = Path(__file__).parent
    root = package / "content" if (package / "content").is_dir() else package.parent
    return root / "ansible_collections" / "gpunodes" / "bootstrap"


def pages() -> Path:
    """The folder of the documentation's pages (`NAME.md`): of the installed package, or of the checkout."""
    package = Path(__file__).parent
    return package / "docs" if (package / "docs").is_dir() else package.parents[1] / "docs"


def plugins() -> Path:
    """The folder of gpunodes' Ansible modules and filters."""
    return Path(__file__).parent / "ansible"


def state_home() -> Path:
    """The folder of runs: ``$XDG_STATE_HOME/gpunodes``, by default ``~/.local/state/gpunodes``; mode 0700.

    Raises WrongInput if it cannot be created.
    """
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    path = Path(base) / "gpunodes"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise WrongInput(
            f"the folder {path} cannot be made: {error.strerror}",
            "a folder that this user can write",
            "set HOME, or XDG_STATE_HOME, to one",
        ) from error
    return path


def check_ansible_home() -> None:
    """Raise WrongInput where Ansible cannot have its folder, which it makes when it is imported."""
    path = Path(os.environ.get("ANSIBLE_HOME") or "~/.ansible").expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = "" if os.access(path, os.W_OK) else "it cannot be written"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise WrongInput(
            f"Ansible's folder {path} cannot be used: {problem}",
            "a folder that this user can write",
            "set HOME, or ANSIBLE_HOME, to one",
        )


VERBOSE = "GPUNODES_VERBOSE"
"""The environment variable that --verbose sets."""


def verbose() -> bool:
    """Whether Ansible's own output is shown."""
    return os.environ.get(VERBOSE, "") not in {"", "0"}


def known_hosts() -> Path:
    """gpunodes' file of SSH host keys: a key is added at the first contact, a changed one is refused by ssh."""
    return state_home() / "known_hosts"


@functools.cache
def defaults() -> Mapping[str, Any]:
    """The default of every setting."""
    path = content() / "roles/settings/defaults/main.yml"
    loaded: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def resolve(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a machine with these inventory variables."""
    return {name: variables.get(name, default) for name, default in defaults().items()}


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """A wrong setting of a machine. ``found`` follows the setting's name and machine in a sentence."""

    key: str
    found: str
    wanted: str


def report_all(path: Path, machines: Mapping[str, Sequence[SettingProblem]], more: Sequence[WrongInput] = ()) -> None:
    """Raise WrongInput for the problems of all machines, by name, and for ``more``; nothing where there are none.

    ``path`` is their inventory, which the one remedy of all names.
    """
    found: dict[SettingProblem, list[str]] = {}
    for name, wrong_settings in machines.items():
        for problem in wrong_settings:
            found.setdefault(problem, []).append(name)
    wrong = [(_sentence(each, names), each.wanted) for each, names in found.items()]
    wrong += [(each.problem.found, each.problem.wanted) for each in more]
    if wrong:
        remedy = f"correct {'this setting' if len(wrong) == 1 else 'these settings'} of the inventory {path}"
        raise together([WrongInput(*each, remedy) for each in wrong])


def problems(variables: Mapping[str, Any]) -> Iterator[SettingProblem]:
    """What is wrong with the `gpunodes_*` variables of one machine.

    The argument specification of the role `settings` decides, with the formats below. Templates are not checked: only
    Ansible can render them.
    """
    from ansible.errors import AnsibleError

    known = _options()
    for key, value in variables.items():
        if not key.startswith("gpunodes_"):
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            yield SettingProblem(
                key,
                "is not a setting",
                f"a setting of `gpunodes help --page settings`{f'; the nearest: {near[0]}' if near else ''}",
            )
            continue
        # A value in a locked vault is left to Ansible too.
        with contextlib.suppress(AnsibleError):
            yield from _problems_of(key, value, known[key])
    with contextlib.suppress(AnsibleError):
        yield from _overlaps(resolve(variables))


def _sentence(problem: SettingProblem, names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return f"{problem.key} of {shown} {problem.found}"


_NAMED = 4
"""Machines that an error names."""


def _problems_of(key: str, value: Any, option: Mapping[str, Any]) -> Iterator[SettingProblem]:
    from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

    if "{{" in str(value) or value == defaults().get(key):
        return
    secret = "password" in key or key in {"gpunodes_http_proxy", "gpunodes_https_proxy"}
    fact = "cannot be used" if secret else f"is {value!r}"
    # Ansible converts any value to a string, and YAML an unquoted 1.30 to the number 1.3.
    not_text = option["type"] == "str" and isinstance(value, (float, list, dict))
    if not_text or ArgumentSpecValidator({key: option}).validate({key: value}).error_messages:
        choices = option.get("choices")
        yield SettingProblem(
            key,
            fact,
            f"one of {', '.join(map(str, choices))}"
            if choices
            else f"type {option['type']}{', in quotes' if isinstance(value, float) else ''}",
        )
        return
    for names, wanted, holds in _FORMS:
        if fnmatch.fnmatchcase(key, names):
            if not holds(value):
                yield SettingProblem(key, fact, wanted)
            return


def _overlaps(resolved: Mapping[str, Any]) -> Iterator[SettingProblem]:
    pods, services = (_subnets(resolved[f"gpunodes_{name}_subnet"]) for name in ("pod", "service"))
    if any(a.version == b.version and a.overlaps(b) for a in pods for b in services):
        yield SettingProblem(
            "gpunodes_pod_subnet",
            f"is {resolved['gpunodes_pod_subnet']}, which overlaps gpunodes_service_subnet",
            "two networks without a common address",
        )


def _subnets(value: Any) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """The networks of a setting, none for anything else."""
    try:
        return [ipaddress.ip_network(part.strip(), strict=False) for part in str(value).split(",") if "/" in part]
    except ValueError:
        return []


def _is_ipv4_network(text: str) -> bool:
    """Whether a text is an IPv4 network in CIDR notation, or an IPv4 address."""
    try:
        ipaddress.IPv4Network(text, strict=False)
    except ValueError:
        return False
    return True


def _text(pattern: str) -> Callable[[Any], bool]:
    """Whether a value, as text, matches a pattern as a whole."""
    return lambda value: re.fullmatch(pattern, str(value).strip()) is not None


def _each(pattern: str) -> Callable[[Any], bool]:
    """The same for each value of a list."""
    return lambda value: all(map(_text(pattern), value if isinstance(value, list) else str(value).split(",")))


def _entries(name: str, pattern: str) -> Callable[[Any], bool]:
    """Whether each name and each value of a mapping match their patterns; a text is left to Ansible."""
    return lambda value: (
        not isinstance(value, Mapping)
        or all(_text(name)(key) and _text(pattern)(inner) for key, inner in value.items())
    )


def _number(least: int, most: int = 10**9) -> Callable[[Any], bool]:
    return lambda value: least <= int(value) <= most


def _pids(value: Any) -> bool:
    """Whether a pod with this limit can work, and the kernel can have as many processes (PID_MAX_LIMIT)."""
    return int(value) == -1 or 1024 <= int(value) <= 4194304  # noqa: PLR2004 - the limits in the message


def _taint(value: Any) -> bool:
    return isinstance(value, Mapping) and (
        set(value) <= {"key", "value", "effect"}
        and bool(value.get("key"))
        and value.get("effect") in {"NoSchedule", "PreferNoSchedule", "NoExecute"}
    )


def _arguments(value: Any) -> bool:
    """Whether kubeadm accepts these arguments: known components, and texts (its configuration has no other types)."""
    argument = _text(r"[A-Za-z0-9][A-Za-z0-9-]*")
    return not isinstance(value, Mapping) or all(
        component in {"apiServer", "controllerManager", "scheduler", "etcd"}
        and isinstance(given, Mapping)
        and all(argument(name) and isinstance(text, str) for name, text in given.items())
        for component, given in value.items()
    )


def _exceptions(value: Any) -> bool:
    return all(map(proxies.is_exception, proxies.listed(value)))


_URL = r"https?://[^\s/]+\S*"
_LABEL = r"([A-Za-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
_ONLY_IPV4 = "; clusters with IPv6 are not supported"
_SECONDS = ("a number of seconds, 1 or more", _number(1))

_FORMS: Sequence[tuple[str, str, Callable[[Any], bool]]] = (
    (
        "gpunodes_kubernetes_version",
        'a minor or an exact version, such as "1.36" or "1.36.3"',
        _text(r"1\.\d+(\.\d+)?"),
    ),
    (
        "gpunodes_control_plane_endpoint",
        f"HOST:PORT, such as api.example:6443{_ONLY_IPV4}",
        _text(r"[A-Za-z0-9.-]+(:\d{1,5})?"),
    ),
    (
        "gpunodes_control_plane_vip",
        f"an IPv4 address that no machine has, such as 10.0.0.10{_ONLY_IPV4}",
        _text(r"(?!0|127\.|169\.254\.|22[4-9]\.|2[3-5]\d\.)\d{1,3}(\.\d{1,3}){3}"),
    ),
    (
        "gpunodes_control_plane_vip_router_id",
        "a number, 1 to 255, or 0 for the last byte of the address",
        _number(0, 255),
    ),
    ("gpunodes_control_plane_vip_interval", "a number of seconds, 1 to 40", _number(1, 40)),
    (
        "gpunodes_node_address",
        f"an IPv4 address of the machine, or a network such as 10.0.0.0/24 that contains it{_ONLY_IPV4}",
        lambda value: _is_ipv4_network(str(value).strip()),
    ),
    (
        "gpunodes_*_subnet",
        f"a network in CIDR notation, such as 10.244.0.0/16{_ONLY_IPV4}",
        lambda value: "/" in str(value) and _is_ipv4_network(str(value).strip()),
    ),
    ("gpunodes_*_packages_url", "an http or https URL", _text(_URL)),
    (
        "gpunodes_*_packages_fingerprint",
        "the 40 hexadecimal digits of a fingerprint",
        _text(r"([0-9A-Fa-f] ?:?){40,64}"),
    ),
    (
        "gpunodes_image_mirrors",
        "URLs by registry, such as {registry.k8s.io: https://mirror.example}",
        _entries(r"[^\s/]+", _URL),
    ),
    ("gpunodes_no_proxy", proxies.EXCEPTIONS_WANTED, _exceptions),
    (
        "gpunodes_http*_proxy",
        proxies.URL_WANTED,
        _text(proxies.URL),
    ),
    (
        "gpunodes_driver_branch",
        'a branch of the driver, such as "580", or an exact version, such as "580.95.05"',
        _text(r"\d{3}(\.\d{1,4}){0,2}"),
    ),
    (
        "gpunodes_cuda_versions",
        'a list of versions in quotes, such as ["13.0"] or ["13.0.2"]',
        _each(r"\d+\.\d+(\.\d+)?"),
    ),
    ("gpunodes_cudnn_version", 'a version, such as "9", "9.10" or "9.14.0.64"', _text(r"\d+(\.\d+)*")),
    (
        "gpunodes_prepare_gpus",
        'PCI device ids in quotes, four hexadecimal digits each, such as ["2330"]',
        _each(r"[0-9A-Fa-f]{4}"),
    ),
    # As in useradd(8); directory services allow @ and backslashes.
    (
        "gpunodes_docker_users",
        "a list of names of users, such as [alice]",
        _each(r"[A-Za-z_][A-Za-z0-9_.@\\-]{0,63}\$?"),
    ),
    ("gpunodes_*_image", "an image, such as registry.example/name:1.0", _text(r"[A-Za-z0-9][^\s]*")),
    ("gpunodes_pool", "the value of a node label", _text(_LABEL_VALUE)),
    (
        "gpunodes_pools",
        "groups whose names are valid values of a node label, such as {h100: {}, v100: {}}",
        lambda value: (
            not isinstance(value, Mapping)
            or all(_text(_LABEL_VALUE)(name) and name and not each for name, each in value.items())
        ),
    ),
    ("gpunodes_node_labels", "labels of a node, such as {rack: r7}", _entries(_LABEL, _LABEL_VALUE)),
    (
        "gpunodes_node_taints",
        "taints with key, value and effect (NoSchedule, PreferNoSchedule or NoExecute)",
        lambda value: not isinstance(value, list) or all(map(_taint, value)),
    ),
    (
        "gpunodes_time_servers",
        "a list of host names or addresses, such as [ntp.example]",
        _each(r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}"),
    ),
    (
        "gpunodes_data_directory",
        "the path of a directory, of letters, digits and . _ -, such as /data",
        _text(r"((/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)+)?"),
    ),
    ("gpunodes_pod_pids_limit", "a number of processes, 1024 to 4194304, or -1", _pids),
    ("gpunodes_feature_gates", "true or false by feature gate", _entries(r"[A-Za-z0-9]+", "(?i:true|false)")),
    (
        "gpunodes_component_arguments",
        'arguments in quotes, by apiServer, controllerManager, scheduler, etcd: {etcd: {election-timeout: "5000"}}',
        _arguments,
    ),
    (
        "gpunodes_kubeadm_timeouts",
        "durations, such as {kubernetesAPICall: 5m0s}",
        _entries(r"\w+", r"(\d+(\.\d+)?(ms|s|m|h))+"),
    ),
    (
        "gpunodes_*_max_unavailable",
        "a number of machines, or a percentage such as 10%",
        _text(r"0*[1-9]\d{0,5}|0*([1-9]\d?|100)\s*%"),
    ),
    (
        "gpunodes_rollout_windows",
        'a list of hours of a day in quotes, such as ["22:00-05:00"]',
        _each(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d"),
    ),
    ("gpunodes_repair_unhealthy_percent", "a percentage, 0 to 100", _number(0, 100)),
    ("gpunodes_repair_pool_label", "the name of a node label", _text(_LABEL)),
    ("gpunodes_health_gpus", "a number of GPUs, 0 or more", _number(0)),
    (
        "gpunodes_health_*xids",
        "actions by code, such as {79: repair}",
        _entries(r"\d+", "none|restart_app|reset_gpu|reboot|repair"),
    ),
    ("gpunodes_repair_guard_*", "a number, 1 or more", _number(1)),
    ("gpunodes_repair_evidence_*", "a number, 0 or more", _number(0)),
    ("gpunodes_repair_*_pause", "a number of seconds, 0 or more", _number(0)),
    ("gpunodes_repair_settle", "a number of seconds, 0 or more", _number(0)),
    ("gpunodes_*_timeout", *_SECONDS),
    ("gpunodes_*_timeout_hung", *_SECONDS),
    ("gpunodes_kubeadm_limit", *_SECONDS),
    ("gpunodes_join_token_ttl", *_SECONDS),
)
"""The form of settings whose type allows more than they can be: names, what is wanted, and whether a value is that."""


@functools.cache
def _options() -> Mapping[str, Any]:
    path = content() / "roles/settings/meta/argument_specs.yml"
    options: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]["options"]
    return options
