"""What a machine with GPUs gets: facts and wishes in, a plan or every conflict at once out. Pure.

What a GPU, a branch, a CUDA version or a runtime asks for stands in the tables gpus, drivers, cuda, toolkit and gates,
each row with its source. Here is only how they are held against each other. A machine that has a driver keeps it where
it does what is wished: nothing is upgraded that need not be.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from gpunodes.errors import ExitCode, WrongInput
from gpunodes.planner import gates, tables
from gpunodes.planner.gates import Conflict

Facts = Mapping[str, Any]
Row = Mapping[str, Any]

_DISPLAY = "03"
"""The PCI base class of display controllers, which GPUs without a display are too (3D controller, 0302)."""


class Flavour(StrEnum):
    """Which kernel modules."""

    OPEN = "open"
    PROPRIETARY = "proprietary"


class Source(StrEnum):
    """Where packages come from."""

    NVIDIA = "nvidia"
    """NVIDIA's CUDA repository."""
    DISTRIBUTION = "distribution"
    """The operating system's own archive."""
    TOOLKIT = "nvidia-container-toolkit"
    """NVIDIA's repository of the container toolkit."""


class Group(StrEnum):
    """What a package is part of, in the order of installation."""

    HEADERS = "headers"
    DRIVER = "driver"
    FABRIC_MANAGER = "fabric_manager"
    CUDA = "cuda"
    CUDNN = "cudnn"
    TOOLKIT = "toolkit"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is wanted of a machine. Empty means: what fits."""

    kubernetes_version: str
    """Minor or exact version."""
    driver: str = ""
    """A branch, ``580``."""
    cuda: tuple[str, ...] = ()
    """Versions of the CUDA toolkit on the host, ``13.0``."""
    cudnn: str = ""
    """A major, ``9``, or a minor, ``9.10``."""
    runtime: str = "containerd"
    """``containerd`` or ``docker``."""
    source: str = ""
    """``nvidia`` or ``distribution``."""
    gates: Mapping[str, bool] = field(default_factory=dict)
    """More feature gates of the kubelet."""

    def settings(self) -> dict[str, Any]:
        """The settings that say this: ``wishes_of`` reads them."""
        return {
            "gpunodes_driver_branch": self.driver,
            "gpunodes_driver_source": self.source,
            "gpunodes_cuda_versions": list(self.cuda),
            "gpunodes_cudnn_version": self.cudnn,
            "gpunodes_runtime": self.runtime,
            "gpunodes_feature_gates": dict(self.gates),
        }


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU on the PCI bus."""

    address: str
    device: str
    """Its PCI device id, four hexadecimal digits."""
    product: str
    generation: str
    """A name of the table drivers."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package to install."""

    group: Group
    name: str
    version: str
    """A shell pattern (``580.*``) that its version must match; empty: any."""
    same_version_as: str
    """The package whose upstream version it must have exactly; empty: none."""
    source: Source
    why: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something was chosen, and who says so."""

    choice: str
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a machine gets. Without a GPU: no package, and it joins as a CPU node."""

    machine: str
    gpus: tuple[Gpu, ...] = ()
    generations: tuple[str, ...] = ()
    flavour: Flavour | None = None
    branch: str = ""
    source: Source | None = None
    packages: tuple[Package, ...] = ()
    """In the order of installation."""
    module_stream: str = ""
    """dnf's module stream to enable first; empty: none."""
    hold: tuple[str, ...] = ()
    """Shell patterns of installed packages that upgrades must not touch."""
    blacklist_nouveau: bool = False
    fabric_manager: bool = False
    persistence: bool = False
    runtime: str = "containerd"
    cri_dockerd: bool = False
    """Whether the runtime needs cri-dockerd to serve this Kubernetes version."""
    gates: Mapping[str, bool] = field(default_factory=dict)
    """Feature gates of the kubelet to set."""
    reboot_needed: str | None = None
    """Why the machine must be rebooted after the installation, or None."""
    labels: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()

    def group(self, group: Group) -> tuple[Package, ...]:
        """The packages of one group."""
        return tuple(package for package in self.packages if package.group is group)


