#!/usr/bin/env bash
# Install the missing Debian packages that development, the tests and the lab need.
#
# The list below is for the Python environment and the tests; gpunodes/lab/system-packages.txt, which `gpunodes lab`
# reads as well, has the packages of the lab. If no package is missing, the script does nothing and needs no password.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

# Python environment: venv, and a compiler with headers for libvirt's Python binding, which is a source package only.
# The tests and benchmarks of `gpunodes health` run SSH servers, log in with common shells, and verify signatures with
# apt's gpgv.
packages=(python3-venv python3-dev gcc pkg-config libvirt-dev git openssh-client openssh-server fish tcsh sudo gpgv)
list=$here/gpunodes/lab/system-packages.txt
if [[ -r $list ]]; then
    mapfile -t -O "${#packages[@]}" packages < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' "$list")
fi

if ! command -v dpkg-query >/dev/null; then
    echo "setup: this is not a Debian system; install the equivalents of these packages: ${packages[*]}" >&2
    exit 0
fi

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null || true)
    [[ $status == installed ]] || missing+=("$package")
done
((${#missing[@]})) || exit 0

as_root=()
if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
        echo "setup: packages are missing and sudo is not installed; as root run: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "setup: installing Debian packages: ${missing[*]}"
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
# Debian enables and starts installed services, but the tests start their own SSH servers.
if [[ -d /run/systemd/system && " ${missing[*]} " == *" openssh-server "* ]]; then
    "${as_root[@]}" systemctl disable --quiet --now ssh.socket ssh.service || true
    echo "setup: the SSH server is installed for the tests only; its service is disabled and stopped"
fi
