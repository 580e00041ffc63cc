#!/bin/sh
# The minimal commands to make a node's GPUs available to pods: with bare_join.sh the reference for a GPU join.
# Runs as root on the machine, Debian 13 with containerd 1.7. $1: base URL of the mirror. It checks nothing.
set -eu
mirror=$1

curl -fsS "$mirror/cuda/repos/debian13/x86_64/3bf863cc.pub" >/etc/apt/keyrings/cuda.asc
curl -fsS "$mirror/libnvidia-container/gpgkey" >/etc/apt/keyrings/toolkit.asc
cat >/etc/apt/sources.list.d/nvidia.list <<END
deb [signed-by=/etc/apt/keyrings/cuda.asc] $mirror/cuda/repos/debian13/x86_64/ /
deb [signed-by=/etc/apt/keyrings/toolkit.asc] $mirror/libnvidia-container/stable/deb/amd64/ /
END
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -qq -y --no-install-recommends "$@" >/dev/null; }
apt-get update -qq
install nvidia-driver-pinning-580 "linux-headers-$(uname -r)"
install nvidia-open-580 nvidia-container-toolkit
apt-mark hold nvidia-open-580 nvidia-container-toolkit >/dev/null
modprobe -a nvidia nvidia-uvm
systemctl enable -q --now nvidia-persistenced

mkdir -p /etc/containerd/certs.d/nvcr.io
printf '[host."%s"]\n  capabilities = ["pull", "resolve"]\n' "$mirror" >/etc/containerd/certs.d/nvcr.io/hosts.toml
nvidia-ctk --quiet runtime configure --runtime=containerd --config-source=file --cdi.enabled \
  --config=/etc/containerd/config.toml --drop-in-config=/etc/containerd/conf.d/99-nvidia.toml
nvidia-ctk --quiet cdi generate --output=/var/run/cdi/nvidia.yaml
systemctl restart containerd
