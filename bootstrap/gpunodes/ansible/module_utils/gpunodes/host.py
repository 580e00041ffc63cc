"""Brings a machine into a desired state; each change is recorded in the ledger before it is made."""

from __future__ import annotations

import grp
import os
import platform
import pwd
import shutil
import stat
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from . import disk, gpu_host, ledger, openpgp, packages
from .problem import MachineProblem
from .process import PATH, last_line, must, run

MODULES_FILE = "/etc/modules-load.d/gpunodes.conf"
SYSCTL_FILE = "/etc/sysctl.d/99-gpunodes.conf"
FSTAB_MARK = "# off for Kubernetes (gpunodes): "
APT_KEYRINGS = "/etc/apt/keyrings"
_KEY_LIMIT_S = 30


@dataclass(frozen=True)
class Repository:
    """A package source. ``suite`` is "/" for a flat one.

    ``key`` is an armoured key, its URL, or the path of a keyring on the machine.
    """

    name: str
    url: str
    key: str
    fingerprint: str = ""
    suite: str = "/"
    components: str = ""


@dataclass(frozen=True)
class File:
    """A file that gpunodes writes completely.

    ``contents`` selects the content by the version of ``package``: {"1.*": ..., "2.*": ...}.
    """

    path: str
    content: str = ""
    mode: str = "0644"
    owner: str = "root"
    package: str = ""
    contents: Mapping[str, str] = field(default_factory=dict)
    validate: Sequence[str] = ()
    """A command that must accept the file; ``%s`` is replaced by its path."""


@dataclass(frozen=True)
class Generated:
    """A file that a program on the machine generates.

    ``command`` writes to the path ``%o``, initially a copy of the existing file; ``%i`` is a copy of ``input``. If
    ``when_exists`` does not exist, nothing is generated.
    """

    path: str
    command: Sequence[str]
    input: str = ""
    when_exists: str = ""
    mode: str = "0644"


@dataclass(frozen=True)
class OutputCheck:
    """A command that must succeed after packages were installed, and the text that its output must contain."""

    command: Sequence[str]
    output: str = ""


@dataclass(frozen=True)
class Driver:
    """A GPU driver's kernel modules, and the kernel module that conflicts with them."""

    modules: Sequence[str]
    conflicting_module: str = ""


@dataclass(frozen=True)
class Service:
    """A systemd service: always enabled; started, and restarted after changes, unless ``started`` is false.

    With ``when_exists`` it is started only if that file exists.
    """

    name: str
    started: bool = True
    when_exists: str = ""


@dataclass(frozen=True)
class Spec:
    """The desired state that one role passes to the module host.

    A field's ``kind`` makes its value, or each of its rows, from plain data.
    """

    repositories: Sequence[Repository] = field(default=(), metadata={"kind": Repository})
    packages: Sequence[packages.RequestedPackage] = field(default=(), metadata={"kind": packages.RequestedPackage})
    files: Sequence[File] = field(default=(), metadata={"kind": File})
    directories: Sequence[str] = ()
    """Folders that contain only data of the installed software; those that are new are removed with it."""
    modules: Sequence[str] = ()
    """Kernel modules to load now and at every boot; they replace the previous ones, as ``sysctls`` do."""
    sysctls: Mapping[str, str] = field(default_factory=dict)
    swap_off: bool = False
    """Whether to turn off swap and comment it out in /etc/fstab."""
    services: Sequence[Service] = field(default=(), metadata={"kind": Service})
    groups: Sequence[str] = ()
    """Groups that the packages create and do not delete."""
    users: Sequence[str] = ()
    """System users, each with its own group, that the packages create and do not delete."""
    holds: Sequence[str] = ()
    """Shell patterns of installed packages to hold, so that they are not upgraded."""
    generated: Sequence[Generated] = field(default=(), metadata={"kind": Generated})
    checks: Sequence[OutputCheck] = field(default=(), metadata={"kind": OutputCheck})
    absent: Sequence[str] = ()
    """Files to remove if an earlier run of gpunodes created them."""
    module_stream: str = ""
    """Module stream of dnf that contains the packages, such as ``nvidia-driver:580-open``; "" for none."""
    driver: Driver | None = field(default=None, metadata={"kind": Driver})
    devices: bool = False
    """Whether to keep a CDI specification for containers, and links that make the devices known to systemd."""
    images: Sequence[str] = ()
    """Images that containerd pulls in the background after a change; the run does not wait for them.

    ``{NAME}`` is replaced by the version of the package NAME.
    """
    section: str = ""
    """The section of the ledger that records the changes: one of ``ledger.SECTIONS``, or "" for the ledger itself."""


