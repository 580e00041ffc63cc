"""The first cause of a program's failure: the line of its output that an experienced operator would look for. Pure.

The output is untrusted: it is bounded, and what is shown of it has no control characters and no logins. The texts that
the patterns match are recorded, with their sources, in tests/unit/module_utils/test_causes.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .masking import Mask
from .problem import Problem
from .tree import shown

_MOST = 1 << 17
"""Characters of an output that are read, half of them from its beginning."""
_LONGEST_LINE = 2048
"""Characters of a line that are read."""
_LONGEST_PULL = 1 << 14
"""Characters of a failed pull that are read: a kubelet reports one for each pod of its node."""
_SHOWN = 400
"""Characters of a cause that are shown."""


class Program(Enum):
    """The kinds of output."""

    APT = "apt and dpkg"
    DNF = "dnf and rpm"
    BUILD = "a log of make and a compiler, such as DKMS's make.log"
    DRIVER = "what NVIDIA's driver writes into the kernel log, one message a line"
    KUBEADM = "kubeadm"
    KUBELET = "the kubelet's journal"
    IMAGE = "the pull of an image by containerd, Docker, crictl or the kubelet"
    SERVICE = "the journal of a systemd service"
    COMPONENT = "what a component of the control plane wrote when it ended"


@dataclass(frozen=True)
class Known:
    """A line with a cause: ``pattern`` finds it, ``remedy`` is what the user can do, "" if nothing better is known."""

    pattern: str
    remedy: str = ""
    whole: bool = True
    """Whether the whole line is shown, or only what the pattern matches."""


# What these rows name also causes other errors in the same output: they come first in every table.
_MACHINE = (
    Known(
        r"inotify.*(no space left on device|too many open files)|[Tt]oo many open files",
        "raise the limit: `sysctl fs.inotify.max_user_instances fs.inotify.max_user_watches fs.file-max`",
    ),
    Known(
        r"[Nn]o space left on device|[Nn]ot enough free (disk )?space|don't have enough free space"
        r"|more space needed on|needs \d+\w+ (more space )?on the \S+ filesystem",
        "free space on that file system (`df -h`, `df -i`), then run the command again",
    ),
    Known(r"[Dd]isk quota exceeded", "raise the quota, or free space there"),
    Known(r"[Ii]nput/output error", "check the disk: `dmesg` has the kernel's errors"),
    Known(
        r"[Rr]ead-only file system",
        "mount it read-write; the kernel makes the file system of a failing disk read-only (`dmesg`)",
    ),
    Known(
        r"[Cc]annot allocate memory|[Oo]ut of memory|Killed signal terminated|signal: killed|killed by the OOM killer"
        r"|virtual memory exhausted",
        "the machine has too little memory: give it more, or stop other programs",
    ),
)

_CLOCK = "set the machine's clock (`timedatectl`), and run a time service"
_DNS = "check the name, and the machine's DNS servers (`resolvectl status`, /etc/resolv.conf)"
_REACH = "check the address, the firewall, and the proxy or mirror that the machine needs"
_TRUST = "install the CA of that server on the machine, or correct the address; a proxy may intercept the connection"
_AGAIN = "run the command again; if it fails again, look for a proxy or mirror that breaks transfers"
_SOURCE_KEY = "check the source's key and fingerprint in the settings (gpunodes_*_key, gpunodes_*_fingerprint)"
_SOURCE_URL = "check the address of the source in the settings (gpunodes_*_url), and what it contains"
_FETCHED = r"^[EW]: (Failed to fetch|GPG error|The repository|Release file|Some index|An error|Repository).*"

_APT = (
    *_MACHINE,
    # dpkg: the errors of one package, with what its scripts print before them.
    Known(
        r"^Error! .*kernel headers .*cannot be found|^Error! Your kernel headers",
        "reboot into the installed kernel, or install its headers",
    ),
    Known(r"trying to overwrite .* which is also in package", "remove that other package if it is not needed"),
    Known(r"unexpected end of file or stream|lzma error|not a Debian format archive", _AGAIN),
    Known(
        r"unable to access the dpkg database|parsing file '/var/lib/dpkg",
        "repair dpkg's database in /var/lib/dpkg; /var/backups has copies of it",
    ),
    Known(
        r"[Cc]ould not get lock|is locked by another process|Unable to acquire the dpkg frontend lock",
        "another package manager runs: wait for it (`systemctl status apt-daily-upgrade unattended-upgrades`)",
    ),
    # The sources.
    Known(_FETCHED + r"is not valid yet", _CLOCK),
    Known(
        _FETCHED + r"(is expired|is not valid anymore|EXPKEYSIG)",
        "the source is out of date: check the mirror, and " + _CLOCK,
    ),
    Known(_FETCHED + r"(NO_PUBKEY|BADSIG|not available|[Ss]ignature)", _SOURCE_KEY),
    Known(_FETCHED + r"([Ff]ailure resolving|Could not resolve|No address associated)", _DNS),
    Known(_FETCHED + r"(certificate|handshake|SSL|TLS)", _TRUST),
    Known(
        _FETCHED
        + r"(refused|timed out|timeout|[Uu]nreachable|No route to host|[Cc]ould not connect|[Cc]onnection failed)",
        _REACH,
    ),
    Known(_FETCHED + r"(Hash Sum mismatch|unexpected size|Clearsigned file)", _AGAIN),
    Known(_FETCHED + r"(401|403|407)\s", "the server refuses the machine: check its access, or the proxy's login"),
    Known(_FETCHED + r"(404|does not have a Release file|is not signed)", _SOURCE_URL),
    # The choice of packages.
    Known(r" : (Pre-?)?(Depends|Conflicts|Breaks): ", "no source has a matching version: " + _SOURCE_URL),
    Known(
        r"^E: (Unable to locate package|Version .* was not found|Package .* has no installation candidate)", _SOURCE_URL
    ),
    # A script of a package, and anything else.
    Known(r"^Error! |^update-initramfs: failed|^dkms: .*failed"),
    Known(r"^dpkg: error|^dpkg: dependency problems"),
    Known(r"^E: "),
)

_DNF = (
    *_MACHINE,
    Known(
        r"not registered|no enabled rep",
        "register the machine (`subscription-manager register`), or enable its repositories",
    ),
    Known(r"Curl error \(6\)|Could not resolve host", _DNS),
    Known(r"Curl error \((35|51|58|60|77)\)|SSL certificate problem", _TRUST),
    Known(r"Curl error \((5|7|28)\)|Couldn't connect to server|Timeout was reached", _REACH),
    Known(r"Status code: (401|403|407) for", "the server refuses the machine: check its access, or the proxy's login"),
    Known(r"Status code: \d+ for", _SOURCE_URL),
    Known(
        r"PGP check for package|Public key for \S+ is not installed|Policy rejects|GPG check FAILED|is not signed"
        r"|[Ss]ignature verification failed",
        _SOURCE_KEY,
    ),
    Known(r"checksum doesn't match|[Cc]hecksum error|Curl error \((18|23|56|92)\)", _AGAIN),
    Known(r"filtered out by modular filtering", "reset or enable the module stream: `dnf module list`"),
    Known(r"nothing provides .*|file .* conflicts with file from package|conflicts with .* provided by", _SOURCE_URL),
    Known(r"(Unable to find a match|No match for argument): ", _SOURCE_URL),
    Known(r"scriptlet failed|Error in \w+ scriptlet"),
    Known(r"^(Error|error|Failed|Transaction failed)\b"),
)

_BUILD = (
    *_MACHINE,
    # gcc and clang write `file:line:column: error:`, make writes `***`: its errors count if the compiler has none.
    Known(r"^\S+:\d+(:\d+)?: (fatal )?error: "),
    Known(r"(?i)(^|: )(fatal )?error:? |undefined!$|Killed|version check failed"),
    Known(r"\*\*\* "),
)

# The driver ends with what it concludes: "None of the NVIDIA devices were initialized".
_DRIVER = (
    Known(r"requires use of the NVIDIA open kernel modules", "install the driver with the open kernel modules"),
    Known(
        r"not supported by open nvidia\.ko",
        "install the driver with the proprietary kernel modules: the open ones need a GPU of Turing or newer",
    ),
    Known(
        r"is not supported by the\b|[Ss]upported through the NVIDIA \S+ Legacy drivers",
        "choose a driver branch that supports this GPU (gpunodes_driver_branch)",
    ),
    Known(
        r"PCI I/O region assigned to your NVIDIA device is invalid|BAR\d is 0M",
        "let the firmware place large PCI memory (often called Above 4G Decoding), or give the virtual machine more",
    ),
    Known(r"fallen off the bus", "switch the machine off and on; if it returns, check the GPU's slot and power"),
    Known(
        r"obtained ownership of the NVIDIA device|is already bound to",
        "another driver has the GPU: `lspci -nnk -d 10de:` names it",
    ),
    Known(r"RmInitAdapter failed|[Cc]annot initialize GSP firmware", "switch the machine off and on"),
    Known(r"(?i)^(?!The NVIDIA probe routine|None of|No NVIDIA).*(\bfailed\b|\berror\b|cannot|could not)"),
)

# The rest of a message that may be quoted in another one.
_REST = r"[^\"\\]{0,300}"

_IMAGE = (
    *_MACHINE,
    Known(rf"x509: certificate has expired or is not yet valid{_REST}", _CLOCK, whole=False),
    Known(rf"(tls: failed to verify certificate: )?x509: {_REST}", _TRUST, whole=False),
    Known(
        rf"lookup \S{{1,255}}{_REST}(no such host|[Tt]ry again|misbehaving|i/o timeout|refused)",
        _DNS,
        whole=False,
    ),
    Known(
        rf"(dial tcp|read tcp|proxyconnect tcp|connect) {_REST}(refused|timed out|i/o timeout|no route to|unreachable)",
        _REACH,
        whole=False,
    ),
    Known(
        r"server gave HTTP response to HTTPS client|first record does not look like a TLS handshake",
        "that registry speaks plain http: give its mirror an address with http:// (gpunodes_image_mirrors)",
        whole=False,
    ),
    Known(
        rf"429 Too Many Requests|toomanyrequests{_REST}",
        "the registry limits pulls: wait, or use a mirror (gpunodes_image_mirrors)",
        whole=False,
    ),
    Known(
        rf"pull access denied{_REST}|401 Unauthorized|403 Forbidden|no basic auth credentials"
        rf"|insufficient_scope{_REST}|authentication required",
        "the registry has no such image, or requires a login: check the image's name, or use a mirror that has it",
        whole=False,
    ),
    Known(
        rf"no match for platform{_REST}|no matching manifest for{_REST}",
        "use an image for this machine's architecture",
        whole=False,
    ),
    Known(
        r"manifest unknown|MANIFEST_UNKNOWN|NAME_UNKNOWN|404 Not Found|(?<=: )not found",
        "check the image's name and tag, and whether the mirror has it (gpunodes_image_mirrors)",
        whole=False,
    ),
    Known(
        rf"unexpected commit digest{_REST}|failed size validation{_REST}|unexpected EOF|connection reset by peer"
        rf"|TLS handshake timeout|context deadline exceeded|Client\.Timeout exceeded{_REST}",
        _AGAIN,
        whole=False,
    ),
)

_KUBELET = (
    *_MACHINE,
    Known(r"running with swap on is not supported", "run the command again: it turns swap off"),
    Known(r"cgroup v1", "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1)"),
    Known(r"un(known|recognized) feature gate", "correct gpunodes_feature_gates"),
    Known(
        r"validate (CRI v1 |service connection|\w+ API)|containerd\.sock|cri-dockerd\.sock",
        "see `journalctl -u containerd`",
    ),
    Known(r"certificate has expired or is not yet valid", _CLOCK),
)

_KUBEADM = (
    *_MACHINE,
    Known(r"certificate has expired or is not yet valid|certificate is not yet valid", _CLOCK),
    Known(
        r"none of the public keys|cluster CA found in cluster-info ConfigMap is invalid",
        "another cluster responds at that address: check gpunodes_control_plane_endpoint and the inventory",
    ),
    Known(
        r"token id \S+ is invalid for this cluster or it has expired|failed to find the JWS signature|Unauthorized",
        "run the command again, which makes a new token; compare the clocks of both machines",
    ),
    Known(
        r"couldn't validate the identity of the API Server.*|dial tcp .*:6443.*",
        "the control plane must be reachable from this machine at that address, TCP port 6443",
    ),
    Known(r"a Node with name .* already exists in the cluster", "give the machine a host name of its own"),
    Known(
        r"static Pod hash for component \S+ on Node \S+ did not change after \S+?(?=:|$)",
        "the kubelet did not start the new static pod in time: see `journalctl -u kubelet`; run the command again, "
        "which continues, or raise upgradeManifests in gpunodes_kubeadm_timeouts",
        whole=False,
    ),
    Known(r"^error execution phase |^error: "),
)

# What systemd itself reports about every service that fails.
_SYSTEMD = (
    r"Main process exited|Failed with result|Failed to start|Scheduled restart job|Start request repeated"
    r"|Start(ing|ed) |Stopp(ing|ed) |Control process exited|Consumed |Deactivated successfully|hold-?off time"
)
_SERVICE = (
    *_MACHINE,
    Known(r"[Aa]ddress already in use", "stop the other program: `ss -ltnp` lists it"),
    Known(r"Failed at step \w+ spawning|[Uu]nit \S+ not found|is masked|bad unit file setting"),
    Known(r"level=(fatal|panic) .*|^panic: |[Ff]ailed to load TOML.*|failed to start daemon: .*|^F\d{4} "),
    Known(rf"(?i)^(?!.*({_SYSTEMD})).*(\berror\b|fatal|failed|cannot|could not|denied|invalid|no such)"),
    Known(rf"^(?!.*({_SYSTEMD})).*\S"),
)

BAD_ARGUMENT = r"unknown (shorthand )?flag: |flag provided but not defined: |invalid argument .* flag: "
"""What a component of the control plane says of an argument with which it never starts (pflag, Go's flag)."""
_COMPONENT = (
    *_MACHINE,
    Known(BAD_ARGUMENT, "correct gpunodes_component_arguments"),
    Known(r"[Aa]ddress already in use", "stop the other program: `ss -ltnp` lists it"),
    Known(r"PostStartHook .* failed: ", "the machine was too slow for it: run the command again when it does less"),
)

_TABLES: Mapping[Program, Sequence[Known]] = {
    Program.APT: _APT,
    Program.DNF: _DNF,
    Program.BUILD: _BUILD,
    Program.DRIVER: _DRIVER,
    Program.KUBEADM: _KUBEADM,
    Program.KUBELET: _KUBELET,
    Program.IMAGE: _IMAGE,
    Program.SERVICE: _SERVICE,
    Program.COMPONENT: _COMPONENT,
}
"""The rows by program: the first row that matches any line decides, and of its lines the first."""


def find(program: Program, output: str) -> Problem | None:
    """The first cause in an output, with its remedy; None if no row matches."""
    lines = list(_lines(output))
    for known in _TABLES[program]:
        pattern = re.compile(known.pattern)
        for line in lines:
            if (found := pattern.search(line)) and "-Werror" not in line.partition(": ")[0]:
                return Problem(
                    _cut(line, found) if known.whole else found.group().strip()[:_SHOWN], remedy=known.remedy
                )
    return None


def of(program: Program, output: str) -> Problem:
    """The first cause in an output; its last line if no row matches."""
    last = next((line for line in reversed(list(_lines(output))) if line), "")
    return find(program, output) or Problem(last[-_SHOWN:] or "it failed without output")


def of_pull(output: str) -> Problem | None:
    """The first cause of a failed pull, with the image if the output names it; None if no row matches."""
    output = bounded(output, _LONGEST_PULL)
    cause = find(Program.IMAGE, output)
    image = re.search(r"(?:pull|pull and unpack|get sandbox|pulling) image:? \\*\"?([\w][\w.:/@-]{0,300})", output)
    if cause is None or image is None:
        return cause
    return Problem(f"the image {image.group(1)} cannot be pulled: {cause.found}", remedy=cause.remedy)


def bounded(output: str, most: int = _MOST) -> str:
    """An output without the middle of a very long one: about ``most`` characters."""
    half = most // 2
    return output if len(output) <= most else f"{output[:half]}\n[...]\n{output[-half:]}"


def _lines(output: str) -> Iterator[str]:
    """The lines without control characters and indentation; a line that ends with a colon is joined with the next."""
    heading = ""
    mask = Mask()
    for raw in bounded(output).splitlines():
        text = mask.shapes(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", raw[:_LONGEST_LINE]))
        line = shown(" ".join(text.split())).removeprefix("- ")
        indented = text[:1].isspace()
        if heading and not (indented and line):
            yield heading
        elif heading:
            line = f"{heading} {line}"[:_LONGEST_LINE]
        heading = line if line.endswith(":") else ""
        if not heading:
            yield line
    if heading:
        yield heading


def _cut(line: str, found: re.Match[str]) -> str:
    """A line, or of a long one the part around what matches."""
    if len(line) <= _SHOWN:
        return line
    begin = max(0, min(found.end() - _SHOWN * 3 // 4, len(line) - _SHOWN))
    return ("..." if begin else "") + line[begin : begin + _SHOWN] + ("..." if begin + _SHOWN < len(line) else "")
