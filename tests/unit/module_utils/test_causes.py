"""The first cause of a failure, in real outputs. Each sample has its source: a run, or a public report of one.

"run": recorded with apt 2.6.1 and dpkg 1.21.22 of Debian 12 in a mount and network namespace, with a package of
dpkg-deb, an http.server on the loopback interface, and file systems of a few KiB.
"""
# ruff: noqa: E501, ISC004 - recorded lines are as long as they are, and each sample begins with its output

from __future__ import annotations

import time

import pytest
from gpunodes.ansible.module_utils import causes
from gpunodes.ansible.module_utils.causes import Program
from gpunodes.ansible.module_utils.host import services
from gpunodes.ansible.module_utils.kubeadm import errors
from gpunodes.ansible.module_utils.problem import MachineProblem, Problem
from gpunodes.ansible.module_utils.process import CommandResult

DPKG_FULL = """\
Fetched 3021 kB in 0s (237 MB/s)
Selecting previously unselected package gpunodes-sample.
Preparing to unpack .../gpunodes-sample_1.0_all.deb ...
Unpacking gpunodes-sample (1.0) ...
dpkg: error processing archive /var/cache/apt/archives/gpunodes-sample_1.0_all.deb (--unpack):
 cannot copy extracted data for './usr/share/big/data' to '/usr/share/big/data.dpkg-new': failed to write (No space left on device)
dpkg-deb: error: paste subprocess was killed by signal (Broken pipe)
Errors were encountered while processing:
 /var/cache/apt/archives/gpunodes-sample_1.0_all.deb
E: Sub-process /usr/bin/dpkg returned an error code (1)
"""

