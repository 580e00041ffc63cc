#!/usr/bin/env bash
# Install the Debian packages that development, the tests and the lab need, when they are missing.
#
# The list is small for building the Python environment (below); what the lab's virtual machines need stands in
# gpunodes/lab/system-packages.txt, which `gpunodes lab` reads too. Says what it does; with nothing missing it does
# nothing and asks nobody's password.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

# The environment: venv, and a compiler with headers for libvirt's Python binding, which comes as source only.
# The tests and benchmarks of the health sweep run SSH servers of their own. They log in with the shells that people
# have, and let apt's own program judge signatures.
packages=(python3-venv python3-dev gcc pkg-config libvirt-dev git openssh-client openssh-server fish tcsh sudo gpgv)
list=$here/gpunodes/lab/system-packages.txt
if [[ -r $list ]]; then
    mapfile -t -O "${#packages[@]}" packages < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' "$list")
fi

if ! command -v dpkg-query >/dev/null; then
    echo "setup: this is not a Debian system; its own packages have to provide: ${packages[*]}" >&2
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
        echo "setup: packages are missing, and neither root nor sudo is here; as root: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "setup: installing Debian packages: ${missing[*]}"
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
# Debian starts what it installs, and the tests' servers are not meant to be this machine's.
if [[ -d /run/systemd/system && " ${missing[*]} " == *" openssh-server "* ]]; then
    "${as_root[@]}" systemctl disable --quiet --now ssh.socket ssh.service || true
    echo "setup: the SSH server is there for the tests alone, and neither enabled nor running"
fi
