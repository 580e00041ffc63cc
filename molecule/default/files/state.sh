#!/bin/sh
# Prints everything that gpunodes may change on a machine, as comparable lines. Needs root.
set -eu
export LC_ALL=C
cd /
echo '# packages, with their holds'
dpkg-query --show --showformat '${db:Status-Abbrev} ${Package} ${Version}\n'
echo '# files and folders'
find etc opt usr/local var/lib -xdev \
    \( -path var/lib/apt -o -path var/lib/dpkg -o -path var/lib/systemd -o -path var/lib/private \
    -o -path etc/resolv.conf -o -path etc/ld.so.cache \) -prune -o -printf '%y %m %u:%g %p %l\n' | sort
echo '# contents'
# group- and similar files are the system's backups of earlier states.
find etc opt usr/local -xdev -type f ! -path etc/resolv.conf ! -path etc/ld.so.cache \
    ! -path etc/group- ! -path etc/gshadow- ! -path etc/passwd- ! -path etc/shadow- -exec sha256sum {} + | sort -k 2
echo '# kernel modules and settings'
for module in overlay br_netfilter nouveau nvidia nvidia_uvm; do
    if [ -d /sys/module/$module ]; then echo "$module"; fi
done
sysctl net.ipv4.ip_forward
echo '# swap'
awk 'NR > 1 { print $1 }' /proc/swaps
echo '# links, mounts and sockets'
ip -o link | cut -d ' ' -f 2
findmnt --noheadings --raw --output TARGET | grep -v -e '^/proc' -e '^/sys' -e '^/dev' | sort
ls -d /run/containerd /run/gpunodes* 2>/dev/null || true