# Output, a part of the cause that is shown, and a part of its remedy.
APT = {
    # run
    "the disk is full": (
        DPKG_FULL,
        "/usr/share/big/data.dpkg-new': failed to write (No space left on device)",
        "df -h",
    ),
    "the disk of the downloads is full": (
        "Need to get 3021 kB of archives.\nE: You don't have enough free space in /var/cache/apt/archives/.\n",
        "You don't have enough free space in /var/cache/apt/archives/.",
        "free space",
    ),
    "read-only": (
        "dpkg: error: unable to access the dpkg database directory /var/lib/dpkg: Read-only file system\n",
        "Read-only file system",
        "dmesg",
    ),
    "a script of a package": (
        "Setting up gpunodes-sample (1.0) ...\nBuilding module...\nError! Bad return status\n"
        "dpkg: error processing package gpunodes-sample (--install):\n"
        " installed gpunodes-sample package post-installation script subprocess returned error exit status 10\n"
        "Errors were encountered while processing:\n gpunodes-sample\n",
        "Error! Bad return status",
        "",
    ),
    "a script of a package that says nothing": (
        "Setting up gpunodes-sample (1.0) ...\ndpkg: error processing package gpunodes-sample (--install):\n"
        " installed gpunodes-sample package post-installation script subprocess returned error exit status 10\n"
        "Errors were encountered while processing:\n gpunodes-sample\nE: Sub-process /usr/bin/dpkg returned an error code (1)\n",
        "dpkg: error processing package gpunodes-sample (--install): installed gpunodes-sample package post-installation",
        "",
    ),
    "a dependency of dpkg": (
        "dpkg: dependency problems prevent configuration of gpunodes-sample:\n"
        " gpunodes-sample depends on nothing-there (>= 3); however:\n  Package nothing-there is not installed.\n\n"
        "dpkg: error processing package gpunodes-sample (--install):\n dependency problems - leaving unconfigured\n",
        "gpunodes-sample depends on nothing-there (>= 3)",
        "",
    ),
    "a file of two packages": (
        "dpkg: error processing archive sample4.deb (--install):\n"
        " trying to overwrite '/usr/share/big/zeros', which is also in package gpunodes-sample 1.0\n",
        "trying to overwrite '/usr/share/big/zeros', which is also in package gpunodes-sample 1.0",
        "remove that other package",
    ),
    "a truncated package": (
        "dpkg-deb (subprocess): cannot copy archive member from 'broken.deb' to decompressor pipe: unexpected end of file or "
        "stream\ndpkg-deb: error: <decompress> subprocess returned error exit status 2\n",
        "unexpected end of file or stream",
        "again",
    ),
    "a source that refuses": (
        "Err:1 http://127.0.0.1:9 ./ InRelease\n  Could not connect to 127.0.0.1:9 (127.0.0.1). - connect (111: Connection "
        "refused)\nW: Failed to fetch http://127.0.0.1:9/./InRelease  Could not connect to 127.0.0.1:9 (127.0.0.1). - connect "
        "(111: Connection refused)\nW: Some index files failed to download. They have been ignored, or old ones used instead.\n",
        "W: Failed to fetch http://127.0.0.1:9/./InRelease",
        "proxy or mirror",
    ),
    "no DNS": (
        "Err:1 http://mirror.example ./ InRelease\n  Temporary failure resolving 'mirror.example'\n"
        "W: Failed to fetch http://mirror.example/./InRelease  Temporary failure resolving 'mirror.example'\n",
        "Temporary failure resolving 'mirror.example'",
        "DNS",
    ),
    "no release": (
        "Err:2 http://127.0.0.1:8080/nothing ./ Release\n  404  File not found [IP: 127.0.0.1 8080]\n"
        "E: The repository 'http://127.0.0.1:8080/nothing ./ Release' does not have a Release file.\n",
        "E: The repository 'http://127.0.0.1:8080/nothing ./ Release' does not have a Release file.",
        "address of the source",
    ),
    "no file": (
        "E: Failed to fetch http://127.0.0.1:8080/pool/s.deb  404  File not found [IP: 127.0.0.1 8080]\n"
        "E: Unable to fetch some archives, maybe run apt-get update or try with --fix-missing?\n",
        "http://127.0.0.1:8080/pool/s.deb  404  File not found".replace("  ", " "),
        "address of the source",
    ),
    "another content": (
        "E: Failed to fetch http://127.0.0.1:8080/pool/s.deb  Hash Sum mismatch\n   Hashes of expected file:\n"
        "    - SHA256:b768a36c712a10bc299a0a0052b09dfa2c0d58561b7a9301d1f7642305e8e1fd\nE: Unable to fetch some archives\n",
        "Hash Sum mismatch",
        "again",
    ),
    "no key": (
        "W: GPG error: http://127.0.0.1:8080 ./ InRelease: The following signatures couldn't be verified because the public key "
        "is not available: NO_PUBKEY 0E85BD21E7CC64D0\nE: The repository 'http://127.0.0.1:8080 ./ InRelease' is not signed.\n",
        "NO_PUBKEY 0E85BD21E7CC64D0",
        "gpunodes_*_key",
    ),
    "no trust": (
        "W: Failed to fetch https://127.0.0.1:8443/./InRelease  Certificate verification failed: The certificate is NOT trusted. "
        "The certificate issuer is unknown.  Could not handshake: Error in the certificate verification. [IP: 127.0.0.1 8443]\n",
        "The certificate issuer is unknown.",
        "install the CA",
    ),
    "locked": (
        "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 25334 (python3)\n"
        "E: Unable to lock directory /var/lib/apt/lists/\n",
        "It is held by process 25334 (python3)",
        "wait for it",
    ),
    "no package": ("Reading package lists...\nE: Unable to locate package nothing-such\n", "nothing-such", "source"),
    # constructed: the sentence is in apt-pkg/acquire-item.cc
    "a clock that is behind": (
        "E: Release file for http://m/debian/dists/trixie-updates/InRelease is not valid yet (invalid for another 3h 21min). "
        "Updates for this repository will not be applied.\n",
        "is not valid yet",
        "timedatectl",
    ),
    # constructed: the sentences are in apt-private/private-output.cc and apt-pkg/algorithms.cc
    "an unmet dependency": (
        "Reading package lists...\n kubelet : Depends: kubernetes-cni (>= 1.2.0) but it is not installable\n"
        "E: Unable to correct problems, you have held broken packages.\nE: second\n",
        "kubelet : Depends: kubernetes-cni (>= 1.2.0) but it is not installable",
        "no source has",
    ),
}

