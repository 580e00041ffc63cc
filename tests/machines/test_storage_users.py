"""Notebooks and the registry on shared storage, on machines: the control plane serves the folder that has their files.

Not run yet.
"""

from __future__ import annotations

from . import notebook_image, shares
from .conftest import Operator, search_for_secrets
from .shares import FOLDER, MACHINES, WORKERS

LAB = shares.LAB


def test_a_folder_is_served(operator: Operator) -> None:
    shares.serve_from(operator, "control-1")
    operator.gpunodes("storage", "up")


def test_a_notebook_finds_its_home_again(operator: Operator) -> None:
    """On NFS with root_squash, with the restrictions of Pod Security, reached over SSH and the kubelet."""
    for worker in WORKERS:
        notebook_image.load(operator, worker)
    operator.kubectl("label", "namespace", "default", "pod-security.kubernetes.io/enforce=restricted")
    up = ("jupyter", "up", "--gpus", "0", "--cpus", "1", "--memory", "1", "--image", notebook_image.NAME)
    token = str(operator.document(*up)["token"])
    assert operator.document("jupyter", "up")["token"] == ""
    assert "a cell ran" in operator.gpunodes("jupyter", "verify").stdout
    assert operator.ssh("control-1", f"stat -c '%U %a' {FOLDER}/jupyter-notebook.default").strip() == "nobody 1777"
    written = ("exec", "deployment/jupyter-notebook", "--", "python3", "-c", "open('/home/jovyan/kept', 'w')")
    operator.kubectl(*written)
    # The first character in brackets: the search does not find itself.
    search = f"grep -asl '[{token[0]}]{token[1:]}' /proc/[0-9]*/cmdline /proc/[0-9]*/environ || true"
    assert not any(operator.each(MACHINES, search).values()), "the token is in no process's arguments or environment"
    assert "its home stays" in operator.gpunodes("jupyter", "down", "--yes").stdout
    kinds = "all,secrets,networkpolicies"
    assert operator.kubectl("get", kinds, "-l", "gpunodes.dev/notebook", "-o", "name").strip() == ""
    assert operator.document(*up)["token"] not in ("", token)
    assert "kept" in operator.kubectl(*written[:3], "python3", "-c", "import os; print(os.listdir('/home/jovyan'))")
    operator.gpunodes("jupyter", "down", "--yes")
    operator.kubectl("label", "namespace", "default", "pod-security.kubernetes.io/enforce-")
    operator.ssh("control-1", f"rm -r {FOLDER}/jupyter-notebook.default")


def test_every_node_pulls_from_a_registry_on_the_share(operator: Operator) -> None:
    """Its own image comes from the mirror. containerd is not restarted for its CA."""
    runtime = "systemctl show --property=ExecMainStartTimestampMonotonic containerd"
    before = operator.each(MACHINES, runtime)
    made = operator.document("registry", "up")
    address, password = str(made["address"]), str(made["password"])
    assert password
    pulled = operator.document("registry", "verify")["nodes"]
    assert {each["node"]: each["problem"] for each in pulled} == dict.fromkeys(MACHINES, "")
    again = operator.document("registry", "up")
    assert (again["password"], again["changed"]) == ("", [])
    assert {each["outcome"] for each in again["run"]["machines"]} == {"unchanged"}
    assert operator.each(MACHINES, runtime) == before
    assert operator.ssh("control-1", f"stat -c '%U %a' {FOLDER}/gpunodes-registry").strip() == "nobody 1777"
    # The first character in brackets: the search does not find itself.
    search = (
        f"grep -asl '[{password[0]}]{password[1:]}' /proc/[0-9]*/cmdline /proc/[0-9]*/environ || true; "
        f"journalctl --no-pager | grep -c '[{password[0]}]{password[1:]}' | grep -v '^0$' || true"
    )
    assert not any(operator.each(MACHINES, search).values()), "the password is in no argument and in no log"
    # The same way as a machine that joins later.
    trusted = f"/etc/containerd/certs.d/{address}"
    operator.ssh("worker-2", f"rm -r {trusted}")
    operator.gpunodes("join", "worker-2")
    assert operator.ssh("worker-2", f"ls {trusted}").split() == ["ca.crt", "hosts.toml"]
    operator.gpunodes("registry", "login", address)
    assert operator.document("registry", "status")["namespaces"] == ["default", "gpunodes-registry"]
    refused = operator.gpunodes("storage", "down", "--yes", code=1).stderr
    assert "gpunodes-registry/registry-" in refused


def test_a_registry_that_is_taken_away_leaves_its_images(operator: Operator) -> None:
    down = operator.document("registry", "down", "--yes")
    assert down["folder"].endswith(f":{FOLDER}/gpunodes-registry")
    assert "docker" in operator.ssh("control-1", f"ls {FOLDER}/gpunodes-registry"), "images are never removed"
    assert operator.kubectl("get", "pv,secrets", "-A", "-o", "name").count("registry") == 0
    assert not any(operator.each(MACHINES, "ls /etc/containerd/certs.d | grep :5000 || true").values())
    assert operator.gpunodes("registry", "down", "--yes").stdout.strip() == "the cluster has no registry"
    operator.ssh("control-1", f"rm -r {FOLDER}/gpunodes-registry")


def test_no_secret_leaks(operator: Operator) -> None:
    search_for_secrets(operator, MACHINES)
