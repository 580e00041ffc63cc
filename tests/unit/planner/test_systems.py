"""Operating systems that no row knows: the nearest row of the family, only on request, and hostile names."""

from __future__ import annotations

from typing import Any

import pytest
from gpunodes.ansible.module_utils import facts as machine_facts
from gpunodes.errors import WrongInput
from gpunodes.model import Role, Severity
from gpunodes.planner import package_sources, reports, systems, tables
from gpunodes.planner.candidates import ClusterRequirements, MachineFacts
from gpunodes.planner.gpu import RequestedSoftware
from gpunodes.planner.preflight import CHECKS

# os-release(5) files of the systems, shortened, and the row that each is treated as.
DERIVED = {
    "Ubuntu 25.10": ('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="25.10"\nVERSION_CODENAME=questing\n', "Ubuntu 24.04"),
    "Ubuntu 20.04": ('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="20.04"\nVERSION_CODENAME=focal\n', "Ubuntu 22.04"),
    "Ubuntu 28.04": ('ID=ubuntu\nVERSION_ID="28.04"\n', "Ubuntu 26.04"),
    "Linux Mint 22": (
        'ID=linuxmint\nID_LIKE="ubuntu debian"\nVERSION_ID="22"\nUBUNTU_CODENAME=noble\n',
        "Ubuntu 24.04",
    ),
    "LMDE 6": ('ID=linuxmint\nID_LIKE=debian\nVERSION_ID="6"\nDEBIAN_CODENAME=bookworm\n', "Debian 12"),
    "Debian testing": ("ID=debian\nVERSION_CODENAME=forky\n", "Debian 13"),
    "Kali": ('ID=kali\nID_LIKE=debian\nVERSION_ID="2026.3"\nVERSION_CODENAME=kali-rolling\n', "Debian 13"),
    "Oracle Linux 9": ('ID="ol"\nID_LIKE="fedora"\nVERSION_ID="9.6"\n', "RHEL 9"),
    "Oracle Linux 10": ('ID="ol"\nID_LIKE="fedora"\nVERSION_ID="10.1"\n', "RHEL 10"),
    "Rocky Linux 8": ('ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="8.10"\n', "Rocky Linux 9"),
    "Rocky Linux 11": ('ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="11.0"\n', "Rocky Linux 10"),
    "Arch Linux": ("ID=arch\n", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("text", "title"), DERIVED.values(), ids=DERIVED)
def test_the_nearest_system_of_the_family(text: str, title: str | None) -> None:
    system = machine_facts.parse_os_release(text)
    row = systems.nearest(system)
    assert systems.known(system) is None
    assert (row and row["title"]) == title
    assert systems.treated({"os": system}, unsupported=False)["os"] is system
    treated = systems.treated({"os": system, "arch": "x86_64"}, unsupported=True)["os"]
    if row is None:
        assert treated is system
    else:
        assert systems.known(treated) == row
        assert set(treated) <= set(system)


@pytest.mark.parametrize("row", tables.read("systems")["system"], ids=lambda row: row["title"])
def test_a_known_system_is_itself(row: dict[str, Any]) -> None:
    system = {"id": row["id"], "version": row["version"], "codename": row["codename"] or None, "name": "x"}
    assert systems.known(system) == row
    assert systems.nearest(system) == row
    assert systems.treated({"os": system}, unsupported=True)["os"] is system
    assert row["family"] in tables.read("systems")["families"]


def _judged(system: dict[str, Any], *, unsupported: bool) -> dict[Severity, list[str]]:
    candidate = MachineFacts(
        "w", Role.WORKER, {"os": system}, requested=RequestedSoftware("", unsupported_os=unsupported)
    )
    found: dict[Severity, list[str]] = {severity: [] for severity in Severity}
    for check in CHECKS:
        if check.name == "os":
            assert candidate.facts is not None
            found[check.severity] += map(str, check.run(candidate, candidate.facts, ClusterRequirements("1.36")))
    return found


def test_an_unsupported_system_is_refused_and_the_sentence_names_the_option() -> None:
    mint = machine_facts.parse_os_release(f"PRETTY_NAME='Linux Mint 22'\n{DERIVED['Linux Mint 22'][0]}")
    found = _judged(mint, unsupported=False)
    assert found[Severity.ERROR][0].startswith("Linux Mint 22 is not supported; wanted: one of Debian 12")
    assert found[Severity.ERROR][0].endswith("or use --unsupported-os, which treats it as Ubuntu 24.04")
    assert not found[Severity.WARNING]
    found = _judged(mint, unsupported=True)
    assert not found[Severity.ERROR]
    assert "is treated as Ubuntu 24.04" in found[Severity.WARNING][0]


@pytest.mark.parametrize("unsupported", [True, False])
def test_a_system_of_no_family_is_refused_in_any_case(*, unsupported: bool) -> None:
    found = _judged(machine_facts.parse_os_release("ID=arch\n"), unsupported=unsupported)
    assert "--unsupported-os" not in found[Severity.ERROR][0]
    assert not found[Severity.WARNING]


@pytest.mark.parametrize("unsupported", [True, False])
def test_a_supported_system_needs_no_option(*, unsupported: bool) -> None:
    debian = machine_facts.parse_os_release('ID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\n')
    assert _judged(debian, unsupported=unsupported) == {Severity.ERROR: [], Severity.WARNING: []}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("like", "debian {{ lookup('pipe', 'id') }}"),
        ("like", "debian\nubuntu"),
        ("like", "debian " * 1000),
        ("base", "../../etc"),
        ("base", "noble; reboot"),
        ("like", ["debian"]),
        ("base", 7),
    ],
)
def test_a_hostile_name_is_no_report(field: str, value: object) -> None:
    system = {"id": "x", "version": "1", "codename": None, "name": "x", "like": "debian", "base": None}
    assert reports.saved_problem({"os": system}) == ""
    assert field in reports.saved_problem({"os": {**system, field: value}})