DNF = {
    # github.com/rpm-software-management/dnf5/issues/538 (the output of dnf)
    "the disk is full": (
        "Error Summary\nDisk Requirements:\nAt least 1722MB more space needed on the / filesystem. \n",
        "1722MB more space needed on the / filesystem.",
        "df -h",
    ),
    # github.com/weldr/lorax/pull/1358
    "the disk is full, dnf5": (
        "The transaction process has ended abruptly:\n"
        "installing package llvm-libs-17.0.6-2.fc40.x86_64 needs 107MB more space on the / filesystem\n",
        "installing package llvm-libs-17.0.6-2.fc40.x86_64 needs 107MB more space on the / filesystem",
        "free space",
    ),
    # github.com/dyrnq/install-docker/issues/22
    "no TLS": (
        "Errors during downloading metadata for repository 'docker-ce-stable':\n  - Curl error (35): SSL connect error for "
        "https://download.docker.com/linux/centos/10/x86_64/stable/repodata/repomd.xml [Recv failure: Connection reset by peer]\n"
        "Error: Failed to download metadata for repo 'docker-ce-stable': Cannot download repomd.xml: Cannot download "
        "repodata/repomd.xml: All mirrors were tried\n",
        "Curl error (35): SSL connect error for https://download.docker.com/linux/centos/10",
        "CA",
    ),
    # github.com/rethinkdb/rethinkdb/issues/7162
    "no trust": (
        "Errors during downloading metadata for repository 'rethinkdb':\n  - Curl error (60): Peer certificate cannot be "
        "authenticated with given CA certificates for https://download.rethinkdb.com/repository/alma/8/x86_64/repodata/repomd.xml "
        "[SSL certificate problem: certificate has expired]\nError: Failed to download metadata for repo 'rethinkdb'\n",
        "[SSL certificate problem: certificate has expired]",
        "CA",
    ),
    # github.com/kubernetes/kubernetes/issues/128933 (dnf5)
    "a signature": (
        "Running transaction\nTransaction failed: Signature verification failed.\nPGP check for package "
        '"kubectl-1.31.3-150500.1.1.x86_64" (/var/cache/libdnf5/k/packages/kubectl-1.31.3-150500.1.1.x86_64.rpm) from repo '
        '"kubernetes" has failed: Problem occurred when opening the package.\n',
        "Signature verification failed.",
        "gpunodes_*_key",
    ),
    # github.com/kubernetes/kubeadm/issues/1004
    "no key": (
        "Public key for kubelet-1.11.1-0.x86_64.rpm is not installed\n Failing package is: kubelet-1.11.1-0.x86_64\n"
        "Error: GPG check FAILED\n",
        "Public key for kubelet-1.11.1-0.x86_64.rpm is not installed",
        "gpunodes_*_key",
    ),
}

PULL = (
    'failed to pull and unpack image "registry.k8s.io/pause:3.10.1": failed to resolve reference '
    '"registry.k8s.io/pause:3.10.1": '
)
IMAGE = {
    # github.com/kubernetes/kubeadm/issues/2936
    "a timeout": (
        PULL + 'failed to do request: Head "https://registry.k8s.io/v2/kube-proxy/manifests/v1.28.2": '
        "dial tcp 34.96.108.209:443: connect: connection timed out",
        "dial tcp 34.96.108.209:443: connect: connection timed out",
        "firewall",
    ),
    # github.com/kubernetes/kubernetes/issues/79422
    "refused": (
        'failed to do request: Head https://k8s.gcr.io/v2/pause/manifests/3.1: dial tcp 64.233.167.82:443: connect: connection refused"',
        "dial tcp 64.233.167.82:443: connect: connection refused",
        "firewall",
    ),
    # github.com/kubernetes/website/issues/45524
    "no DNS server": (
        PULL + "dial tcp: lookup registry.k8s.io on [::1]:53: read udp [::1]:57673->[::1]:53: read: connection refused",
        "lookup registry.k8s.io on [::1]:53: read udp [::1]:57673->[::1]:53: read: connection refused",
        "DNS",
    ),
    # constructed: net/net.go of Go (DNSError.Error)
    "no such host": (
        PULL + "dial tcp: lookup registry.k8s.io on 10.0.0.1:53: no such host",
        "lookup registry.k8s.io on 10.0.0.1:53: no such host",
        "DNS",
    ),
    # github.com/containerd/containerd/issues/1568; the second constructed: crypto/x509/verify.go of Go
    "no trust": (
        "ctr: failed to do request: Head https://xxx/v2/library/nginx/manifests/1.10.1-alpine:x509: certificate signed by "
        "unknown authority",
        "x509: certificate signed by unknown authority",
        "CA",
    ),
    "a clock that is behind": (
        PULL + "tls: failed to verify certificate: x509: certificate has expired or is not yet valid: current time "
        "2020-01-01T00:00:00Z is before 2026-01-01T00:00:00Z",
        "is before 2026-01-01T00:00:00Z",
        "timedatectl",
    ),
    # github.com/containerd/containerd/issues/11103 and 5246
    "no login": (
        PULL
        + "pull access denied, repository does not exist or may require authorization: authorization failed: no basic auth "
        "credentials",
        "pull access denied, repository does not exist or may require authorization",
        "login",
    ),
    "unauthorized": ("ctr: unexpected status code [manifests 2]: 401 Unauthorized", "401 Unauthorized", "login"),
    # constructed: core/remotes/docker/resolver.go of containerd 2, and Docker's own form
    "no manifest": (PULL + "registry.k8s.io/pause:3.10.1: not found", "not found", "tag"),
    "manifest unknown": ("Error response from daemon: manifest for x:9 not found: manifest unknown", "unknown", "tag"),
    # github.com/usestrix/strix/issues/483 (Docker with containerd's store)
    "the disk is full": (
        "failed to extract layer (application/vnd.oci.image.layer.v1.tar+gzip sha256:0465) to overlayfs as "
        '"extract-260106421-WDeK sha256:dc6b": write /var/lib/desktop-containerd/daemon/io.containerd.snapshotter.v1.overlayfs/'
        "snapshots/105/fs/home/a: no space left on device",
        "no space left on device",
        "df -h",
    ),
}

