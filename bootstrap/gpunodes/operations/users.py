"""Kubeconfigs for people: a client certificate with an end, and the bindings that give its user rights.

The private key is made here and never sent. Kubernetes cannot withdraw a certificate: a user who is removed has no
rights left, which has the same effect until the name is bound again.
"""

from __future__ import annotations

import base64
import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpunodes.engine import control_planes, journal
from gpunodes.engine.cluster.access import Access, Binding, Rule
from gpunodes.errors import GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.operations import kubeconfig, remains
from gpunodes.operations.remains import Remains
from gpunodes.planner import namespaces

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

Report = Callable[[str], None]
"""Takes a line for the user."""
Confirm = Callable[[str], None]
"""Asks whether to continue, and raises if not."""
DAYS = 90
"""How long a certificate is valid unless the user requests otherwise."""
MOST_DAYS = 365
"""kube-controller-manager signs for a year at most, unless it is set otherwise. Source: its reference,
--cluster-signing-duration, 8760h0m0s by default."""
_DAY_S = 86_400

# No colon: names of Kubernetes and kubeadm (system:node:..., kubeadm:cluster-admins) and prefixes of login services
# (oidc:...) contain one. "~" stands for "@" in the name of a binding.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._@-]{0,61}[A-Za-z0-9])?")
_ROLE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:_-]{0,200}[A-Za-z0-9])?")
_RESERVED = frozenset(
    {
        # kubeadm's client certificates. Source: kubernetes.io, PKI certificates and requirements.
        "kubernetes-admin",
        "kubernetes-super-admin",
        "kube-apiserver-kubelet-client",
        "kube-apiserver-etcd-client",
        "kube-etcd-healthcheck-client",
        "front-proxy-client",
        # Names that manifests and authenticators bind or take for more than a person.
        "admin",
        "cluster-admin",
        "root",
        "kubelet",
        "kubelet-bootstrap",
        "anonymous",
    }
)
_STRONG = frozenset({"cluster-admin"})
_POLICY = "pod-security.kubernetes.io/enforce"
_ANY = "*"


@dataclass(frozen=True, slots=True)
class Request:
    """What a person gets."""

    user: str
    role: str = ""
    """A ClusterRole; "" keeps the user's bindings, and makes only a new certificate."""
    namespace: str = ""
    """"" for the whole cluster."""
    groups: Sequence[str] = ()
    days: int = DAYS


@dataclass(frozen=True, slots=True)
class Made:
    """A kubeconfig for a person."""

    document: Mapping[str, Any]
    bindings: Sequence[Binding]
    end: float
    """Of its certificate, in seconds since 1970."""


def check(request: Request) -> None:
    """Raise WrongInput for names that no person may have, and for forms that Kubernetes refuses."""
    for kind, option, name in (("user", "--user", request.user), *(("group", "--group", g) for g in request.groups)):
        if not _NAME.fullmatch(name) or name.lower() in _RESERVED:
            raise WrongInput(
                f"{name!a} cannot be the name of a {kind}",
                "letters, digits, '.', '_', '-' and '@', at most 63, and no name of the cluster's own components: "
                "those have a colon, or are names such as kubernetes-admin",
                f"choose another {option}",
            )
    if request.namespace:
        namespaces.check(request.namespace)
    if request.role and not _ROLE.fullmatch(request.role):
        raise WrongInput(f"{request.role!a} is not the name of a ClusterRole", "", "correct --role")
    if request.namespace and not request.role:
        raise WrongInput("--namespace without --role", "a role in that namespace", "add --role")


def make(inventory: Inventory, request: Request, report: Report, confirm: Confirm) -> Made:
    """Make a kubeconfig, or renew one; the user's other bindings stay as they are.

    Everything is checked before anything is changed. Raises WrongInput for a role or a namespace that does not exist.
    """
    check(request)
    with _connected(inventory) as access:
        return made(access, _cluster_of(inventory, report), request, report, confirm)