@dataclass(frozen=True, slots=True)
class Planned:
    """How the plan for one machine came out: a plan, or conflicts, or why its facts could not be read."""

    name: str
    wishes: Wishes
    plan: Plan | None = None
    conflicts: tuple[Conflict, ...] = ()
    unreachable: str = ""
    facts: Facts | None = None


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of several machines."""

    kubernetes: str
    machines: Sequence[Planned]
    interrupted: bool = False

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        made = sum(one.plan is not None for one in self.machines)
        if made == len(self.machines):
            return ExitCode.DONE
        return ExitCode.PARTLY if made else ExitCode.FAILED


def planned(machine: str, facts: Facts | None, wishes: Wishes, unreachable: str = "") -> Planned:
    """``plan`` for one machine of several, with all that led to it."""
    if facts is None:
        return Planned(machine, wishes, unreachable=unreachable or "its facts could not be read")
    found = plan(machine, facts, wishes)
    if isinstance(found, Plan):
        return Planned(machine, wishes, plan=found, facts=facts)
    return Planned(machine, wishes, conflicts=found, facts=facts)


def plan(machine: str, facts: Facts, wishes: Wishes) -> Plan | tuple[Conflict, ...]:
    """What ``machine`` gets, or every reason why it cannot get what is wished.

    ``facts`` is what the module ``host_facts`` returns.
    """
    return _Planner(machine, facts, wishes).run()


def wishes_of(settings: Mapping[str, Any], kubernetes_version: str) -> Wishes:
    """The wishes that a machine's settings hold; raises WrongInput for values of another kind."""
    wished = settings["gpunodes_feature_gates"] or {}
    if not isinstance(wished, Mapping):
        raise WrongInput(
            f"gpunodes_feature_gates is {wished!r}", "a mapping of gates to true or false", "correct the setting"
        )
    versions = settings["gpunodes_cuda_versions"] or []
    if isinstance(versions, str | int | float):
        versions = [versions]
    return Wishes(
        kubernetes_version=kubernetes_version,
        driver=str(settings["gpunodes_driver_branch"] or ""),
        cuda=tuple(str(version) for version in versions),
        cudnn=str(settings["gpunodes_cudnn_version"] or ""),
        runtime=str(settings["gpunodes_runtime"]),
        source=str(settings["gpunodes_driver_source"] or ""),
        gates=dict(wished),
    )


def at(wishes: Wishes, kubernetes_version: str) -> Wishes:
    """The same wishes for another Kubernetes version."""
    return replace(wishes, kubernetes_version=kubernetes_version)


def gpus_of(facts: Facts) -> tuple[Gpu, ...]:
    """The GPUs of a machine that are its own: not those that it hands to virtual machines."""
    functions = (facts.get("gpu") or {}).get("functions") or ()
    return tuple(_gpu(function) for function in functions if _is_gpu(function) and function.get("driver") != "vfio-pci")