# constructed, but for gcc's and make's own forms: gcc/gcc.cc, scripts/mod/modpost.c
BUILD = {
    "a header": (
        "x.c:1:10: fatal error: linux/x.h: No such file or directory\nmake: *** [a] Error 1\n",
        "x.c:1:10: fatal error: linux/x.h",
        "",
    ),
    "no memory": (
        "cc1: all warnings being treated as errors\ngcc: fatal error: Killed signal terminated program cc1\n",
        "gcc: fatal error: Killed signal terminated program cc1",
        "too little memory",
    ),
    "a symbol": ('ERROR: modpost: "rcu_read_lock" [nvidia.ko] undefined!\n', "ERROR: modpost:", ""),
    "the disk is full": (
        "x.c:9:1: error: other\n/tmp/ccX.s: No space left on device\nmake: *** [a] Error 1\n",
        "/tmp/ccX.s: No space left on device",
        "df -h",
    ),
    "make": ("make[1]: *** No rule to make target 'modules'.  Stop.\n", "make[1]: *** No rule", ""),
}

# Messages as gpu_driver.messages joins them; sources: NVIDIA's kernel-open/nvidia/nv-pci.c and nv.c, and public reports.
DRIVER = {
    "the open modules": (
        "The NVIDIA GPU 0000:02:00.0 (PCI ID: 10de:2c58) installed in this system requires use of the NVIDIA open kernel "
        "modules.\nGPU 0000:02:00.0: RmInitAdapter failed! (0x22:0x56:884)\n",
        "requires use of the NVIDIA open kernel modules.",
        "open kernel modules",
    ),
    # github.com/NVIDIA/open-gpu-kernel-modules/issues/322
    "a GPU without GSP": (
        "The NVIDIA GPU 0000:af:00.0 (PCI ID: 10de:1db5) installed in this system is not supported by open nvidia.ko "
        "because it does not include the required GPU\nSystem Processor (GSP).\nNone of the NVIDIA devices were "
        "initialized.\n",
        "is not supported by open nvidia.ko",
        "proprietary kernel modules",
    ),
    # github.com/NVIDIA/open-gpu-kernel-modules/issues/393
    "a GPU that is too new": (
        "The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:25a0) installed in this system is not supported by the NVIDIA "
        "520.56.06 driver release.\nThe NVIDIA probe routine failed for 1 device(s).\n",
        "is not supported by the NVIDIA 520.56.06 driver release.",
        "gpunodes_driver_branch",
    ),
    "a GPU that is too old": (
        "The NVIDIA GeForce GT 1030 GPU installed in this system is supported through the NVIDIA 580.xx Legacy drivers. "
        "Please visit http://www.nvidia.com/object/unix.html for more information.  The 610.43.02 NVIDIA driver will "
        "ignore this GPU.  Continuing probe...\nNo NVIDIA GPU found.\n",
        "supported through the NVIDIA 580.xx Legacy drivers",
        "gpunodes_driver_branch",
    ),
    "no room for its memory": (
        "This PCI I/O region assigned to your NVIDIA device is invalid: BAR1 is 0M @ 0x0 (PCI:0000:0b:00.0)\n"
        "The NVIDIA GPU 0000:0b:00.0 (PCI ID: 10de:2204) installed in this system has fallen off the bus and is not "
        "responding to commands.\n",
        "BAR1 is 0M @ 0x0",
        "Above 4G",
    ),
    "a dead GPU": (
        "The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:2d04) installed in this system has fallen off the bus and is not "
        "responding to commands.\nNone of the NVIDIA devices were initialized.\n",
        "has fallen off the bus",
        "slot and power",
    ),
    # github.com/mattshma/bigdata/issues/133
    "another driver": (
        "The NVIDIA probe routine was not called for 3 device(s).\nThis can occur when a driver such as: nouveau, rivafb, "
        "nvidiafb or rivatv was loaded and obtained ownership of the NVIDIA device(s).\nNo NVIDIA graphics adapter probed!\n",
        "obtained ownership of the NVIDIA device(s).",
        "lspci",
    ),
    # github.com/geerlingguy/raspberry-pi-pcie-devices/issues/677
    "a GPU that does not start": (
        "kgspExecuteFwsec_TU102: failed to execute FWSEC for FRTS: no initialized WPR2 found\n"
        "RmInitAdapter: Cannot initialize GSP firmware RM\nGPU 0000:01:00.0: RmInitAdapter failed! (0x62:0xffff:1863)\n",
        "Cannot initialize GSP firmware RM",
        "off and on",
    ),
    "another error": (
        "loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04\nosInitNvMapping: *** Cannot attach gpu\n",
        "Cannot attach gpu",
        "",
    ),
}