def made(access: Access, of: Mapping[str, Any], request: Request, report: Report, confirm: Confirm) -> Made:
    """The same with a session; ``of`` is a kubeconfig of the cluster, whose user is not used."""
    present = access.bindings()
    own = [each for each in present if _is_made_for(request.user, each)]
    # Earlier certificates stay valid: none can be withdrawn.
    earlier = [each.end for each in own if each.end]
    if not request.role and not own:
        raise WrongInput(f"{request.user} is no user of this cluster", "a role", "add --role view, edit or admin")
    wanted = Binding(request.namespace, _binding_name(request.user), request.role, True, (request.user,))
    if request.role:
        _check_role(access, request, report, confirm)
        own = [*(each for each in own if each.namespace != request.namespace), wanted]
    _check_names(request, present, report, confirm)
    key = _new_key()
    pem = access.signed(request.user, _signing_request(key, request), request.days * _DAY_S)
    end = _checked(pem, key, request)
    if (days := round((end - time.time()) / _DAY_S)) < request.days:
        report(f"warning: the cluster signed the certificate for {days} day{'' if days == 1 else 's'} only")
    own = [replace(each, end=max([end, *earlier])) for each in own]
    for each in own:
        access.bind(each)
    return Made(_document(of, request.user, _namespace(request, own), pem, key), own, end)


def _namespace(request: Request, own: Sequence[Binding]) -> str:
    """The namespace of the kubeconfig: a renewal without a role keeps it, where the user has rights in one only."""
    found = {each.namespace for each in own}
    return request.namespace if request.role or len(found) > 1 else found.pop()


def users(inventory: Inventory) -> list[Binding]:
    """The bindings that gpunodes made for people, by user."""
    with _connected(inventory) as access:
        return of_people(access.bindings())


def of_people(bindings: Sequence[Binding]) -> list[Binding]:
    """Those that gpunodes made for people."""
    found = [each for each in bindings if len(each.users) == 1 and _is_made_for(each.users[0], each)]
    return sorted(found, key=lambda each: (each.users[0], each.namespace, each.name))


def remove(inventory: Inventory, user: str) -> tuple[list[Binding], list[Remains]]:
    """Delete a user's bindings; returns them, and what there is in the namespaces where they gave rights.

    Raises WrongInput for a user without any, and GpunodesError if other bindings name the user: those stay.
    """
    check(Request(user))
    with _connected(inventory) as access:
        gone = removed(access, user)
        return gone, remains.of(access, gone)


def removed(access: Access, user: str) -> list[Binding]:
    """Delete the bindings with a session; returns them."""
    naming = _naming(access, user)
    found = [each for each in naming if _is_made_for(user, each)]
    if not naming:
        raise WrongInput(
            f"{user} is no user of this cluster",
            "a user that `gpunodes kubeconfig --user` made",
            "`gpunodes kubeconfig --users` lists them",
        )
    for each in found:
        access.unbind(each)
    # Read again: a finalizer keeps a binding after its deletion, with its rights, and the user may make another one.
    if left := _naming(access, user) if found else naming:
        # An admin of a namespace may have made them, or added a second name or a finalizer to one of ours.
        raise GpunodesError(
            f"{user} still has rights by bindings that gpunodes did not make, or that others changed: "
            f"{', '.join(sorted(each.title for each in left))}",
            "no binding that names the user",
            f"look at them, and at what else {user} may have left there (`gpunodes help --page users`); remove "
            f"finalizers, then: {'; '.join(each.deletion for each in left)}",
        )
    return found


def _naming(access: Access, user: str) -> list[Binding]:
    """The bindings that name a user."""
    return [each for each in access.bindings() if user in each.users]


def _is_made_for(user: str, found: Binding) -> bool:
    """Whether gpunodes made a binding for this user alone: an admin of a namespace may set the label, too."""
    return found.is_own and list(found.users) == [user] and found.name == _binding_name(user)


def _connected(inventory: Inventory) -> contextlib.AbstractContextManager[Access]:
    return control_planes.connected(inventory, Access)


def _cluster_of(inventory: Inventory, report: Report) -> Mapping[str, Any]:
    """The cluster's address and CA; the administrator's credentials beside them are not used."""
    journal.discard_secrets()
    return kubeconfig.fetch(inventory, lambda each: report(f"warning: {each}"))


