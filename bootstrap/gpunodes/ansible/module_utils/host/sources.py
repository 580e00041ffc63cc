"""Package sources: their keys, their files, and the versions of packages in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from urllib.parse import urlsplit

from .. import apt_sources, disk, ledger, openpgp, packages
from ..problem import MachineProblem
from ..process import must
from ..proxies import Proxies, login, public
from ..report import Difference
from . import files, keys
from .changes import Changes
from .spec import File, Repository


class Sources:
    """The package sources of one run, and the machine's package manager."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._refreshed = False
        self._renewed = False

    @cached_property
    def manager(self) -> packages.Manager:
        """The machine's package manager; raises MachineProblem if it has no supported one."""
        manager = packages.detect()
        used = self._changes.spec.proxies
        if used and isinstance(manager, packages.Dnf):
            # For the distribution's own sources. Only programs of the same user can read an environment.
            manager.environment = {name.lower(): value for name, value in used.environment().items()}
        return manager

    def configure(self, repository: Repository) -> None:
        """Write the source's key and file, unless the machine has the source with another key in another file.

        Files of that kind are what Kubernetes' and Docker's own instructions write.
        """
        key_path, source_path = self._paths(repository)
        other = self._elsewhere(repository)
        if other and {*repository.components.split()} <= {*other.components}:
            return
        if other:
            key_path = other.signed_by
        elif repository.key.startswith("/"):
            key_path = repository.key
        else:
            files.write(self._changes, File(key_path, self._key(repository, key_path)))
        used = self._changes.spec.proxies
        text = render(repository, key_path, self._apt, used)
        mode = "0600" if used and used.secret and not self._apt else "0644"
        files.write(self._changes, File(source_path, text, mode))

    def _elsewhere(self, repository: Repository) -> apt_sources.AptSource | None:
        """The source in a file that gpunodes did not write, with another key; None without one.

        Two keys for one source stop apt: "Conflicting values set for option Signed-By".
        """
        key_path, source_path = self._paths(repository)
        own = repository.key if repository.key.startswith("/") else key_path
        found = apt_sources.find(repository.url, repository.suite, source_path) if self._apt else None
        return found if found and found.signed_by != own else None

    def available(self, requested: Sequence[packages.RequestedPackage]) -> Mapping[str, Sequence[str]]:
        """The versions of the packages, best first; reads the sources again if they lack one."""
        names = [package.name for package in requested]
        new = [] if self._refreshed else self._new_files()
        if new:
            self.refresh(new)
            self._refreshed = True
        available = self.manager.available(names)
        if not _has_all(available, requested):
            self.refresh()
            available = self.manager.available(names)
        # If a key no longer matches, apt only warns and keeps the old lists.
        if not _has_all(available, requested) and self.renew_keys():
            self.manager.refresh()
            available = self.manager.available(names)
        return available

    def refresh(self, paths: Sequence[str] = ()) -> None:
        """Read the sources again, or only those with their files at ``paths``; if that fails, renew keys and retry."""
        try:
            self.manager.refresh(paths)
        except MachineProblem:
            if not self.renew_keys():
                raise
            self.manager.refresh(paths)

    @property
    def unread(self) -> str:
        """Why sources could not be read when they were last refreshed, "" if all were."""
        return self.manager.unread

    def renew_keys(self) -> bool:
        """Fetch the keys of the sources again, once per run; whether one changed.

        The key on the machine has the right fingerprint, but may have been truncated on the way, or may have expired
        before its owner extended it.
        """
        if self._renewed:
            return False
        self._renewed = True
        changed = False
        for repository in self._changes.spec.repositories:
            if "://" not in repository.key or self._elsewhere(repository):
                continue
            try:
                key = keys.checked_key(self._fetched(repository), repository)
            except MachineProblem:
                continue  # the error that made the caller renew keys is more useful
            changed = files.write(self._changes, File(self._paths(repository)[0], key)) or changed
        return changed

    @property
    def _apt(self) -> bool:
        return isinstance(self.manager, packages.Apt)

    def _paths(self, repository: Repository) -> tuple[str, str]:
        return paths(repository.name, self._apt)

    def _key(self, repository: Repository, path: str) -> str:
        """The repository's key, checked against its fingerprint; a matching key on the machine is reused.

        If the source turns out to be signed with another key, ``renew_keys`` fetches the key again.
        """
        if "://" not in repository.key:
            return keys.checked_key(repository.key.strip() + "\n", repository)
        if repository.fingerprint and (matching := openpgp.only(disk.read(path) or "", repository.fingerprint)):
            return matching
        return keys.checked_key(self._fetched(repository), repository)

    def _fetched(self, repository: Repository) -> str:
        return keys.fetch(repository.key, self._changes.spec.proxies)

    def _new_files(self) -> list[str]:
        """The source files that this run wrote, or whose keys it wrote."""
        pairs = [self._paths(repository) for repository in self._changes.spec.repositories]
        return [source for key, source in pairs if {f"write {key}", f"write {source}"} & {*self._changes.actions}]


