"""The device plugin's objects on a real API server, and its configuration read by the real plugin.

The plugin's program is that of the lab's stand-in. It finds no GPU here: what it offers to a kubelet is not tested.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpunodes.ansible.module_utils import devices, kubeconfig
from gpunodes.ansible.module_utils.cluster import objects

from tests.unit.test_gpu_sharing import rendered

from . import apiserver
from .addon_programs import program


def test_the_objects_are_accepted_and_applied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with apiserver.running(tmp_path) as server:
        monkeypatch.setattr(kubeconfig, "ADMIN", str(server.kubeconfig))
        wanted = list(rendered("time-slicing-2", "mps-4", "mig-3g.40gb-1-1g.10gb-4").values())
        assert len(objects.apply(wanted, check=False)[0]) == 9
        assert objects.apply(wanted, check=False)[0] == []
        plugins = server.call("GET", "/apis/apps/v1/namespaces/kube-system/daemonsets")["items"]
        assert len(plugins) == 5


def plugin_output(made: dict[tuple[str, str], dict[str, Any]], label: str, config: str, folder: Path) -> str:
    """What the real plugin writes when it starts with a configuration and the environment of its DaemonSet."""
    plugin = program("k8s-device-plugin", "nvidia-device-plugin")
    [container] = made["DaemonSet", f"nvidia-device-plugin-{label}"]["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if each["name"] == "MPS_ROOT"}
    file = folder / "config.yaml"
    file.write_text(config)
    # The plugin watches a folder with a fixed path.
    script = 'mount -t tmpfs tmpfs /var/lib && mkdir -p /var/lib/kubelet/device-plugins && exec "$0"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, str(plugin)],
        env={**os.environ, **given, "CONFIG_FILE": str(file)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="the plugin's folder is made in a mount namespace")
@pytest.mark.parametrize("mode", devices.MODES)
@pytest.mark.parametrize("replicas", [1, 4])
def test_the_real_plugin_reads_the_configuration_and_has_the_same_limit(
    tmp_path: Path, replicas: int, mode: str
) -> None:
    made = rendered(f"{mode}-4")
    config = made["ConfigMap", f"nvidia-device-plugin-{mode}-4"]["data"]["config.yaml"]
    found = plugin_output(made, f"{mode}-4", config.replace("replicas: 4", f"replicas: {replicas}"), tmp_path)
    if replicas > 1:
        assert '"replicas": 4' in found, found
    else:
        assert "number of replicas must be >= 2" in found


@pytest.mark.skipif(os.geteuid() != 0, reason="the plugin's folder is made in a mount namespace")
@pytest.mark.parametrize(("label", "strategy"), [("mig-1g.10gb-7", "single"), ("mig-3g.40gb-1-1g.10gb-4", "mixed")])
def test_the_real_plugin_reads_the_strategy_for_mig(tmp_path: Path, label: str, strategy: str) -> None:
    made = rendered(label)
    config = made["ConfigMap", f"nvidia-device-plugin-{label}"]["data"]["config.yaml"]
    assert f'"migStrategy": "{strategy}"' in plugin_output(made, label, config, tmp_path)
