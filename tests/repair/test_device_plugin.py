"""The device plugin's objects on a real API server, and its configuration read by the real plugin.

The plugin's program is that of the lab's stand-in, if its cache has it. It finds no GPU here: what it offers to a
kubelet is not tested.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from gpunodes.ansible.module_utils import kubeconfig
from gpunodes.ansible.module_utils.cluster import objects
from gpunodes.lab.layout import cache_dir

from tests.unit.test_gpu_sharing import rendered

from . import apiserver


def test_the_objects_are_accepted_and_applied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with apiserver.running(tmp_path) as server:
        monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))
        wanted = list(rendered(2, 4).values())
        assert len(objects.apply(wanted, check=False)[0]) == 6
        assert objects.apply(wanted, check=False)[0] == []
        plugins = server.call("GET", "/apis/apps/v1/namespaces/kube-system/daemonsets")["items"]
        assert len(plugins) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="the plugin's folder is made in a mount namespace")
@pytest.mark.parametrize("replicas", [1, 4])
def test_the_real_plugin_reads_the_configuration_and_has_the_same_limit(tmp_path: Path, replicas: int) -> None:
    programs = sorted((cache_dir() / "standin").glob("k8s-device-plugin-*/nvidia-device-plugin"))
    if not programs:
        pytest.skip("the lab's cache has no device plugin")
    config = rendered(4)["ConfigMap", "nvidia-device-plugin-time-slicing-4"]["data"]["config.yaml"]
    file = tmp_path / "config.yaml"
    file.write_text(config.replace("replicas: 4", f"replicas: {replicas}"))
    # The plugin watches a folder with a fixed path.
    script = 'mount -t tmpfs tmpfs /var/lib && mkdir -p /var/lib/kubelet/device-plugins && exec "$0"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, str(programs[-1])],
        env={**os.environ, "CONFIG_FILE": str(file)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if replicas > 1:
        assert '"replicas": 4' in done.stderr, done.stderr
    else:
        assert "number of replicas must be >= 2" in done.stderr
