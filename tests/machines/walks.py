"""The commands of docs/walkthroughs, line by line, on machines of the lab.

kubectl runs on the control plane, with the files of examples/.
"""

from __future__ import annotations

import base64
import io
import re
import shlex
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from gpunodes.errors import ExitCode
from gpunodes.inventory import Inventory

from .conftest import CHECKOUT, LabSpec, Operator

LAB = LabSpec("debian13", workers=1, gpu_workers=1)
PAGES = CHECKOUT / "docs" / "walkthroughs"
GUIDE = "kubernetes-gpu-guide"
"""The page of test_walkthrough_guide.py."""
EXPECTED = {
    GUIDE: ("gpunodes init-master", "gpunodes gpu plan", "gpunodes join", "gpunodes gpu verify", "kubectl apply"),
    "acs-engine": (
        "gpunodes preflight",
        "gpunodes gpu plan",
        "gpunodes up",
        "gpunodes gpu verify",
        "gpunodes kubeconfig",
        "kubectl --kubeconfig acs",
    ),
    "aks-engine": ("gpunodes up", "gpunodes gpu verify", "kubectl apply"),
    "cdk": ("gpunodes preflight", "gpunodes up", "gpunodes gpu verify", "gpunodes kubeconfig"),
    "cdk-tensorflow": (
        "gpunodes up",
        "gpunodes storage up",
        "gpunodes kubeconfig --user alice",
        "kubectl --kubeconfig alice",
    ),
}
"""Beginnings of commands that the pages have: of a page in another form no line would be run."""
OTHERS = tuple(EXPECTED)[1:]
"""Those of test_walkthroughs.py, in their order."""
MACHINES = {"10.0.0.1": "control-1", "10.0.0.2": "gpu-1", "10.0.0.3": "worker-1"}
"""The machines of the lab for the addresses of the guide."""
FILES = "/run/walk"
"""Where the control plane has examples/."""
UP_LIMIT_S = 3000.0


def commands(page: str, text: str = "") -> list[list[str]]:
    """The command lines in the code blocks of a page, without comments; ``text`` in place of its own."""
    text = text or (PAGES / f"{page}.md").read_text()
    written = re.findall(r"^(?: {4}|\t)\s*(?:\$ )?((?:gpunodes|kubectl) .*)$", text, re.MULTILINE)
    found = re.findall(r"^ {4}((?:gpunodes|kubectl) .*)$", text, re.MULTILINE)
    is_read = found == written and "```" not in text
    assert is_read, f"{page} has commands in another form than lines with four spaces before them"
    missing = [each for each in EXPECTED[page] if not any(line.startswith(each) for line in found)]
    assert not missing, f"{page} lacks {', '.join(missing)}"
    return [shlex.split(line, comments=True) for line in found]


def replaced(operator: Operator, words: list[str]) -> list[str]:
    """A command line with the addresses, the user and the key of the lab."""
    inventory = Inventory(operator.folder / "inventory" / "hosts.yml")
    found = inventory.connection("control-1")
    known = {each: inventory.select([name])[0].address for each, name in MACHINES.items()}
    known |= {"admin": str(found["ansible_user"]), "~/.ssh/id_ed25519": str(found["ansible_ssh_private_key_file"])}
    return [known.get(word, word) for word in words]


def setting(folder: Path, **values: object) -> None:
    """Add settings of all machines to an inventory."""
    path = folder / "inventory" / "group_vars" / "all.yml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))


def send(operator: Operator, name: str, path: Path) -> None:
    """Copy a file or folder to the control plane, into ``FILES``."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        tar.add(path, name, filter=lambda each: None if "__pycache__" in each.name else each)
    text = base64.encodebytes(data.getvalue()).decode()
    operator.ssh("control-1", f"mkdir -p {FILES} && base64 -d <<'END' | tar -C {FILES} -xz\n{text}END")


def kubectl(operator: Operator, *words: str, code: int | None = 0) -> str:
    admin = "KUBECONFIG=/etc/kubernetes/admin.conf"
    return operator.ssh("control-1", f"cd {FILES} && {admin} kubectl {shlex.join(words)}", code)


def follow(operator: Operator, shell: Operator, page: str, done: set[tuple[str, ...]]) -> None:
    """Run the commands of a page as ``shell``, but for those of gpunodes in ``done``; all are noted there."""
    for words in commands(page):
        if words[0] == "kubectl":
            for written in [word for word in words if word.endswith(".kubeconfig")]:
                send(operator, written, shell.folder / written)
            kubectl(operator, *words[1:])
        elif tuple(words) not in done:
            argv = replaced(operator, words[1:])
            alone = argv[:2] == ["gpu", "plan"] and "--user" in argv
            ran = shell.gpunodes(*argv, code=None if alone else 0, limit_s=UP_LIMIT_S)
            if alone:
                planned(ran, argv[2 : argv.index("--user")])
        done.add(tuple(words))


def planned(ran: subprocess.CompletedProcess[str], addresses: Sequence[str]) -> None:
    """Check what `gpu plan` says of machines by their addresses: each was read, and has a plan or what is missing.

    Without an inventory there is no mirror: the plan has the public package sources, which the lab does not reach.
    """
    assert ran.returncode in {ExitCode.DONE, ExitCode.PARTLY, ExitCode.FAILED}, ran.stderr
    for address in addresses:
        [said] = re.findall(rf"^{re.escape(address)}: (.*)$", ran.stdout, re.MULTILINE)
        assert not said.startswith("UNREACHABLE"), said


def job_gets_a_gpu(operator: Operator) -> None:
    """Wait for the end of the example job that a page has applied, and delete it."""
    kubectl(operator, "wait", "--for=condition=Complete", "job/gpu-job", "--timeout=220s")
    assert "NVIDIA-SMI" in kubectl(operator, "logs", "job/gpu-job")
    kubectl(operator, "delete", "job", "gpu-job", "--wait=true")