def _check_role(access: Access, request: Request, report: Report, confirm: Confirm) -> None:
    """Raise WrongInput unless role and namespace exist; ask before a role without limits is given."""
    rules = access.cluster_role(request.role)
    if rules is None:
        raise WrongInput(
            f"the cluster has no ClusterRole {request.role}",
            "view, edit, admin, or one that exists",
            "correct --role, or create it first",
        )
    labels = access.namespace_labels(request.namespace) if request.namespace else None
    if request.namespace and labels is None:
        raise WrongInput(
            f"the cluster has no namespace {request.namespace}",
            "one that exists",
            f"create it first: kubectl create namespace {request.namespace}",
        )
    where = f"in the namespace {request.namespace}" if request.namespace else "in all namespaces"
    if request.role in _STRONG or request.role.startswith("system:") or any(map(_is_unlimited, rules)):
        confirm(
            f"{request.user} gets {request.role} {where}, which is a role of administrators or of the cluster itself"
        )
    elif request.role in ("edit", "admin") or any(map(_creates_pods, rules)):
        if not request.namespace or request.namespace == "kube-system":
            report(
                f"warning: {request.role} {where} includes kube-system: {request.user} can read its Secrets, "
                "run pods there, and so become administrator; --namespace limits it"
            )
        elif (labels or {}).get(_POLICY) not in ("baseline", "restricted"):
            report(
                f"warning: pods of {request.namespace} may become root on their nodes; `kubectl label namespace "
                f"{request.namespace} {_POLICY}=baseline` prevents it"
            )


def _is_unlimited(rule: Rule) -> bool:
    return _ANY in rule.verbs and _ANY in rule.resources and _ANY in rule.groups


def _creates_pods(rule: Rule) -> bool:
    return (
        bool({_ANY, "create"} & set(rule.verbs))
        and bool({_ANY, ""} & set(rule.groups))
        and bool({_ANY, "pods"} & set(rule.resources))
    )


def _check_names(request: Request, present: Sequence[Binding], report: Report, confirm: Confirm) -> None:
    """Ask before a name is used that has rights which gpunodes did not give."""
    foreign = [each for each in present if not _is_made_for(request.user, each)]
    given = [each.title for each in foreign if request.user in each.users]
    if given:
        confirm(f"the name {request.user} has rights by other bindings already: {', '.join(sorted(given))}")
    for group in request.groups:
        found = [each for each in foreign if group in each.groups]
        if any(each.role in _STRONG or each.role.startswith("system:") for each in found):
            confirm(f"the group {group} gives {request.user} {', '.join(sorted(each.title for each in found))}")
        elif found:
            report(f"the group {group} gives {', '.join(sorted(each.title for each in found))}")
        else:
            report(f"warning: no binding names the group {group}: it gives no rights yet")


def _binding_name(user: str) -> str:
    """The name of a user's bindings, which is a part of a path of the API."""
    return f"gpunodes:user:{user.replace('@', '~')}"


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _signing_request(key: EllipticCurvePrivateKey, request: Request) -> bytes:
    """A certificate signing request in PEM: the user is its CN, each group an O."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import NameOID

    names = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in request.groups]
    subject = x509.Name([*names, x509.NameAttribute(NameOID.COMMON_NAME, request.user)])
    built = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return built.public_bytes(serialization.Encoding.PEM)


def _checked(pem: bytes, key: EllipticCurvePrivateKey, request: Request) -> float:
    """When a certificate ends, after a check that it is the one that was requested; raises GpunodesError."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        found = x509.load_pem_x509_certificate(pem)
        subject = {name: [str(each.value) for each in found.subject.get_attributes_for_oid(name)] for name in (
            NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)}  # fmt: skip
        same = found.public_key() == key.public_key()
    except ValueError as error:
        raise GpunodesError(
            "the cluster signed no valid certificate", "one in PEM", "check its kube-controller-manager"
        ) from error
    if (
        not same
        or subject[NameOID.COMMON_NAME] != [request.user]
        or sorted(subject[NameOID.ORGANIZATION_NAME]) != sorted(request.groups)
    ):
        raise GpunodesError(
            "the cluster signed another certificate than the requested one",
            f"one for {request.user} with the key of this command",
            "check its kube-controller-manager, and who answers as the control plane",
        )
    end = found.not_valid_after_utc.timestamp()
    if end < time.time():
        raise GpunodesError(
            "the cluster signed a certificate that has ended", "one that begins now", "check the clocks"
        )
    return end


def _document(
    of: Mapping[str, Any], person: str, namespace: str, pem: bytes, key: EllipticCurvePrivateKey
) -> dict[str, Any]:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    cluster = of["clusters"][0]
    name = f"{cluster['name']}-{person}"
    context = {"cluster": cluster["name"], "user": name}
    if namespace:
        context["namespace"] = namespace
    user = {
        "client-certificate-data": base64.b64encode(pem).decode("ascii"),
        "client-key-data": base64.b64encode(secret).decode("ascii"),
    }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [cluster],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": context}],
        "current-context": name,
    }