def enable_stream(changes: Changes, wanted: str) -> None:
    """Enable a module stream; a different stream that is already enabled is an error."""
    module, _, stream = wanted.partition(":")
    path = packages.stream_file(module)
    text = disk.read(path)
    enabled = packages.enabled_stream(text or "")
    if enabled == stream:
        return
    if enabled:
        raise MachineProblem(
            f"dnf's module stream {module}:{enabled} is enabled",
            f"{wanted}; gpunodes does not switch streams",
            f"run `dnf module reset {module}` if its packages are not installed, or request that driver branch",
        )
    changes.ledger.note_file(path, ledger.OldFile(text, 0o644))
    if changes.step(f"enable the module stream {wanted}", Difference("module streams", {}, {module: stream})):
        must(["dnf", "--quiet", "--assumeyes", "module", "enable", wanted], packages.INSTALL_LIMIT_S)


def paths(name: str, apt: bool) -> tuple[str, str]:
    """The paths of a source's key and file."""
    if apt:
        return f"/etc/apt/keyrings/gpunodes-{name}.asc", f"/etc/apt/sources.list.d/gpunodes-{name}.sources"
    return f"/etc/pki/rpm-gpg/RPM-GPG-KEY-gpunodes-{name}", f"/etc/yum.repos.d/gpunodes-{name}.repo"


def render(repository: Repository, key_path: str, apt: bool, used: Proxies | None = None) -> str:
    """The source's file: deb822 for apt (sources.list(5)), an ini section for dnf, which has its proxy there."""
    if apt:
        components = f"Components: {repository.components}\n" if repository.components else ""
        signed = f"Signed-By: {key_path}\n" if key_path else ""
        return f"Types: deb\nURIs: {repository.url}\nSuites: {repository.suite}\n{components}{signed}"
    # Only gpunodes installs these packages: pkgs.k8s.io's own instructions exclude them from upgrades too.
    return (
        f"[gpunodes-{repository.name}]\nname={repository.name}\nbaseurl={repository.url}\nenabled=1\ngpgcheck=1\n"
        f"gpgkey=file://{key_path}\nexclude=kubelet kubeadm kubectl cri-tools kubernetes-cni\n"
        + _proxy_of(repository, used)
    )


def _proxy_of(repository: Repository, used: Proxies | None) -> str:
    """The options of dnf for the proxy of a source (dnf.conf(5))."""
    address = urlsplit(repository.url)
    url = used.of(address.scheme, address.hostname or "") if used else ""
    user, password = login(url)
    named = f"proxy_username={user}\nproxy_password={password}\n" if user else ""
    return f"proxy={public(url)}\n{named}" if url else ""


def _has_all(available: Mapping[str, Sequence[str]], requested: Sequence[packages.RequestedPackage]) -> bool:
    """Whether the sources have a matching version of each package."""
    return all(any(packages.fits(package, v) for v in available.get(package.name, ())) for package in requested)
