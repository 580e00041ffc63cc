"""Why a component of the control plane ended, from its log in the kubelet's folder."""
# ruff: noqa: E501 - recorded lines are as long as they are

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils.kubeadm import errors, static_pods
from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.ansible.module_utils.process import CommandResult

FLAG = "Error: unknown flag: --audit-log-maxages"
HOOK = (
    'I1129 03:20:01.000001       1 trace.go:236] Trace[1]: "Create" (total time: 9012ms)\n'
    'F1129 03:20:31.482913       1 hooks.go:204] PostStartHook "rbac/bootstrap-roles" failed: unable to initialize roles: '
    "timed out waiting for the condition\n"
    "goroutine 1 [running]:\n"
)
ETCD = (
    '{"level":"info","ts":"2026-11-29T03:20:01.000001Z","caller":"etcdmain/etcd.go:64","msg":"Running: ","args":["etcd"]}\n'
    '{"level":"fatal","ts":"2026-11-29T03:20:02.000001Z","caller":"etcdmain/etcd.go:204","msg":"discovery failed","error":'
    '"listen tcp 10.0.0.1:2380: bind: cannot assign requested address","stacktrace":"go.etcd.io/etcd/server/v3/etcdmain"}\n'
)
COMMAND = 'E1129 03:20:01.000001       1 run.go:72] "command failed" err="open /etc/kubernetes/audit-policy.json: no such file or directory"'


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(errors, "LOGS", str(tmp_path))
    return tmp_path


def _log(logs: Path, name: str, attempt: int, text: str, at: float) -> Path:
    path = logs / f"kube-system_{name}-control-1_0123abcd" / name / f"{attempt}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"2026-11-29T03:20:01.000000001Z stderr F {line}\n" for line in text.splitlines()))
    os.utime(path, (at, at))
    return path


@pytest.mark.parametrize(
    ("log", "found", "remedy"),
    [
        (FLAG, "Error: unknown flag: --audit-log-maxages", "gpunodes_component_arguments"),
        (HOOK, "unable to initialize roles", "too slow"),
        (ETCD, "discovery failed: listen tcp 10.0.0.1:2380: bind: cannot assign requested address", ""),
        (COMMAND, "open /etc/kubernetes/audit-policy.json: no such file or directory", ""),
        ("panic: runtime error: index out of range\n\ngoroutine 1", "panic: runtime error: index out of range", ""),
        ('E1129 03:20:01.000001       1 server.go:302] "leaderelection lost"', '"leaderelection lost"', ""),
    ],
)
def test_the_error_with_which_a_component_ended(log: str, found: str, remedy: str) -> None:
    kept = {
        "containerd": "".join(f"2026-11-29T03:20:01.000000001Z stderr F {line}\n" for line in log.splitlines()),
        "Docker": "".join(json.dumps({"log": f"{line}\n", "stream": "stderr"}) + "\n" for line in log.splitlines()),
    }
    for text in kept.values():
        cause = errors.parse_component(text)
        assert cause is not None
        assert found in cause.found
        assert remedy in cause.remedy
        assert bool(remedy) == bool(cause.remedy)


def test_an_error_after_which_it_went_on_is_no_cause() -> None:
    log = (
        'E1129 03:20:01.000001       1 controller.go:1] "Unhandled Error" err="no space left on device"\n'
        '{"level":"warn","msg":"apply request took too long"}\n{"log": 1}\n{"level":"fatal","msg\n'
    )
    assert errors.parse_component(log) is None
    assert errors.parse_component("") is None


def test_the_newest_failed_attempt_of_the_first_component(logs: Path) -> None:
    _log(logs, "kube-apiserver", 0, "Error: unknown flag: --old", 90)
    _log(logs, "kube-apiserver", 1, "Error: unknown flag: --first", 110)
    _log(logs, "kube-apiserver", 2, "Error: unknown flag: --second", 120)
    _log(logs, "kube-apiserver", 3, "I1129 03:20:01.000001       1 server.go:1] it runs again", 130)
    _log(logs, "kube-scheduler", 0, COMMAND, 125)
    found = errors.component_error(100)
    assert found is not None
    assert found.found == "kube-apiserver ended: Error: unknown flag: --second"
    _log(logs, "etcd", 0, ETCD, 115)
    found = errors.component_error(100)
    assert found is not None
    assert found.found.startswith("etcd ended: discovery failed: ")
    assert errors.component_error(131) is None


def test_kubeadm_that_waited_names_the_component_before_the_kubelet(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "kubelet_error", lambda _: Problem('node "control-1" not found'))
    text = "error execution phase wait-control-plane: could not bootstrap the admin user: context deadline exceeded\n"
    done = CommandResult(["kubeadm"], 1, "", text)
    assert str(errors.failure("init", done, errors.cause_of_wait(100))).endswith(
        'context deadline exceeded; kubelet: node "control-1" not found'
    )
    _log(logs, "kube-apiserver", 0, FLAG, 120)
    failed = errors.failure("init", done, errors.cause_of_wait(100)).problem
    assert failed.found.endswith(f"context deadline exceeded; kube-apiserver ended: {FLAG}")
    assert failed.remedy == "correct gpunodes_component_arguments"


def test_a_static_pod_that_is_not_ready_says_why(logs: Path) -> None:
    """By its own error: its neighbours may have ended by it."""
    _log(logs, "etcd", 0, ETCD, 120)
    _log(logs, "kube-apiserver", 0, FLAG, 120)
    problem = static_pods.not_ready("kube-apiserver", "it is not ready", 100).problem
    assert problem.found == f"it is not ready: kube-apiserver ended: {FLAG}"
    assert problem.remedy == "correct gpunodes_component_arguments"
    problem = static_pods.not_ready("kube-apiserver", "it is not ready", 121).problem
    assert problem.found == "it is not ready"
    assert "crictl ps -a --name kube-apiserver" in problem.remedy


def test_a_component_that_refuses_its_arguments_never_starts(logs: Path) -> None:
    _log(logs, "kube-apiserver", 0, FLAG, 110)
    assert not errors.refuses_argument("kube-apiserver", 100), "it may be an attempt with the manifest before"
    pod = _log(logs, "kube-apiserver", 1, FLAG, 120).parents[1]
    os.utime(pod, (90, 90))
    assert errors.refuses_argument("kube-apiserver", 100)
    assert not errors.refuses_argument("kube-apiserver", 111)
    assert not errors.refuses_argument("etcd", 100)
    for attempt in 0, 1:
        _log(logs, "etcd", attempt, ETCD, 120)
    assert not errors.refuses_argument("etcd", 100), "an address may come"


def test_the_second_attempt_of_a_new_pod_needs_no_log_of_the_first(logs: Path) -> None:
    """The kubelet removes it as soon as the second one has ended."""
    pod = _log(logs, "kube-apiserver", 3, FLAG, 120).parents[1]
    os.utime(pod, (90, 90))
    assert not errors.refuses_argument("kube-apiserver", 100), "the manifest before may have had as many"
    os.utime(pod, (105, 105))
    assert errors.refuses_argument("kube-apiserver", 100)
