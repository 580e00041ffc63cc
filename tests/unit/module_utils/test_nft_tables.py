"""The kernel's tables of nftables, deleted without its program, in a network namespace of this test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

NAMESPACE = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])]
# NFT_MSG_NEWTABLE with NLM_F_CREATE: an existing table is no error, so that it says nothing of what is there.
SETUP = """
import errno, json
from gpunodes.ansible.module_utils import firewall, nft_tables

def make(family, name):
    try:
        code = nft_tables._ask(nft_tables._batch(10 << 8, 0x405, family, name))
    except OSError as error:
        code = error.errno
    if code:
        raise SystemExit(77)
"""


def in_namespace(script: str) -> Any:
    """Run a script in a network namespace; its output."""
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a network namespace needs root, or unprivileged user namespaces")
    argv = [*NAMESPACE, sys.executable, "-c", SETUP + script]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("this kernel, or this container's rights, have no nftables: there is nothing to delete")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_table_is_deleted_once() -> None:
    found = in_namespace("""
make("inet", "a-table"), make("ip", "a-table")
print(json.dumps([nft_tables.delete("inet", "a-table"), nft_tables.delete("inet", "a-table"),
                  nft_tables.delete("ip6", "a-table"), nft_tables.delete("ip", "a-table")]))
""")
    assert found == [True, False, False, True]


def test_a_reset_removes_the_tables_of_kubernetes_and_its_add_ons() -> None:
    """That of network-policy, too: it asks a program that has ended about each packet."""
    found = in_namespace("""
ours = [("inet", "kube-network-policies"), ("ip", "kube-proxy"), ("ip6", "flannel-ipv6"), ("inet", "cni_hostport")]
for each in ours:
    make(*each)
make("inet", "mine")
firewall.clean()
print(json.dumps([[nft_tables.delete(*each) for each in ours], nft_tables.delete("inet", "mine")]))
""")
    assert found == [[False] * 4, True]


def test_without_the_right_to_do_it_the_kernel_refuses() -> None:
    found = in_namespace("""
import os
make("ip", "a-table")
try:
    os.setuid(65534)
except OSError:
    raise SystemExit(77)
try:
    nft_tables.delete("ip", "a-table")
    print(json.dumps(0))
except OSError as error:
    print(json.dumps(error.errno == errno.EPERM))
""")
    assert found is True
