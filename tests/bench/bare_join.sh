#!/bin/sh
# The minimal commands to join a machine to a cluster: the reference for `gpunodes join`.
# Runs as root on the machine. $1: base URL of the mirror, $2: Kubernetes minor; standard input: API server endpoint,
# token and CA hash of the join command. It checks nothing, records nothing and cannot be run twice.
set -eu
mirror=$1 minor=$2
read -r endpoint token hash

printf 'overlay\nbr_netfilter\n' >/etc/modules-load.d/k8s.conf
modprobe -a overlay br_netfilter
printf 'net.bridge.bridge-nf-call-iptables=1\nnet.bridge.bridge-nf-call-ip6tables=1\nnet.ipv4.ip_forward=1\n' \
  >/etc/sysctl.d/k8s.conf
sysctl -q -p /etc/sysctl.d/k8s.conf
swapoff -a

mkdir -p /etc/apt/keyrings
repository="$mirror/kubernetes/core:/stable:/v$minor/deb/"
curl -fsS "${repository}Release.key" >/etc/apt/keyrings/kubernetes.asc
echo "deb [signed-by=/etc/apt/keyrings/kubernetes.asc] $repository /" >/etc/apt/sources.list.d/kubernetes.list
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends containerd kubelet kubeadm cri-tools conntrack ethtool iptables >/dev/null
apt-mark hold containerd kubelet kubeadm >/dev/null

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
cat >/run/join.yml <<END
apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
discovery:
  bootstrapToken: {token: "$token", apiServerEndpoint: "$endpoint", caCertHashes: ["$hash"]}
timeouts: {kubernetesAPICall: 5m0s}
END
join() { kubeadm join --config /run/join.yml >/dev/null; }
# kubeadm waits only two seconds for a container runtime that has just started.
join || { sleep 5 && join; }
