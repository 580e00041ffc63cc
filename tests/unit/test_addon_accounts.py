"""Where the accounts of add-ons run, and which policies limit them; tests/repair applies these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.test_addon_role import TEMPLATES, rendered

CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
READERS = {"prometheus"}
"""Accounts of pods that may be on any node, for their size: they only read nodes and metrics."""
EVERY_NODE = {"kube-vip", "kube-network-policies"}
"""Accounts of pods that must be on every node: a policy limits what the first changes, and the second only reads."""
ACCOUNTS = {
    "gpunodes-load-balancer": "system:serviceaccount:kube-vip:",
    "gpunodes-load-balancer-accounts": "system:serviceaccount:kube-vip:",
    "gpunodes-local-path-pods": "system:serviceaccount:local-path-storage:local-path-provisioner",
    "gpunodes-local-path-volumes": "system:serviceaccount:local-path-storage:local-path-provisioner",
    "gpunodes-csi-nfs-volumes": "system:serviceaccount:kube-system:csi-nfs-controller",
    "gpunodes-csi-nfs-claims": "system:serviceaccount:kube-system:csi-nfs-controller",
}
"""Whom each policy concerns, by its name; all but these for the first."""


def of_kind(name: str, *kinds: str) -> Iterator[dict[str, Any]]:
    return (each for each in rendered(name) if each["kind"] in kinds)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_with_rights_in_all_namespaces_are_on_control_planes_only(name: str) -> None:
    """Root of a worker has the tokens of all its pods."""
    bound = {subject["name"] for each in of_kind(name, "ClusterRoleBinding") for subject in each["subjects"]}
    for each in of_kind(name, "Deployment", "DaemonSet", "StatefulSet"):
        pod = each["spec"]["template"]["spec"]
        account = pod.get("serviceAccountName", "")
        on_control_planes = pod.get("nodeSelector", {}).get(CONTROL_PLANE) == ""
        if account in bound:
            assert on_control_planes is (account not in READERS | EVERY_NODE), account
        if on_control_planes:
            assert {"key": CONTROL_PLANE, "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_policy_is_bound_and_names_an_account_that_exists(name: str) -> None:
    """Else it would never apply."""
    made = {f"{each['metadata']['namespace']}:{each['metadata']['name']}" for each in of_kind(name, "ServiceAccount")}
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(name, "ValidatingAdmissionPolicy")}
    bindings = [each["spec"] for each in of_kind(name, "ValidatingAdmissionPolicyBinding")]
    assert {each["policyName"]: each["validationActions"] for each in bindings} == {key: ["Deny"] for key in policies}
    for policy, spec in policies.items():
        assert spec["failurePolicy"] == "Fail"
        account = ACCOUNTS[policy]
        assert account in spec["matchConditions"][0]["expression"]
        assert [each for each in made if each.startswith(account.removeprefix("system:serviceaccount:"))]


def test_the_program_of_local_path_may_read_no_configuration_of_others() -> None:
    [role] = of_kind("local-path", "ClusterRole")
    everywhere = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert not {"configmaps", "pods", "pods/log"} & everywhere
