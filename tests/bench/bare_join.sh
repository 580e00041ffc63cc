#!/bin/sh
# What a careful person types on one machine to make it a node, and no more: the yardstick for `gpunodes join`.
# Runs as root on the machine. $1: base URL of the mirror, $2: Kubernetes minor; the join command's words come on
# standard input. It checks nothing, records nothing and cannot be run twice.
set -eu
mirror=$1 minor=$2
read -r endpoint token hash

printf 'overlay\nbr_netfilter\n' >/etc/modules-load.d/k8s.conf
modprobe -a overlay br_netfilter
printf 'net.bridge.bridge-nf-call-iptables=1\nnet.bridge.bridge-nf-call-ip6tables=1\nnet.ipv4.ip_forward=1\n' \
  >/etc/sysctl.d/k8s.conf
sysctl -q --system >/dev/null 2>&1
swapoff -a

mkdir -p /etc/apt/keyrings
repository="$mirror/kubernetes/core:/stable:/v$minor/deb/"
curl -fsS "${repository}Release.key" >/etc/apt/keyrings/kubernetes.asc
echo "deb [signed-by=/etc/apt/keyrings/kubernetes.asc] $repository /" >/etc/apt/sources.list.d/kubernetes.list
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends containerd >/dev/null
apt-get install -qq -y --no-install-recommends kubelet kubeadm kubectl >/dev/null
apt-mark hold kubelet kubeadm kubectl >/dev/null

mkdir -p /etc/containerd
containerd config default | sed -e 's/SystemdCgroup = false/SystemdCgroup = true/' \
  -e 's#config_path = ""#config_path = "/etc/containerd/certs.d"#' -e 's#/usr/lib/cni#/opt/cni/bin#' \
  -e 's#sandbox_image = .*#sandbox_image = "registry.k8s.io/pause:3.10.2"#' >/etc/containerd/config.toml
for host in registry.k8s.io ghcr.io docker.io; do
  mkdir -p "/etc/containerd/certs.d/$host"
  printf '[host."%s"]\n  capabilities = ["pull", "resolve"]\n' "$mirror" >"/etc/containerd/certs.d/$host/hosts.toml"
done
systemctl restart containerd
systemctl enable -q kubelet
kubeadm join "$endpoint" --token "$token" --discovery-token-ca-cert-hash "$hash" >/dev/null