KUBEADM = {
    # kubeadm 1.36.3 app/util/apiclient/wait.go, as in github.com/kubernetes/kubernetes/issues/121776
    "a static pod that does not start": (
        "[upgrade/staticpods] Waiting for the kubelet to restart the component\n"
        "[upgrade/staticpods] This can take up to 5m0s\n"
        "error execution phase control-plane: couldn't complete the static pod upgrade: static Pod hash for component "
        "kube-apiserver on Node control-1 did not change after 5m0s: context deadline exceeded\n"
        "To see the stack trace of this error execute with --v=5 or higher\n",
        "static Pod hash for component kube-apiserver on Node control-1 did not change after 5m0s",
        "journalctl -u kubelet",
    ),
    # github.com/kubernetes/kubeadm/issues/2740
    "no way to the API": (
        "[preflight] Running pre-flight checks\nerror execution phase preflight: couldn't validate the identity of the API Server: "
        'Get "https://172.31.20.26:6443/api/v1/namespaces/kube-public/configmaps/cluster-info?timeout=10s": net/http: request '
        "canceled while waiting for connection (Client.Timeout exceeded while awaiting headers)\n"
        "To see the stack trace of this error execute with --v=5 or higher\n",
        "https://172.31.20.26:6443/api/v1",
        "6443",
    ),
    # constructed: cmd/kubeadm/app/discovery/token/token.go
    "an old token": (
        "error execution phase preflight: couldn't validate the identity of the API Server: could not find a JWS signature in the "
        'cluster-info ConfigMap for token ID "abcdef": token id "abcdef" is invalid for this cluster or it has expired\n',
        "is invalid for this cluster or it has expired",
        "new token",
    ),
}