class _Planner:
    """One plan in the making: it collects conflicts, warnings and reasons on its way."""

    def __init__(self, machine: str, facts: Facts, wishes: Wishes) -> None:
        self._machine = machine
        self._facts = facts
        self._gpu: Row = facts.get("gpu") or {}
        self._wishes = wishes
        self._conflicts: list[Conflict] = []
        self._warnings: list[str] = []
        self._reasons: list[Reason] = []
        os = facts.get("os") or {}
        self._id = str(os.get("id") or "")
        self._system = _system(self._id, str(os.get("version") or ""))
        self._gpus = gpus_of(facts)
        self._generations = [row for row in tables.read("drivers")["generation"] if self._has(row["name"])]

    def run(self) -> Plan | tuple[Conflict, ...]:
        ours = self._gates()
        cri_dockerd = self._runtime()
        if not self._gpus:
            self._without_gpus()
            made = Plan(self._machine, runtime=self._wishes.runtime, cri_dockerd=cri_dockerd, gates=ours)
        else:
            made = self._with_gpus(ours, cri_dockerd=cri_dockerd)
        if self._conflicts:
            return tuple(dict.fromkeys(self._conflicts))
        return _with(made, tuple(self._warnings), tuple(self._reasons))

    # --- every machine ---------------------------------------------------------------------------------------------

    def _gates(self) -> dict[str, bool]:
        version = self._wishes.kubernetes_version
        try:
            known = gates.gates(version)
        except WrongInput as error:  # a cluster of another version than those that we install
            if self._wishes.gates:
                self._refuse(error.found, error.wanted, "take the wishes for feature gates out")
            return {}
        self._conflicts += gates.check(version, self._wishes.gates)
        ours = gates.needed(version) if self._gpus else {}
        for gate in known:
            if gate.name in ours:
                self._say(f"feature gate {gate.name}", gate.why, gate.source)
        for name in self._wishes.gates:
            self._say(f"feature gate {name}", "it is wished")
        return {**ours, **self._wishes.gates}

    def _runtime(self) -> bool:
        """Judge the wished runtime; whether it needs cri-dockerd."""
        table = tables.read("toolkit")
        rows = {row["name"]: row for row in table["runtime"]}
        name = self._wishes.runtime
        row = rows.get(name)
        if row is None:
            self._refuse(f"the runtime {name!r} is wished", " or ".join(rows), "correct gpunodes_runtime")
            return False
        self._say(f"runtime {name}", "it is wished" if name != "containerd" else "it is Kubernetes' usual one")
        if self._gpus:
            self._cdi(row)
        shim = table["cri_dockerd"]
        if name == "docker" and _version(self._wishes.kubernetes_version) >= _version(shim["from"]):
            self._say(
                "cri-dockerd", f"Kubernetes has no dockershim from {shim['from']} on", self._cite("toolkit", shim)
            )
            return True
        return False

    def _cdi(self, row: Row) -> None:
        installed = {**(self._facts.get("packages") or {}), **(self._gpu.get("runtimes") or {})}
        for package in row["packages"]:
            version = re.search(r"\d[\d.]*", str(installed.get(package) or "").rpartition(":")[2])
            if version and _version(version[0]) < _version(row["least"]):
                self._refuse(
                    f"{package} {version[0]} is installed",
                    f"{row['least']} or newer: it must read CDI specifications 0.7 ({self._cite('toolkit', row)})",
                    "upgrade it, or remove it and set gpunodes_containerd_source to docker",
                )

    def _without_gpus(self) -> None:
        asked = {
            "driver": self._wishes.driver,
            "source": self._wishes.source,
            "CUDA": ", ".join(self._wishes.cuda),
            "cuDNN": self._wishes.cudnn,
        }
        self._say("CPU node", "no NVIDIA GPU is on its PCI bus")
        for what, value in asked.items():
            if value:
                self._warnings.append(f"no NVIDIA GPU is on its PCI bus: the wish for {what} {value} has no effect")
        if (self._gpu.get("driver") or {}).get("loaded"):
            self._warnings.append("the NVIDIA driver is loaded, yet no GPU is on the PCI bus: was one lost?")
        self._passed_through()

    def _passed_through(self) -> None:
        given = [
            function["address"]
            for function in self._gpu.get("functions") or ()
            if _is_gpu(function) and function.get("driver") == "vfio-pci"
        ]
        if given:
            self._warnings.append(f"GPUs bound to vfio-pci, for virtual machines, are left out: {', '.join(given)}")

    # --- machines with GPUs ----------------------------------------------------------------------------------------

    def _with_gpus(self, ours: Mapping[str, bool], *, cri_dockerd: bool) -> Plan:
        self._passed_through()
        flavours = self._flavours()
        self._limits()
        if self._wishes.cudnn:
            self._cudnn_limits()
        cudas = self._cuda_rows()
        offer, branch, flavour = self._driver(flavours, cudas)
        if offer is None or flavour is None:
            self._headers(signed=False)
            return Plan(self._machine)
        packages = [
            *self._headers(signed=offer["signed"]),
            *self._driver_packages(offer, branch, flavour),
            *self._fabric(offer, branch, flavour),
            *self._cuda_packages(offer, branch),
            *self._toolkit_packages(),
        ]
        nouveau = self._gpu.get("nouveau") or "available"
        if nouveau != "absent":
            self._say("nouveau off", f"it is {nouveau}, and holds the GPUs when it is loaded first")
        self._say("persistence on", "without it the driver leaves the GPUs when nobody uses them")
        return Plan(
            self._machine,
            gpus=self._gpus,
            generations=tuple(row["name"] for row in self._generations),
            flavour=flavour,
            branch=branch,
            source=Source(offer["source_of"]),
            packages=tuple(packages),
            module_stream=_fill(offer["module_stream"][flavour.value], branch, self._facts),
            hold=(*offer["hold"], *tables.read("toolkit")["packages"]["names"]),
            blacklist_nouveau=nouveau != "absent",
            fabric_manager=any(package.group is Group.FABRIC_MANAGER for package in packages),
            persistence=True,
            runtime=self._wishes.runtime,
            cri_dockerd=cri_dockerd,
            gates=ours,
            reboot_needed=self._reboot(branch, flavour, nouveau),
            labels=self._labels(),
        )

    def _flavours(self) -> list[Flavour]:
        """The modules that drive all GPUs, the better one first."""
        for row in self._generations:
            if row["name"] == "newer":
                ids = ", ".join(gpu.device for gpu in self._gpus if gpu.generation == "newer")
                self._warnings.append(
                    f"PCI device {ids} is newer than our table: it gets the open modules of the newest branch, untried"
                )
        common = [
            Flavour(name)
            for name in self._generations[-1]["modules"]
            if all(name in row["modules"] for row in self._generations)
        ]
        if not common:
            self._refuse(
                f"{self._named('open')} take the open modules only, {self._named('proprietary')} the proprietary only",
                "GPUs that one driver can run: a machine has one",
                "put them into different machines",
            )
        return common

    def _limits(self) -> None:
        if self._system is None:
            return
        for row in self._generations:
            if row["last"] and self._branches() and _number(row["last"]) < _number(self._branches()[0]):
                self._refuse(
                    f"{row['title']} GPUs ({self._products(row)}) have no driver after {row['last']}",
                    f"{self._branches()[0]} or newer: no older one is known here ({self._cite('drivers', row)})",
                    "take them out of the machine",
                )

    def _cuda_rows(self) -> list[tuple[str, Row]]:
        """The CUDA versions that are wished and can be, each with its major's row."""
        found = []
        rows = tables.read("cuda")["cuda"]
        for version in dict.fromkeys(self._wishes.cuda):
            row = next((row for row in rows if version in row["minors"]), None)
            if row is None:
                known = ", ".join(minor for row in rows for minor in row["minors"])
                self._refuse(f"CUDA {version} is wished", f"one that is known here: {known}", "choose one of these")
                continue
            for generation in self._generations:
                last = generation["last_cuda"]
                if last and _number(row["major"]) > _number(last):
                    self._refuse(
                        f"CUDA {version} is wished, for {generation['title']} GPUs ({self._products(generation)})",
                        f"CUDA {last}.x, the last for them ({self._cite('drivers', generation)})",
                        f"wish for CUDA {last}.x, or take those GPUs out",
                    )
            found.append((version, row))
        return found

    # --- the driver ------------------------------------------------------------------------------------------------

    def _branches(self) -> list[str]:
        return [row["name"] for row in tables.read("drivers")["branch"]]

    def _driver(
        self, flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
    ) -> tuple[Row | None, str, Flavour | None]:
        """Which offer, branch and modules; a conflict for each limit that is broken."""
        wish = self._wishes
        known = self._branches()
        if wish.driver and wish.driver not in known:
            self._refuse(f"the driver branch {wish.driver!r} is wished", f"one of {', '.join(known)}", "choose one")
        if wish.source and wish.source not in {Source.NVIDIA, Source.DISTRIBUTION}:
            self._refuse(f"drivers from {wish.source!r} are wished", "nvidia or distribution", "correct the setting")
        if wish.driver in known:
            self._judge_branch(wish.driver, cudas)
        offers = [
            offer
            for offer in tables.read("drivers")["offer"]
            if self._system in offer["systems"] and self._facts.get("arch") in offer["architectures"]
        ]
        if wish.source:
            offers = [offer for offer in offers if offer["source_of"] == wish.source]
        if not offers:
            self._refuse(
                f"no NVIDIA driver is known for {self._system or 'this system'} on {self._facts.get('arch')}"
                + (f" from {wish.source}" if wish.source else ""),
                "a system that has one",
                "choose another gpunodes_driver_source, or install another system",
            )
            return None, "", None
        choices = list(self._choices(offers, flavours, cudas))
        installed = self._installed()
        self._judge_installed(installed, choices)
        if not choices:
            self._no_choice(offers, flavours, cudas)
            return None, "", None
        trusted = [choice for choice in choices if self._boots(choice[0])]
        if not trusted:
            self._refuse(
                "Secure Boot is on, and the key that DKMS signs modules with is not enrolled",
                "modules that the firmware's keys vouch for",
                "enrol it (`mokutil --import /var/lib/dkms/mok.pub`, then confirm at the console while booting),"
                " switch Secure Boot off in the firmware, or take Ubuntu's signed modules"
                " (gpunodes_driver_source: distribution)",
            )
            return None, "", None
        offer, branch, flavour = self._best(trusted, installed)
        self._judge_life(branch)
        return offer, branch, flavour

    def _choices(
        self, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
    ) -> Iterator[tuple[Row, str, Flavour]]:
        """All that would do what is wished."""
        for choice in self._fitting(offers, flavours, cudas):
            if self._wishes.driver in {"", choice[1]} and (not self._wishes.cudnn or self._cudnn_row(*choice[:2])):
                yield choice

    def _fitting(
        self, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]
    ) -> Iterator[tuple[Row, str, Flavour]]:
        """All that drives the GPUs and serves ``cudas``: the better modules first, then in the table's order."""
        for flavour in flavours:
            for offer in offers:
                for branch in offer["branches"]:
                    if (
                        offer[flavour.value]
                        and not any(self._broken(branch, cudas))
                        and all(self._toolkit_row(offer, version) for version, _ in cudas)
                        and (not self._switched() or offer["fabric_manager"])
                    ):
                        yield offer, branch, flavour

    def _broken(self, branch: str, cudas: Sequence[tuple[str, Row]]) -> Iterator[Conflict]:
        """The limits of GPUs and CUDA that a branch breaks."""
        wished = f"the driver branch {branch} is wished"
        for row in self._generations:
            who = f"{row['title']} GPUs ({self._products(row)})"
            if row["last"] and _number(branch) > _number(row["last"]):
                yield Conflict(
                    f"{wished}, for {who}",
                    f"{row['last']}, the last branch for them ({self._cite('drivers', row)})",
                    f"wish for {row['last']} or older, or for none",
                )
            if row["first"] and _number(branch) < _number(row["first"]):
                yield Conflict(
                    f"{wished}, for {who}",
                    f"{row['first']}, the first branch for them ({self._cite('drivers', row)})",
                    f"wish for {row['first']} or newer, or for none",
                )
        for version, row in cudas:
            if _number(branch) < _number(row["least_driver"]):
                yield Conflict(
                    f"{wished}, and CUDA {version}",
                    f"{row['least_driver']} or newer for CUDA {version} ({self._cite('cuda', row)})",
                    f"wish for the branch {row['least_driver']} or newer, or for an older CUDA",
                )

    def _judge_branch(self, branch: str, cudas: Sequence[tuple[str, Row]]) -> None:
        self._conflicts += self._broken(branch, cudas)

    def _judge_life(self, branch: str) -> None:
        row = next(row for row in tables.read("drivers")["branch"] if row["name"] == branch)
        if row["ends"] < self._month():
            self._warnings.append(f"support of the driver branch {branch} ended in {row['ends']}")

    def _month(self) -> str:
        """The month that the machine's clock shows, ``2026-11``."""
        return time.strftime("%Y-%m", time.gmtime(float(self._facts.get("time") or 0)))

    def _no_choice(self, offers: Sequence[Row], flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]) -> None:
        """Say why no offer does, as far as it has not been said."""
        system = self._system
        if self._wishes.driver in self._branches() and not any(
            self._wishes.driver in offer["branches"] for offer in offers
        ):
            has = ", ".join(dict.fromkeys(branch for offer in offers for branch in offer["branches"]))
            self._refuse(
                f"the driver branch {self._wishes.driver} is wished, which {self._from()} has not for {system}",
                f"one of {has}",
                "choose one of these, or another gpunodes_driver_source",
            )
        for version, _ in cudas:
            if not any(self._toolkit_row(offer, version) for offer in offers):
                self._refuse(
                    f"CUDA {version} is wished, which {self._from()} has not for {system}",
                    self._cudas_of(offers),
                    "choose one of these, or another gpunodes_driver_source",
                )
        if self._switched() and not any(offer["fabric_manager"] for offer in offers):
            self._refuse(
                f"it has NVSwitches, and {self._from()} has no Fabric Manager for {system}",
                "Fabric Manager of exactly the driver's version",
                "take the driver from NVIDIA (gpunodes_driver_source: nvidia)",
            )
        fitting = [
            choice for choice in self._fitting(offers, flavours, cudas) if self._wishes.driver in {"", choice[1]}
        ]
        if self._wishes.cudnn and fitting and not any(self._cudnn_row(*choice[:2]) for choice in fitting):
            there = [
                f"{row['version']} for CUDA {row['cuda']} from {row['source_of']}"
                for row in tables.read("cuda")["cudnn"]
                if any(row["source_of"] == choice[0]["source_of"] for choice in fitting)
                and (not row["systems"] or system in row["systems"])
            ]
            majors = self._cuda_majors()
            self._refuse(
                f"cuDNN {self._wishes.cudnn} is wished" + (f", with CUDA {majors[-1]}" if majors else ""),
                f"one that there is for {system}: {', '.join(there) or 'none'}",
                "choose one of these, or another gpunodes_driver_source, or take the wish out",
            )
        alone = any(self._fitting(offers, flavours, ()))
        if flavours and (not alone or not self._conflicts):
            needs = " and ".join(
                f"{row['title']} ({' or '.join(row['modules'])} modules, branch {row['first'] or '...'} to"
                f" {row['last'] or '...'})"
                for row in self._generations
            )
            has = ", ".join(dict.fromkeys(branch for offer in offers for branch in offer["branches"]))
            asked = [f"CUDA {version}" for version, _ in cudas if alone] + (["NVSwitches"] if self._switched() else [])
            beside = f" with {', '.join(asked)}" if asked else ""
            systems = ", ".join(self._elsewhere(flavours, cudas if alone else ()))
            self._refuse(
                f"none of the drivers that {self._from()} has for {system} ({has}) serves {needs}{beside}",
                "one that serves all GPUs and wishes",
                f"install {systems}: there is one for it" if systems else "separate the GPUs, or take wishes out",
            )

    def _elsewhere(self, flavours: Sequence[Flavour], cudas: Sequence[tuple[str, Row]]) -> list[str]:
        """The systems on which this machine could have what is wished."""
        own, found = self._system, []
        for system in dict.fromkeys(name for offer in tables.read("drivers")["offer"] for name in offer["systems"]):
            self._system = system
            offers = [
                offer
                for offer in tables.read("drivers")["offer"]
                if system in offer["systems"] and self._facts.get("arch") in offer["architectures"]
            ]
            if any(self._fitting(offers, flavours, cudas)):
                found.append(system)
        self._system = own
        return found

    def _best(
        self, choices: Sequence[tuple[Row, str, Flavour]], installed: tuple[Source, str, Flavour | None] | None
    ) -> tuple[Row, str, Flavour]:
        """What is installed where it does; else the better modules, the recommended branch, else the newest alive."""
        if installed:
            source, branch, modules = installed
            for choice in choices:
                if (choice[0]["source_of"], choice[1]) == (source, branch) and choice[2] in {modules or choice[2]}:
                    self._say(
                        f"driver branch {branch}", f"{branch} from {source} is installed, and does what is wished"
                    )
                    self._say_modules(choice[2])
                    return choice
        better = [choice for choice in choices if choice[2] is choices[0][2]]
        newest = any(row["name"] == "newer" for row in self._generations)
        recommended = "" if newest else str(tables.read("drivers")["recommended"])
        ends = {row["name"]: row["ends"] for row in tables.read("drivers")["branch"]}

        def rank(choice: tuple[Row, str, Flavour]) -> tuple[bool, bool, str, int, bool, bool]:
            offer, branch, _ = choice
            return (
                branch == recommended,
                ends[branch] >= self._month(),
                "" if newest else ends[branch],
                _number(branch),
                offer["signed"] == bool(self._gpu.get("secure_boot")),
                offer["source_of"] == Source.NVIDIA,
            )

        best = max(better, key=rank)
        if self._wishes.driver:
            why = "it is wished"
        elif best[1] == recommended:
            why = "long-term support, and it fits the GPUs"
        elif newest:
            why = "the newest that is supported: it is the likeliest to know these GPUs"
        else:
            why = "of those that fit the GPUs, it is supported longest"
        row = next(row for row in tables.read("drivers")["branch"] if row["name"] == best[1])
        self._say(f"driver branch {best[1]}", why, self._cite("drivers", row))
        if self._wishes.source:
            self._say(f"driver from {self._wishes.source}", "it is wished")
        if best[0]["signed"]:
            self._say(
                "signed modules", "Secure Boot is on, and the distribution signs these", self._cite("drivers", best[0])
            )
        self._say_modules(best[2])
        return best

    def _say_modules(self, flavour: Flavour) -> None:
        for row in self._generations:
            only = len(row["modules"]) == 1
            why = f"{row['title']} takes {'these only' if only else 'either, the open ones are recommended'}"
            self._say(f"{flavour} kernel modules", why, self._cite("drivers", row))

    def _boots(self, offer: Row) -> bool:
        mok = self._gpu.get("mok") or {}
        return not self._gpu.get("secure_boot") or bool(offer["signed"] or mok.get("enrolled"))

    # --- a driver that is there already ----------------------------------------------------------------------------

    def _installed(self) -> tuple[Source, str, Flavour | None] | None:
        """Source, branch and modules of a driver that packages brought, if there is one."""
        driver = self._gpu.get("driver") or {}
        origin = {"nvidia-repository": Source.NVIDIA, "distribution": Source.DISTRIBUTION}.get(
            driver.get("origin") or ""
        )
        version = _there(driver)
        if not origin or not version:
            return None
        modules = driver.get("flavour")
        return origin, version.partition(".")[0], Flavour(modules) if modules else None

    def _judge_installed(
        self,
        installed: tuple[Source, str, Flavour | None] | None,
        choices: Sequence[tuple[Row, str, Flavour]],
    ) -> None:
        driver = self._gpu.get("driver") or {}
        if installed is None:
            if _there(driver):
                origin = {"runfile": "by NVIDIA's .run installer"}.get(
                    driver.get("origin") or "", "by something unknown"
                )
                remedy = (
                    "`nvidia-uninstall`, then reboot" if driver.get("origin") == "runfile" else "remove it, then reboot"
                )
                self._refuse(
                    f"the driver {_there(driver)} was installed {origin}",
                    "a driver from packages, or none: two would overwrite each other's files",
                    remedy,
                )
            return
        source, branch, modules = installed
        for offer, other, flavour in choices:
            if (offer["source_of"], other) == (source, branch) and modules in {None, flavour}:
                return
        if not choices:
            return
        clients = self._gpu.get("clients")
        in_cluster = bool((self._facts.get("kubernetes") or {}).get("role"))
        used = driver.get("loaded") and (clients or (clients is None and in_cluster))
        who = f"{clients} processes use it" if clients else "pods may use it"
        wished = {choice[0]["source_of"] for choice in choices}
        there = f"the driver {_there(driver)} ({modules or 'unknown'} modules, from {source}) is installed"
        if used:
            self._refuse(
                f"{there}, and {who}",
                "a driver that does what is wished, or one that nobody uses: none is replaced under running pods",
                f"drain the node, `gpunodes gpu remove {self._machine}`, and run again; or take the wish out",
            )
        elif source not in wished:
            self._refuse(
                there,
                f"one from {' or '.join(sorted(wished))}: packages of two sources overwrite each other",
                f"`gpunodes gpu remove {self._machine}`, or set gpunodes_driver_source to {source}",
            )
        else:
            self._warnings.append(f"{there}: it will be replaced, since it does not do what is wished")

    def _reboot(self, branch: str, flavour: Flavour, nouveau: str) -> str | None:
        driver = self._gpu.get("driver") or {}
        if nouveau == "loaded":
            return "nouveau is loaded, and holds the GPUs until the next boot"
        loaded = str(driver.get("module") or "")
        if driver.get("loaded") and (
            loaded.partition(".")[0] != branch or driver.get("flavour") not in {None, flavour.value}
        ):
            return f"the module {loaded} is loaded, and stays until the next boot"
        return None

    # --- packages --------------------------------------------------------------------------------------------------

    def _headers(self, *, signed: bool) -> list[Package]:
        if signed:
            return []
        row = next((row for row in tables.read("drivers")["headers"] if self._id in row["systems"]), None)
        headers = self._gpu.get("headers") or {}
        kernel = self._facts.get("kernel")
        if row is None:
            return []
        if not headers.get("running") and not headers.get("package"):
            self._refuse(
                f"there are no headers for the running kernel {kernel}, and no package source has them",
                f"{_fill(row['package'], '', self._facts)}: the driver's modules are built for it",
                "install a kernel of the system's own, with its headers, and reboot into it",
            )
            return []
        name = str(headers.get("package") or _fill(row["package"], "", self._facts))
        why = "the driver's modules are built for the running kernel"
        self._say(name, why, self._cite("drivers", row))
        if headers.get("running") and not headers.get("package"):
            return []  # they are there, and not from a package that we could name
        return [Package(Group.HEADERS, name, "", "", Source.DISTRIBUTION, why)]

    def _driver_packages(self, offer: Row, branch: str, flavour: Flavour) -> list[Package]:
        source = Source(offer["source_of"])
        found = []
        if offer["pin"]:
            why = f"holds apt at the branch {branch}, all parts of it"
            found.append(Package(Group.DRIVER, _fill(offer["pin"], branch, self._facts), "", "", source, why))
            self._say(found[0].name, why, self._cite("drivers", offer))
        for name in offer[flavour.value]:
            # Helpers of Debian's are built apart from the driver, and lag behind it.
            pattern = "" if name == "nvidia-persistenced" or name.startswith("linux-modules-") else f"{branch}.*"
            why = f"the driver, with {flavour} modules"
            found.append(Package(Group.DRIVER, _fill(name, branch, self._facts), pattern, "", source, why))
        return found

    def _switched(self) -> bool:
        """Whether the GPUs hang on NVSwitches."""
        return bool(self._gpu.get("nvswitches")) or any(_product(gpu).get("switched") for gpu in self._gpus)

    def _fabric(self, offer: Row, branch: str, flavour: Flavour) -> list[Package]:
        if not self._switched():
            return []
        source = Source(offer["source_of"])
        driver = _fill(offer[flavour.value][0], branch, self._facts)
        why = "NVSwitches do nothing without it; its version must be exactly the driver's"
        name = _fill(offer["fabric_manager"], branch, self._facts)
        found = [Package(Group.FABRIC_MANAGER, name, f"{branch}.*", driver, source, why)]
        self._say(name, why, self._cite("drivers", tables.read("drivers")["subnet_manager"]))
        if any(_product(gpu).get("switched") for gpu in self._gpus) and source is Source.NVIDIA:
            row = tables.read("drivers")["subnet_manager"]
            why = "NVSwitches of the fourth generation are run by it, beside Fabric Manager"
            found.append(Package(Group.FABRIC_MANAGER, row["package"], "", "", source, why))
            self._say(row["package"], why, self._cite("drivers", row))
        return found

    def _toolkit_row(self, offer: Row, version: str) -> Row | None:
        """Where the source of a driver has this CUDA version for the machine."""
        for row in tables.read("cuda")["toolkit"]:
            if (
                row["source_of"] == offer["source_of"]
                and self._system in row["systems"]
                and _version(row["first"]) <= _version(version)
                and (not row["last"] or _version(version) <= _version(row["last"]))
            ):
                found: Row = row
                return found
        return None

    def _cudas_of(self, offers: Sequence[Row]) -> str:
        sources = {offer["source_of"] for offer in offers}
        rows = [
            row
            for row in tables.read("cuda")["toolkit"]
            if row["source_of"] in sources and self._system in row["systems"]
        ]
        spans = [
            row["first"] if row["first"] == row["last"] else f"{row['first']} to {row['last'] or 'the newest'}"
            for row in rows
        ]
        return f"CUDA {' or '.join(spans)}" if spans else "no CUDA there"

    def _cuda_packages(self, offer: Row, branch: str) -> list[Package]:
        source = Source(offer["source_of"])
        found = []
        for version in dict.fromkeys(self._wishes.cuda):
            row = self._toolkit_row(offer, version)
            if row is None:
                continue  # an unknown version: it is among the conflicts
            name = row["package"].replace("{version}", version.replace(".", "-"))
            pattern = f"{version}.*" if row["last"] else ""
            why = f"CUDA {version} is wished"
            found.append(Package(Group.CUDA, name, pattern, "", source, why))
            self._say(name, why, self._cite("cuda", row))
        return [*found, *self._cudnn(offer, branch)]

    def _cudnn(self, offer: Row, branch: str) -> list[Package]:
        wish = self._wishes.cudnn
        row = self._cudnn_row(offer, branch) if wish else None
        if row is None:
            return []
        majors = self._cuda_majors()
        if len(majors) > 1:
            self._warnings.append(f"cuDNN is installed for CUDA {majors[-1]} only, the newest that is wished")
        last = self._last_cudnn()
        minor = next((version for version in (wish, row["version"], last) if "." in version), wish)
        why = f"cuDNN {wish} is wished; for CUDA {row['cuda']}"
        if minor == last != wish:
            why += f", and {last} is the last for these GPUs"
        self._say(row["package"], why, self._cite("cuda", row))
        return [Package(Group.CUDNN, row["package"], f"{minor}.*", "", Source(offer["source_of"]), why)]

    def _last_cudnn(self) -> str:
        """The last minor of cuDNN 9 that all GPUs take, empty for no limit."""
        limits = [row["last_cudnn"] for row in self._generations if row["last_cudnn"] not in {"", "none"}]
        return min(limits, key=_version, default="")

    def _cudnn_limits(self) -> None:
        wish = self._wishes.cudnn
        matrix = tables.read("cuda")["sources"]["cudnn-matrix"]
        for generation in self._generations:
            limit = generation["last_cudnn"]
            fact = f"cuDNN {wish} is wished, for {generation['title']} GPUs ({self._products(generation)})"
            if limit == "none" and _version(wish) >= (9,):
                self._refuse(fact, f"cuDNN 8, the last for them ({matrix})", "take the wish out")
            elif limit not in {"", "none"} and "." in wish and _version(wish) > _version(limit):
                self._refuse(fact, f"cuDNN {limit}, the last for them ({matrix})", f"wish for {limit}, or for 9")

    def _cudnn_row(self, offer: Row, branch: str) -> Row | None:
        """cuDNN for the newest CUDA that is wished, else for the newest that the driver and all GPUs take."""
        by_cuda = {row["cuda"]: row for row in self._cudnn_rows(offer["source_of"])}
        if majors := self._cuda_majors():
            return by_cuda.get(majors[-1])
        for row in reversed(tables.read("cuda")["cuda"]):
            if (
                row["major"] in by_cuda
                and _number(branch) >= _number(row["least_driver"])
                and all(
                    not generation["last_cuda"] or _number(row["major"]) <= _number(generation["last_cuda"])
                    for generation in self._generations
                )
            ):
                return by_cuda[row["major"]]
        return None

    def _cudnn_rows(self, source: str) -> list[Row]:
        """What a source has of the wished cuDNN."""
        wish = self._wishes.cudnn
        return [
            row
            for row in tables.read("cuda")["cudnn"]
            if row["source_of"] == source
            and (not row["systems"] or self._system in row["systems"])
            and f"{wish}.".startswith(f"{row['version']}.") | f"{row['version']}.".startswith(f"{wish}.")
        ]

    def _cuda_majors(self) -> list[str]:
        return sorted({version.partition(".")[0] for version in self._wishes.cuda}, key=int)

    def _toolkit_packages(self) -> list[Package]:
        row = tables.read("toolkit")["packages"]
        first = row["names"][0]
        why = "gives GPUs to containers; its four packages must be of one version"
        self._say(first, why, self._cite("toolkit", row))
        return [
            Package(Group.TOOLKIT, name, row["version"], "" if name == first else first, Source.TOOLKIT, why)
            for name in row["names"]
        ]

    # --- words -----------------------------------------------------------------------------------------------------

    def _labels(self) -> dict[str, str]:
        """Labels that are known without a driver; a machine of several products is labelled with its first."""
        first = self._gpus[0]
        return {
            "gpunodes.dev/gpu": "true",
            "gpunodes.dev/gpu-count": str(len(self._gpus)),
            "gpunodes.dev/gpu-generation": first.generation,
            "gpunodes.dev/gpu-product": re.sub(r"[^A-Za-z0-9_.-]+", "-", first.product).strip("-_.")[:63],
        }

    def _has(self, generation: str) -> bool:
        return any(gpu.generation == generation for gpu in self._gpus)

    def _products(self, row: Row) -> str:
        return ", ".join(dict.fromkeys(gpu.product for gpu in self._gpus if gpu.generation == row["name"]))

    def _named(self, modules: str) -> str:
        rows = [row for row in self._generations if row["modules"] == [modules]]
        return " and ".join(f"{row['title']} GPUs ({self._products(row)})" for row in rows)

    def _from(self) -> str:
        words = {"nvidia": "NVIDIA's repository", "distribution": "the distribution"}
        return words.get(self._wishes.source, "any source that is known")

    def _say(self, choice: str, why: str, source: str = "") -> None:
        self._reasons.append(Reason(choice, why, source))

    def _refuse(self, fact: str, limit: str, remedy: str) -> None:
        self._conflicts.append(Conflict(fact, limit, remedy))

    @staticmethod
    def _cite(table: str, row: Row) -> str:
        return str(tables.read(table)["sources"][row["source"]])


