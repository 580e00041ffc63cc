#!/bin/sh
# kubeadm's documented steps to upgrade a worker, without its drain: the reference for `gpunodes upgrade`. Source:
# kubernetes.io, "Upgrading Linux nodes". Runs as root on the machine. $1: base URL of the mirror, $2: the minor.
# It checks nothing, records nothing, and does not pull the images before the drain.
set -eu
mirror=$1 minor=$2
export DEBIAN_FRONTEND=noninteractive
sources=$(grep -rl /kubernetes/ /etc/apt/sources.list.d)
sed -i "s#:/v1\.[0-9]*/deb#:/v$minor/deb#" $sources
apt-get update -qq
held=$(apt-mark showhold | grep -e ^kube -e ^cri-tools)
apt-mark unhold $held >/dev/null
apt-get install -qq -y "kubeadm=$minor.*" >/dev/null
kubeadm upgrade node >/dev/null
apt-get install -qq -y "kubelet=$minor.*" >/dev/null
apt-mark hold $held >/dev/null
systemctl daemon-reload
systemctl restart kubelet