SERVICE = {
    # constructed: systemd's sentences are in its src/core (service.c, unit.c, exec-invoke.c), containerd's in
    # cmd/containerd/command and the library go-toml
    "containerd's configuration": (
        "Starting containerd.service - containerd container runtime...\n"
        "containerd: failed to load TOML: /etc/containerd/config.toml: (3, 5): no value can start with x\n"
        "containerd.service: Main process exited, code=exited, status=1/FAILURE\n"
        "containerd.service: Failed with result 'exit-code'.\n"
        "Failed to start containerd.service - containerd container runtime.\n",
        "containerd: failed to load TOML: /etc/containerd/config.toml: (3, 5)",
        "",
    ),
    "no program": (
        "Starting x.service...\nx.service: Failed at step EXEC spawning /usr/bin/x: No such file or directory\n"
        "x.service: Main process exited, code=exited, status=203/EXEC\nFailed to start x.service.\n",
        "x.service: Failed at step EXEC spawning /usr/bin/x: No such file or directory",
        "",
    ),
    "a port": (
        "listen tcp 0.0.0.0:2375: bind: address already in use\nx.service: Failed with result 'exit-code'.\n",
        "listen tcp 0.0.0.0:2375: bind: address already in use",
        "ss -ltnp",
    ),
    "no memory": (
        "x.service: A process of this unit has been killed by the OOM killer.\nx.service: Failed with result 'oom-kill'.\n",
        "killed by the OOM killer",
        "memory",
    ),
}

SAMPLES = [
    pytest.param(program, *sample, id=f"{program.name}: {title}")
    for program, samples in {
        Program.APT: APT,
        Program.DNF: DNF,
        Program.IMAGE: IMAGE,
        Program.BUILD: BUILD,
        Program.DRIVER: DRIVER,
        Program.KUBEADM: KUBEADM,
        Program.SERVICE: SERVICE,
    }.items()
    for title, sample in samples.items()
]


@pytest.mark.parametrize(("program", "output", "shown", "remedy"), SAMPLES)
def test_the_line_that_an_operator_looks_for(program: Program, output: str, shown: str, remedy: str) -> None:
    cause = causes.of(program, output)
    assert shown in cause.found
    assert remedy in cause.remedy
    assert bool(remedy) == bool(cause.remedy)
    assert causes.find(program, output) == cause


@pytest.mark.parametrize("program", Program)
def test_an_unknown_output_has_its_last_line(program: Program) -> None:
    assert causes.of(program, "") == Problem("it failed without output")
    assert causes.of(program, "first\nlast\n\n").found in {"last", "first"}
    if program is not Program.SERVICE:
        assert causes.find(program, "all is well\n") is None


def test_what_only_systemd_reports_is_no_cause() -> None:
    """The unit's own line is missing, if the journal lost it: systemctl's message is then shown."""
    journal = "Starting x.service...\nx.service: Failed with result 'exit-code'.\nFailed to start x.service.\n"
    assert causes.find(Program.SERVICE, journal) is None


@pytest.mark.parametrize("program", Program)
def test_a_hostile_output_costs_little_and_controls_nothing(program: Program) -> None:
    began = time.process_time()
    for piece in (
        "x" * 100_000,
        "lookup " * 50_000,
        "dial tcp " * 50_000,
        'a" \\"b: ' * 50_000,
        "E: Failed to fetch " * 30_000,
    ):
        causes.of(program, piece)
        causes.of_pull(f"pull image {piece}")
        causes.of(program, (piece[:3000] + "\n") * 300)
    assert time.process_time() - began < 20
    hostile = (
        "\x1b[2J\x1b]0;x\x07E: error: \x9b31mFailed {{ lookup('pipe', 'id') }} No space left on device\r\n\u202etxt\n"
    )
    cause = causes.of(program, hostile)
    assert cause.found.isprintable()
    assert len(cause.found) < 500


def test_lines_that_are_joined_do_not_become_long_ones() -> None:
    joined = [*causes._lines("x:\n" + "  file file file:\n" * 8000)]
    assert max(map(len, joined)) <= causes._LONGEST_LINE


def test_a_kubelet_that_reports_a_huge_pull_costs_little() -> None:
    began = time.process_time()
    for _ in range(100):
        assert causes.of_pull("lookup " + "lookup a" * 100_000) is None
    assert time.process_time() - began < 10


def test_a_login_in_an_address_is_not_shown() -> None:
    """dnf shows the whole address of a source, and kubeadm a token."""
    url = "https://admin:hunter2@mirror.example/repodata/repomd.xml"
    cause = causes.of(Program.DNF, f"  - Curl error (7): Couldn't connect to server for {url} [refused]\n")
    assert "hunter2" not in str(cause)
    assert "@mirror.example/repodata" in cause.found
    assert "abcdef.0123456789abcdef" not in str(
        causes.of(Program.KUBEADM, "error: token abcdef.0123456789abcdef: no\n")
    )