@dataclass
class ConvergeResult:
    """The changes made, or in check mode the changes that would be made."""

    actions: list[str] = field(default_factory=list)
    diffs: list[dict[str, str]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    present: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that were installed before."""
    reboot: str = ""
    """Why the machine must be rebooted to complete the changes, "" if no reboot is required."""


def spec_from(wanted: Mapping[str, Any]) -> Spec:
    """The desired state from plain data with the fields of Spec; raises MachineProblem if it has others."""
    kinds = {each.name: each.metadata.get("kind") for each in fields(Spec)}

    def made(kind: Callable[..., Any] | None, value: Any) -> Any:
        if kind is None or not value:
            return value
        return kind(**value) if isinstance(value, Mapping) else tuple(kind(**row) for row in value)

    try:
        return Spec(**{name: made(kinds.get(name), value) for name, value in wanted.items()})
    except TypeError as error:
        raise MachineProblem(f"the desired state is invalid: {error}", "the fields of host.Spec") from error


def diff(wanted: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """The roles with pending changes, and the versions of the installed packages."""
    pending = []
    versions: dict[str, str] = {}
    for role, part in wanted.items():
        spec = spec_from(part)
        try:
            outcome = Converger(spec, check=True).run()
        except MachineProblem:
            # The role itself reports the problem when it runs.
            pending.append(role)
            continue
        if outcome.actions:
            pending.append(role)
        versions.update(outcome.present)
    return pending, versions


class Converger:
    """One run that brings the machine into the desired state. ``check`` changes nothing."""

    def __init__(self, spec: Spec, check: bool = False) -> None:
        self.spec = spec
        self.check = check
        self.outcome = ConvergeResult()
        self.ledger = ledger.load(ledger.path_of(spec.section))
        self._manager: packages.Manager | None = None
        self._refreshed = False
        self._renewed = False

    def run(self) -> ConvergeResult:
        """Make all changes; raises MachineProblem at the first one that fails."""
        missing = [path for path in self.spec.directories if not os.path.lexists(path)]
        if missing and not self.check:
            self.ledger.note_directories(missing)
        self._kernel_modules()
        self._sysctls()
        if self.spec.swap_off:
            self._swap()
        for repository in self.spec.repositories:
            self._repository(repository)
        if self.spec.module_stream:
            self._module_stream(self.spec.module_stream)
        began = time.time()
        try:
            self._packages_and_files()
        except MachineProblem:
            # If a module does not build, the package manager reports only the last line; the build log has the cause.
            driver = self.spec.driver
            problem = gpu_host.build_problem(driver.modules[0], platform.release(), began) if driver else None
            if problem is None:
                raise
            raise problem from None
        if self.spec.driver:
            gpu_host.load_driver(self, self.spec.driver)
        for generated in self.spec.generated:
            self._generate(generated)
        for path in self.spec.absent:
            self._remove(path)
        if self.spec.devices and not self.outcome.reboot:
            gpu_host.publish_devices(self)
        if self.spec.services:
            self._services()
        self._images()
        return self.outcome

    def _images(self) -> None:
        versions = {f"{{{name}}}": packages.upstream(version) for name, version in self.outcome.versions.items()}
        images = [_filled(name, versions) for name in self.spec.images]
        if broken := [name for name in images if fetch_was_interrupted(name)]:
            self.step(f"fetch {', '.join(broken)} again")
        if not self.check:
            self.save()
            if self.outcome.actions:
                fetch_images(images)

    def save(self) -> None:
        """Write the ledger to disk."""
        self.ledger.save(ledger.path_of(self.spec.section))

    def step(self, action: str) -> bool:
        """Record an action, and return whether to perform it. The ledger is on disk before the action."""
        self.outcome.actions.append(action)
        if not self.check:
            self.save()
        return not self.check

    # The kernel

    def _kernel_modules(self) -> None:
        if not self.spec.modules:
            return
        absent = [name for name in self.spec.modules if not os.path.exists(f"/sys/module/{name.replace('-', '_')}")]
        if absent:
            self.ledger.note_modules(absent)
            if self.step(f"load kernel modules {', '.join(absent)}"):
                for name in absent:
                    must(["modprobe", name])
        self._file(File(MODULES_FILE, "".join(f"{name}\n" for name in self.spec.modules)))

    def _sysctls(self) -> None:
        if not self.spec.sysctls:
            return
        lines = "".join(f"{name} = {value}\n" for name, value in sorted(self.spec.sysctls.items()))
        self._file(File(SYSCTL_FILE, lines))
        for name, value in self.spec.sysctls.items():
            path = f"/proc/sys/{name.replace('.', '/')}"
            before = disk.read(path)
            if before is not None and before.split() == value.split():
                continue
            if before is not None:
                self.ledger.note_sysctl(name, before.strip())
            if self.step(f"set {name} to {value}"):
                try:
                    with open(path, "w", encoding="ascii") as file:
                        file.write(value)
                except OSError as error:
                    raise MachineProblem(f"{name} cannot be set to {value}: {error.strerror}") from error

    def _swap(self) -> None:
        active = active_swaps(disk.read("/proc/swaps") or "")
        fstab = disk.read("/etc/fstab") or ""
        commented = without_swap(fstab)
        if active:
            self.ledger.note_swaps(active)
            if self.step(f"turn swap off ({', '.join(active)})"):
                for device in active:
                    must(["swapoff", device])
        if commented != fstab:
            self._diff("/etc/fstab", fstab, commented)
            if self.step("comment swap out in /etc/fstab"):
                disk.write("/etc/fstab", commented, stat.S_IMODE(os.stat("/etc/fstab").st_mode))
                must(["systemctl", "daemon-reload"])

    # Packages and files

    def _repository(self, repository: Repository) -> None:
        apt = isinstance(self._packages(), packages.Apt)
        key_path, source_path = repository_paths(repository.name, apt)
        if repository.key.startswith("/"):
            key_path = repository.key
        else:
            self._file(File(key_path, self._key(repository, key_path)))
        self._file(File(source_path, render_repository(repository, key_path, apt)))

    def _module_stream(self, wanted: str) -> None:
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
        self.ledger.note_file(path, ledger.OldFile(text, 0o644))
        if self.step(f"enable the module stream {wanted}"):
            must(["dnf", "--quiet", "--assumeyes", "module", "enable", wanted], packages.INSTALL_LIMIT_S)

    def _key(self, repository: Repository, path: str) -> str:
        """The repository's key, checked against its fingerprint; a matching key on the machine is reused.

        If the source turns out to be signed with another key, ``_renew_keys`` fetches the key again.
        """
        if "://" not in repository.key:
            return checked_key(repository.key.strip() + "\n", repository)
        if repository.fingerprint and (matching := openpgp.only(disk.read(path) or "", repository.fingerprint)):
            return matching
        return checked_key(fetch(repository.key), repository)

    def _renew_keys(self) -> bool:
        """Fetch the keys of the sources again, once per run; whether one changed.

        The key on the machine has the right fingerprint, but may have been truncated on the way, or may have expired
        before its owner extended it.
        """
        if self._renewed:
            return False
        self._renewed = True
        apt = isinstance(self._packages(), packages.Apt)
        changed = False
        for repository in self.spec.repositories:
            if "://" not in repository.key:
                continue
            try:
                key = checked_key(fetch(repository.key), repository)
            except MachineProblem:
                continue  # the error that made the caller renew keys is more useful
            changed = self._file(File(repository_paths(repository.name, apt)[0], key)) or changed
        return changed

    def _refresh(self, files: Sequence[str] = ()) -> None:
        """Read the sources again; if that fails, fetch their keys again and retry."""
        try:
            self._packages().refresh(files)
        except MachineProblem:
            if not self._renew_keys():
                raise
            self._packages().refresh(files)

    def _packages_and_files(self) -> None:
        wanted = {package.name: package for package in self.spec.packages}
        present = self._packages().installed(list(wanted)) if wanted else {}
        for name, installed in present.items():
            if not packages.fits(wanted[name], installed.version):
                raise MachineProblem(
                    f"{name} {installed.version} is installed",
                    f"{wanted[name].version}; gpunodes does not upgrade or downgrade packages",
                    "remove the package, or request the installed version",
                )
        missing = [package for name, package in wanted.items() if name not in present]
        versions = {name: installed.version for name, installed in present.items()}
        self.outcome.present = dict(versions)
        first = [package for package in missing if package.first]
        if first:
            chosen_first = self._choose(first, versions)
            versions.update(chosen_first)
            self._install(chosen_first)
        rest = [package for package in missing if not package.first]
        chosen = self._choose(rest, versions) if rest else {}
        versions.update(chosen)
        # Files first: a package that starts its service during installation then uses this configuration.
        changed = False
        for file in self.spec.files:
            changed = self._file(variant(file, versions)) or changed
        if chosen:
            self._install(chosen)
            self._run_checks()
        self.outcome.versions = versions
        held = {name for name, installed in present.items() if installed.held}
        unheld = [package.name for package in self.spec.packages if package.hold and package.name not in held]
        if self.spec.holds:
            matching = self._packages().matching(self.spec.holds)
            unheld = sorted({name for name, state in matching.items() if not state.held} | set(unheld))
        if unheld:
            self.ledger.note_holds(unheld)
            if self.step(f"hold {', '.join(unheld)}"):
                self._packages().hold(unheld, held=True)
        if (changed or chosen) and not self.check:
            self.save()

    def _choose(self, missing: Sequence[packages.RequestedPackage], present: Mapping[str, str]) -> dict[str, str]:
        """The exact version of each missing package; ``present`` are the versions of the other packages."""
        if self.check:
            # The versions in the source are unknown until the source is configured.
            return {package.name: package.version.replace("*", "").rstrip(".-") or "newest" for package in missing}
        manager = self._packages()
        if manager.finish_interrupted():
            self.outcome.actions.append("finish an interrupted package installation")
        names = [package.name for package in missing]
        new = [] if self._refreshed else self._new_sources()
        if new:
            self._refresh(new)
            self._refreshed = True
        available = manager.available(names)
        if not _has_all(available, missing):
            self._refresh()
            available = manager.available(names)
        # If a key no longer matches, apt only warns and keeps the old lists.
        if not _has_all(available, missing) and self._renew_keys():
            manager.refresh()
            available = manager.available(names)
        chosen: dict[str, str] = {}
        for package in missing:
            same = {**present, **chosen}.get(package.same_as, "")
            exact = packages.RequestedPackage(package.name, f"{packages.upstream(same)}*") if same else package
            chosen[package.name] = packages.choose(exact, available.get(package.name, ()))
        return chosen

    def _new_sources(self) -> list[str]:
        """The source files that this run wrote."""
        apt = isinstance(self._packages(), packages.Apt)
        pairs = [repository_paths(repository.name, apt) for repository in self.spec.repositories]
        return [source for key, source in pairs if {f"write {key}", f"write {source}"} & {*self.outcome.actions}]

    def _install(self, chosen: Mapping[str, str]) -> None:
        message = ", ".join(f"{name} {version}" for name, version in chosen.items())
        if self.check:
            self.step(f"install {message}")
            return
        manager = self._packages()
        try:
            effects = manager.effects(chosen)
        except MachineProblem:
            # Dependencies from other sources are unknown until those sources are read.
            self._refresh()
            effects = manager.effects(chosen)
        if effects.removes:
            raise MachineProblem(
                f"installing {', '.join(chosen)} would remove {', '.join(effects.removes)}",
                "an installation that removes nothing",
                "remove it yourself if it is not needed, or choose another source of the package",
            )
        self.ledger.note_packages(effects.installs)
        self.ledger.note_groups(name for name in self.spec.groups if not has_group(name))
        self.ledger.note_users(name for name in self.spec.users if not has_user(name))
        before = service_states([service.name for service in self.spec.services]) if self.spec.services else {}
        for name, state in before.items():
            self.ledger.note_service(name, state)
        self.step(f"install {message}")
        try:
            manager.install(chosen)
        except MachineProblem as problem:
            # Outdated lists name files that no longer exist. dnf checks keys only during the installation.
            if "404" not in str(problem) and "Unable to fetch" not in str(problem) and not self._renew_keys():
                raise
            self._refresh()
            manager.install(chosen)
        for name, state in before.items():
            if not state["active"]:
                # Its package has just started it with the new files.
                self.ledger.restarted(name)

    def _run_checks(self) -> None:
        """Check that the installed software works; raises MachineProblem if not."""
        for check in () if self.check else self.spec.checks:
            result = run(check.command)
            if not result.ok or check.output not in result.text:
                raise MachineProblem(
                    f"`{' '.join(check.command)}`: {last_line(result.text) or 'no output'}",
                    f"output with {check.output}" if check.output else "exit code 0",
                    "check the files that its packages installed",
                )

    def _generate(self, generated: Generated) -> None:
        """Run a program that generates a file on a copy, and write the result like any other file."""
        if generated.when_exists and not os.path.exists(generated.when_exists):
            return
        if self.check and not shutil.which(generated.command[0], path=PATH):
            self.step(f"write {generated.path}")
            return
        with tempfile.TemporaryDirectory(prefix="gpunodes-") as folder:
            names = {"%o": f"{folder}/{os.path.basename(generated.path)}", "%i": f"{folder}/input"}
            for source, copy in ((generated.path, names["%o"]), (generated.input, names["%i"])):
                if source and os.path.exists(source):
                    shutil.copyfile(source, copy)
            command = [generated.command[0], *(_filled(argument, names) for argument in generated.command[1:])]
            must(command)
            content = disk.read(names["%o"])
        if content is None:
            raise MachineProblem(
                f"`{command[0]}` did not write {generated.path}", "a file", f"run `{' '.join(command)}`"
            )
        self._file(File(generated.path, content, generated.mode))

    def _remove(self, path: str) -> None:
        """Remove a file that gpunodes created; a file that existed before is kept."""
        old = self.ledger.files.get(path)
        if old is None or old.content is not None or not os.path.lexists(path):
            return
        for service in self.spec.services:
            self.ledger.note_restart(service.name)
        self._diff(path, disk.read(path) or "", "")
        if self.step(f"remove {path}"):
            disk.remove(path)

    def _file(self, file: File) -> bool:
        """Bring a file into its desired state; whether that was a change."""
        mode = int(file.mode, 8)
        owner = pwd.getpwnam(file.owner)
        try:
            found = os.lstat(file.path)
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if found and not stat.S_ISREG(found.st_mode):
            raise MachineProblem(f"{file.path} is not a regular file", "a file, or nothing", "move it away")
        before = disk.read(file.path)
        same = found is not None and (stat.S_IMODE(found.st_mode), found.st_uid) == (mode, owner.pw_uid)
        if before == file.content and same:
            return False
        old = (
            ledger.OldFile(before, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)
            if found
            else ledger.OldFile(None)
        )
        self.ledger.note_file(file.path, old)
        self.ledger.note_directories(missing_parents(file.path))
        for service in self.spec.services:
            self.ledger.note_restart(service.name)
        if before != file.content:
            self._diff(file.path, before or "", file.content)
        if self.step(f"write {file.path}"):
            os.makedirs(os.path.dirname(file.path), mode=0o755, exist_ok=True)
            if file.validate:
                self._validate(file)
            disk.write(file.path, file.content, mode, owner.pw_uid, owner.pw_gid)
        return True

    @staticmethod
    def _validate(file: File) -> None:
        trial = f"{file.path}.gpunodes-trial"
        disk.write(trial, file.content, 0o600)
        try:
            result = run([argument.replace("%s", trial) for argument in file.validate])
        finally:
            os.unlink(trial)
        if not result.ok:
            raise MachineProblem(f"`{file.validate[0]}` rejects the new {file.path}: {result.text.strip()}")

    def _diff(self, path: str, before: str, after: str) -> None:
        self.outcome.diffs.append({"before": before, "after": after, "before_header": path, "after_header": path})

    def _packages(self) -> packages.Manager:
        if self._manager is None:
            self._manager = packages.detect()
        return self._manager

    # Services

    def _services(self) -> None:
        states = service_states([service.name for service in self.spec.services])
        for service in self.spec.services:
            state = states.get(service.name, {"enabled": False, "active": False})
            wanted = service.started and (not service.when_exists or os.path.exists(service.when_exists))
            self.ledger.note_service(service.name, state)
            restart = service.name in self.ledger.restarts
            if restart and not self.check:
                run(["systemctl", "daemon-reload"])
            if not state["enabled"] and self.step(f"enable {service.name}"):
                must(["systemctl", "enable", service.name])
            if wanted and self.outcome.reboot and not state["active"]:
                continue  # it starts with the reboot
            if wanted and not state["active"]:
                if self.step(f"start {service.name}"):
                    start(service.name, "start")
            elif wanted and restart and self.step(f"restart {service.name}"):
                start(service.name, "restart")
            self.ledger.restarted(service.name)


def _has_all(available: Mapping[str, Sequence[str]], wanted: Sequence[packages.RequestedPackage]) -> bool:
    """Whether the sources have a matching version of each package."""
    return all(any(packages.fits(package, v) for v in available.get(package.name, ())) for package in wanted)


_FETCHES = "/var/lib/containerd/gpunodes-fetches"
"""A file for each image whose pull is in progress; it contains the id of the boot in which the pull began."""
# A power cut can leave layers with empty files, and content that is listed but missing; containerd never detects either
# (its issues 8895 and 10457). An image whose pull began in an earlier boot and did not finish is therefore deleted,
# under all its names, before anything is pulled: no container runs from it yet.
_FETCH = f"""
boot=$(cat /proc/sys/kernel/random/boot_id)
mkdir -p {_FETCHES}
mark() {{ echo {_FETCHES}/$(echo "$1" | tr / _); }}
for name; do
    file=$(mark "$name")
    [ -e "$file" ] && [ "$(cat "$file")" != "$boot" ] || continue
    digest=$(ctr --namespace k8s.io images ls "name==$name" | awk 'NR == 2 {{print $3}}')
    [ -z "$digest" ] ||
        ctr --namespace k8s.io images rm --sync $(ctr --namespace k8s.io images ls --quiet "target.digest==$digest")
    for content in $(ctr --namespace k8s.io content ls --quiet); do
        [ -e "/var/lib/containerd/io.containerd.content.v1.content/blobs/$(echo "$content" | tr : /)" ] ||
            ctr --namespace k8s.io content rm "$content"
    done
done
for name; do
    file=$(mark "$name")
    echo "$boot" >"$file"
    sync "$file"
    ctr --namespace k8s.io images pull --hosts-dir /etc/containerd/certs.d "$name" &&
        sync --file-system /var/lib/containerd && rm "$file"
done"""


def fetch_was_interrupted(name: str) -> bool:
    """Whether an earlier boot began to pull an image and did not finish: the image may contain empty files."""
    mark = disk.read(f"{_FETCHES}/{name.replace('/', '_')}")
    return mark is not None and mark.strip() != (disk.read("/proc/sys/kernel/random/boot_id") or "").strip()


def fetch_images(names: Sequence[str]) -> None:
    """Start pulling images in the background; the kubelet pulls those that are still missing when it needs them."""
    if names:
        unit = [f"--unit=gpunodes-images-{os.getpid()}", "--property=BindsTo=containerd.service", "--property=Nice=10"]
        run(["systemd-run", "--quiet", "--collect", *unit, "sh", "-c", f"{{ {_FETCH}\n}} >/dev/null", "sh", *names])


def has_group(name: str) -> bool:
    """Whether the machine has a group of users."""
    return any(entry.gr_name == name for entry in grp.getgrall())


def has_user(name: str) -> bool:
    """Whether the machine has a user."""
    return any(entry.pw_name == name for entry in pwd.getpwall())


def start(name: str, verb: str) -> None:
    """Start or restart a service; raises MachineProblem with the last line of its journal if it fails."""
    run(["systemctl", "reset-failed", name])
    result = run(["systemctl", verb, name], 300)
    if not result.ok:
        output = run(["journalctl", "--unit", name, "--lines", "1", "--output", "cat", "--no-pager"]).out.strip()
        raise MachineProblem(
            f"{name} does not start: {output or result.text.strip()}", "", f"see `journalctl -u {name}`"
        )


def service_states(names: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Whether each service is enabled and active; a service that does not exist is neither."""
    properties = "Id,UnitFileState,ActiveState"
    return parse_services(
        run(["systemctl", "show", f"--property={properties}", "--", *(f"{n}.service" for n in names)]).out
    )


def parse_services(listing: str) -> dict[str, dict[str, bool]]:
    """Parse ``systemctl show``: blocks of NAME=VALUE, separated by empty lines."""
    found = {}
    for block in listing.strip().split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in values:
            found[values["Id"].rpartition(".service")[0]] = {
                # A static unit cannot be enabled: another unit starts it.
                "enabled": values.get("UnitFileState", "").startswith(("enabled", "static")),
                "active": values.get("ActiveState") in {"active", "activating", "reloading"},
            }
    return found


def active_swaps(listing: str) -> list[str]:
    """The devices and files in /proc/swaps."""
    return [line.split()[0] for line in listing.splitlines()[1:] if line.split()]


def without_swap(fstab: str) -> str:
    """``fstab`` with its swap lines commented out in a form that ``with_swap`` recognises."""
    lines = []
    for line in fstab.splitlines(keepends=True):
        fields = line.split()
        swap = fields[2:3] == ["swap"] and not fields[0].startswith("#")
        lines.append(f"{FSTAB_MARK}{line}" if swap else line)
    return "".join(lines)


def with_swap(fstab: str) -> str:
    """Undo ``without_swap``."""
    return "".join(
        line[len(FSTAB_MARK) :] if line.startswith(FSTAB_MARK) else line for line in fstab.splitlines(keepends=True)
    )


def variant(file: File, versions: Mapping[str, str]) -> File:
    """``file`` with the content for the version of its package; raises MachineProblem if no content matches."""
    if not file.package:
        return file
    version = versions.get(file.package, "")
    for pattern, content in file.contents.items():
        if packages.fits(packages.RequestedPackage(file.package, pattern), version) or version == "newest":
            return File(file.path, content, file.mode, file.owner, validate=file.validate)
    raise MachineProblem(
        f"{file.package} is {version}", f"one of {', '.join(file.contents)}", "use a source that has such a version"
    )


def _filled(template: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        template = template.replace(placeholder, value)
    return template


def missing_parents(path: str) -> list[str]:
    """The missing folders above ``path``, outermost first."""
    missing: list[str] = []
    folder = os.path.dirname(path)
    while not os.path.lexists(folder):
        missing.insert(0, folder)
        folder = os.path.dirname(folder)
    return missing


def repository_paths(name: str, apt: bool) -> tuple[str, str]:
    """The paths of a repository's key and source file."""
    if apt:
        return f"{APT_KEYRINGS}/gpunodes-{name}.asc", f"/etc/apt/sources.list.d/gpunodes-{name}.sources"
    return f"/etc/pki/rpm-gpg/RPM-GPG-KEY-gpunodes-{name}", f"/etc/yum.repos.d/gpunodes-{name}.repo"


def render_repository(repository: Repository, key_path: str, apt: bool) -> str:
    """The source file: deb822 for apt (sources.list(5)), an ini section for dnf."""
    if apt:
        components = f"Components: {repository.components}\n" if repository.components else ""
        return f"Types: deb\nURIs: {repository.url}\nSuites: {repository.suite}\n{components}Signed-By: {key_path}\n"
    # Only gpunodes installs these packages: pkgs.k8s.io's own instructions exclude them from upgrades too.
    return (
        f"[gpunodes-{repository.name}]\nname={repository.name}\nbaseurl={repository.url}\nenabled=1\ngpgcheck=1\n"
        f"gpgkey=file://{key_path}\nexclude=kubelet kubeadm kubectl cri-tools kubernetes-cni\n"
    )


def checked_key(text: str, repository: Repository) -> str:
    """The key for the repository from the key file ``text``; raises MachineProblem if the file does not contain it.

    If a fingerprint is set, only the key with this fingerprint is returned: an attacker could add another key.
    """
    found = openpgp.fingerprints(text)
    if not found:
        raise MachineProblem(
            f"the key of the package source {repository.name} is not an OpenPGP key",
            "an armoured public key",
            f"check gpunodes_{repository.name}_packages_key",
        )
    wanted = openpgp.only(text, repository.fingerprint) if repository.fingerprint else text
    if not wanted and openpgp.plain(repository.fingerprint) in found:
        raise MachineProblem(
            f"the key of the package source {repository.name} has no signed user id",
            "a key with its user id and a signature",
            f"check for a proxy that changes the key between {repository.url} and this machine",
        )
    if not wanted:
        raise MachineProblem(
            f"the key of the package source {repository.name} has the fingerprint {found[0]}",
            openpgp.plain(repository.fingerprint),
            f"if the source is right, set gpunodes_{repository.name}_packages_fingerprint",
        )
    if not repository.fingerprint and repository.key.startswith("http://"):
        raise MachineProblem(
            f"the key of the package source {repository.name} comes over plain HTTP",
            "a fingerprint to verify it, or the armoured key in the setting",
            f"set gpunodes_{repository.name}_packages_fingerprint",
        )
    return wanted


def fetch(url: str) -> str:
    """The text at ``url`` (http or https); raises MachineProblem if it cannot be fetched."""
    if not url.startswith(("http://", "https://")):
        raise MachineProblem(f"{url} is not an http or https address", "the address of a key", "correct the setting")
    try:
        with urllib.request.urlopen(url, timeout=_KEY_LIMIT_S) as response:  # noqa: S310 - the scheme is checked above
            data: bytes = response.read(1 << 20)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise MachineProblem(f"{url} cannot be fetched: {reason}", "", "check the network and the setting") from error
    return data.decode("ascii", errors="replace")
