#!/usr/bin/env bash
# Install the missing Debian packages that development and the lab need; `system-packages.sh tests`: those of tests alone.
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
# Some tests need a program that nobody needs otherwise, and are skipped without it: the page of a report is opened in
# Chromium, promtool (in the package prometheus) reads metrics and rules, zsh and man read the files for them, nft loads
# rules in network namespaces.
if [[ ${1-} == tests ]]; then
    packages=(chromium man-db nftables openssl prometheus zsh)
fi
# Debian starts and enables what it installs, but the tests run their own SSH servers, and no Prometheus.
declare -A service=([openssh-server]=ssh [prometheus]=prometheus)

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
        [[ ${1-} == tests ]] && exit 0
        exit 1
    fi
    as_root=(sudo)
fi

unwanted=()
for package in "${missing[@]}"; do
    [[ -z ${service[$package]-} ]] || unwanted+=("${service[$package]}")
done

# Packages ask this program before they start a service (policy-rc.d of Debian's init-system-helpers).
policy=/usr/sbin/policy-rc.d
if ((${#unwanted[@]})) && [[ ! -e $policy ]]; then
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
    "${as_root[@]}" sh -c 'cat >"$1" && chmod 755 "$1"' sh "$policy" <<POLICY
#!/bin/sh
# Of the setup of gpunodes, which removes it.
for name in ${unwanted[*]}; do
    case \$1 in "\$name" | "\$name".*) exit 101 ;; esac
done
POLICY
fi

echo "setup: installing Debian packages: ${missing[*]}"
install() {
    "${as_root[@]}" apt-get update -q &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
}
if [[ ${1-} != tests ]]; then
    install
elif ! install; then
    echo "setup: without these packages some tests are skipped: ${missing[*]}" >&2
    exit 0
fi

for name in "${unwanted[@]}"; do
    command -v systemctl >/dev/null || break
    # Not every service has both units, and none has to be running.
    for unit in "$name.socket" "$name.service"; do
        "${as_root[@]}" systemctl disable --quiet "$unit" 2>/dev/null || true
        [[ ! -d /run/systemd/system ]] || "${as_root[@]}" systemctl stop --quiet "$unit" 2>/dev/null || true
    done
    echo "setup: the service $name is installed for the tests only, and disabled"
done