def test_sources_of_its_own_system_do_not_count_and_registries_do() -> None:
    system = machine_facts.parse_os_release(DERIVED["Oracle Linux 9"][0])
    failed = [{"name": name, "url": "u", "ok": False, "error": "no"} for name in ("kubernetes", "images of ghcr.io")]
    check = next(check for check in CHECKS if check.name == "sources")
    found = {}
    for unsupported in (True, False):
        requested = RequestedSoftware("", unsupported_os=unsupported)
        facts = {"os": system, "arch": "x86_64", "packages": {}, "gpu": {"functions": []}, "sources": failed}
        candidate = MachineFacts("w", Role.WORKER, facts, requested=requested)
        found[unsupported] = [problem.found for problem in check.run(candidate, facts, ClusterRequirements("1.36"))]
    assert found == {True: ["images of ghcr.io at u: no"], False: ["kubernetes at u: no", "images of ghcr.io at u: no"]}


def test_what_a_machine_says_never_becomes_part_of_an_address() -> None:
    """The addresses of an unsupported system are those of the row: its own words are only compared."""
    system = {"id": "evil", "version": "13.37", "codename": "evil", "name": "evil", "like": "debian", "base": "evil"}
    made = package_sources.docker(
        {"docker": {"url": "https://d/{system}", "key": "https://d/gpg", "fingerprint": ""}},
        systems.treated({"os": system}, unsupported=True)["os"],
    )
    assert (made.url, made.suite) == ("https://d/debian", "trixie")


def test_nvidias_key_without_a_known_fingerprint_is_refused_until_the_user_gives_it() -> None:
    facts = {"os": {"id": "rocky", "version": "10.1", "codename": None, "name": "Rocky Linux 10.1"}, "arch": "x86_64"}
    given = {"url": "", "key": "", "fingerprint": ""}
    with pytest.raises(WrongInput, match=r"Rocky Linux 10\.1 is unknown.*gpunodes_nvidia_packages_fingerprint"):
        package_sources._nvidia("nvidia", facts, given)
    made = package_sources._nvidia("nvidia", facts, {**given, "fingerprint": "AB12"})
    assert made.key == "https://developer.download.nvidia.com/compute/cuda/repos/rhel10/x86_64/CDF6BA43.pub"
    assert made.fingerprint == "AB12"