def test_a_long_line_is_cut_around_its_cause() -> None:
    line = f"dpkg: error: cannot write '/{'a' * 1500}': No space left on device, {'b' * 200}\n"
    assert "No space left on device" in causes.of(Program.APT, line).found


def test_a_long_output_keeps_its_beginning_and_its_end() -> None:
    noise = "x.c: warning\n" * 100_000
    for output in ("a.c:1:1: error: b\n" + noise, noise + "a.c:1:1: error: b\n"):
        assert causes.of(Program.BUILD, output).found == "a.c:1:1: error: b"
        assert len(causes.bounded(output)) < 300_000


def test_kubeadm_names_the_image_and_why() -> None:
    """Source: github.com/kubernetes/kubeadm/issues/2936."""
    quoted = PULL.replace('"', '\\"') + (
        'failed to do request: Head \\"https://registry.k8s.io/v2/kube-proxy/manifests/v1.28.2\\": '
        "dial tcp 34.96.108.209:443: connect: connection timed out"
    )
    text = (
        "error execution phase preflight: [preflight] Some fatal errors occurred:\n"
        "\t[ERROR ImagePull]: failed to pull image registry.k8s.io/kube-proxy:v1.28.2: output: E0920 10:00:37.381343  208045 "
        f'remote_image.go:171] "PullImage from image service failed" err="rpc error: code = Unknown desc = {quoted}" '
        f'image="registry.k8s.io/kube-proxy:v1.28.2"\ntime="2023-09-20T10:00:37+08:00" level=fatal msg="{quoted}"\n'
        ", error: exit status 1\n"
    )
    problem = errors.failure("init", CommandResult(["kubeadm"], 1, "", text), Problem("old")).problem
    assert problem.found == (
        "kubeadm init: [ERROR ImagePull]: failed to pull image registry.k8s.io/kube-proxy:v1.28.2: "
        "dial tcp 34.96.108.209:443: connect: connection timed out"
    )
    assert "firewall" in problem.remedy


def test_the_kubelet_that_waits_for_an_image_says_so_and_not_that_the_api_is_absent() -> None:
    """Until the API server runs, every kubelet reports that it cannot connect to it."""
    absent = 'E0802 10:00:01.1 890 reflector.go:1] "Failed to watch" err="dial tcp 10.0.0.1:6443: connect: connection refused"\n'
    pull = (
        'E0802 10:00:02.1 890 kuberuntime_sandbox.go:70] "Failed to create sandbox for pod" err="rpc error: code = Unknown desc = '
        'failed to get sandbox image \\"k8s.gcr.io/pause:3.1\\": failed to pull image \\"k8s.gcr.io/pause:3.1\\": dial tcp: lookup '
        'k8s.gcr.io on 10.0.0.1:53: no such host"\n'
    )
    found = errors.parse_kubelet(absent + pull + absent)
    assert found
    assert found.found == (
        "the image k8s.gcr.io/pause:3.1 cannot be pulled: lookup k8s.gcr.io on 10.0.0.1:53: no such host"
    )
    assert "DNS" in found.remedy
    assert "connection refused" in str(errors.parse_kubelet(absent))


def test_the_kubelet_that_exits_has_a_remedy() -> None:
    """Source: github.com/Azure/AKSFlexNode/pull/67."""
    journal = (
        'E0205 10:58:14.917245 12704 run.go:72] "command failed" err="failed to run Kubelet: running with swap on is not supported, '
        'please disable swap or set --fail-swap-on flag to false"\n'
    )
    found = errors.parse_kubelet(journal)
    assert found
    assert found.found.startswith("failed to run Kubelet: running with swap on is not supported")
    assert "swap" in found.remedy


def test_a_service_shows_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str], *_: object) -> CommandResult:
        if argv[0] == "journalctl":
            return CommandResult(argv, 0, SERVICE["containerd's configuration"][0], "")
        return CommandResult(argv, int(argv[1] == "start"), "", "Job for containerd.service failed.\n")

    monkeypatch.setattr(services, "run", run)
    with pytest.raises(MachineProblem, match=r"^containerd does not start: containerd: failed to load TOML") as caught:
        services.start("containerd", "start")
    assert "journalctl -u containerd" in caught.value.problem.remedy
    assert "Main process exited" in caught.value.output
