"""What a user who was removed may have left in namespaces: it stays, and acts with the rights that it has.

Kubernetes does not say who made an object. So all that is there is counted, also what others made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpunodes.engine.cluster.access import Access, Binding, Rule
from gpunodes.engine.cluster.errors import NoResponse, Refused

_READ = frozenset({"get", "list", "watch"})


@dataclass(frozen=True, slots=True)
class Remains:
    """What there is in a namespace. None: the cluster did not say."""

    namespace: str
    """"" for all namespaces."""
    workloads: int | None = None
    """Deployments, CronJobs and the like, and pods of their own."""
    tokens: int | None = None
    """Secrets with a token of a service account, which has no end."""
    bindings: int | None = None
    """RoleBindings that gpunodes did not make for a person."""


def of(access: Access, gone: Sequence[Binding]) -> list[Remains]:
    """What there is where these bindings, which are deleted, allowed more than to read.

    The rights are gone already: a cluster that does not say what is there is no error.
    """
    try:
        namespaces = sorted({each.namespace for each in gone if _leaves(access.cluster_role(each.role))})
        # The list of all namespaces has those of each one.
        return [_counted(access, each) for each in (namespaces if "" not in namespaces else [""])]
    except (NoResponse, Refused):
        return [Remains(each) for each in sorted({each.namespace for each in gone})]


def _counted(access: Access, namespace: str) -> Remains:
    others = [
        each for each in access.bindings() if each.namespace and not each.is_own and namespace in {"", each.namespace}
    ]
    return Remains(namespace, access.workloads(namespace), access.lasting_tokens(namespace), len(others))


def _leaves(rules: Sequence[Rule] | None) -> bool:
    """Whether a role lets its user leave something behind, or take Secrets along; so does one that has gone."""
    return rules is None or any(
        not _READ.issuperset(each.verbs) or bool({"secrets", "*"} & set(each.resources)) for each in rules
    )