def _with(made: Plan, warnings: tuple[str, ...], reasons: tuple[Reason, ...]) -> Plan:
    return replace(made, warnings=warnings, reasons=tuple(dict.fromkeys(reasons)))


def _system(id_: str, version: str) -> str | None:
    """The name under which the tables know a system (``debian 13``, ``rhel 9`` of 9.4), None for an unknown one."""
    for row in tables.read("systems")["system"]:
        if id_ == row["id"] and (version == row["version"] or version.startswith(row["version"] + ".")):
            return f"{row['id']} {row['version']}"
    return None


def _is_gpu(function: Row) -> bool:
    return function["vendor"] == "10de" and str(function["class"]).startswith(_DISPLAY)


def _gpu(function: Row) -> Gpu:
    device = str(function["device"]).lower()
    row = _by_id(int(device, 16))
    generation = _generation(int(device, 16))
    title = next(row["title"] for row in tables.read("drivers")["generation"] if row["name"] == generation)
    return Gpu(str(function["address"]), device, str(row.get("name") or f"NVIDIA {title} GPU {device}"), generation)


def _by_id(device: int) -> Row:
    return next((row for row in tables.read("gpus")["product"] if row["device"] == device), {})


def _product(gpu: Gpu) -> Row:
    return _by_id(int(gpu.device, 16))


def _generation(device: int) -> str:
    named = _by_id(device).get("generation")
    if named:
        return str(named)
    for row in tables.read("gpus")["range"]:
        if row["first"] <= device <= row["last"]:
            return str(row["generation"])
    return "newer"


def _fill(text: str, branch: str, facts: Facts) -> str:
    kernel = str(facts.get("kernel") or "")
    words = {"{branch}": branch, "{kernel}": kernel, "{kernel_flavour}": kernel.rpartition("-")[2]}
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def _number(branch: str) -> int:
    return int(branch)


def _there(driver: Row) -> str:
    """The version of the driver that is installed, built or not yet; empty where there is none."""
    versions = [driver.get("module"), *(driver.get("packages") or {}).values()]
    found = (re.search(r"\b\d{3}\.\d+(\.\d+)?", str(version or "")) for version in versions)
    return next((match[0] for match in found if match), "")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
