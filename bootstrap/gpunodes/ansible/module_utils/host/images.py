"""Container images that are pulled in the background."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from .. import disk, packages
from ..process import CommandResult, run
from ..report import Difference
from .changes import Changes
from .proxies import variables_file, variables_of
from .spec import filled

_UNIT = "gpunodes-images"
"""The beginning of the names of the units that pull images."""
_FETCHES = "/var/lib/containerd/gpunodes-fetches"
"""A file for each image whose pull is in progress; it contains the id of the boot in which the pull began."""
_DROP_LIMIT_S = 300
# A power cut can leave layers with empty files, and content that is listed but missing; containerd never detects either
# (its issues 8895 and 10457). An image whose pull began in an earlier boot and did not finish is therefore deleted,
# under all its names, before anything is pulled: no container runs from it yet. The lease by which a pull holds its
# layers outlives it, for a day: those of earlier boots are deleted first. The clock can have been wrong then, or now;
# a pull whose lease is deleted by mistake fails, and the kubelet repeats it. One such pull runs at a time: a second one
# would take the mark of the first away.
_DROP = f"""
mkdir -p {_FETCHES}
exec 9>>{_FETCHES}/.lock
flock --wait "${{LIMIT_S:-86400}}" 9 || {{ echo "other images are still being pulled" >&2; exit 1; }}
boot=$(cat /proc/sys/kernel/random/boot_id)
mark() {{ echo {_FETCHES}/$(echo "$1" | tr / _); }}
interrupted() {{ [ -e "$(mark "$1")" ] && [ "$(cat "$(mark "$1")")" != "$boot" ]; }}
utc() {{ date --utc --date="$1" +%FT%TZ; }}
broken=
for name; do
    ! interrupted "$name" || broken="$broken $name"
done
if [ "$broken" ]; then
    leases=$(TZ=UTC ctr --namespace k8s.io leases ls)
    began=$(utc "@$(awk '/^btime/ {{print $2}}' /proc/stat)")
    for lease in $(echo "$leases" | awk -v began="$began" -v ahead="$(utc '10 minutes')" \
        '/gc.expire=/ && ($2 < began || $2 > ahead) {{print $1}}'); do
        ctr --namespace k8s.io leases rm --sync "$lease" || :
    done
fi
for name in $broken; do
    digest=$(ctr --namespace k8s.io images ls "name==$name" | awk 'NR == 2 {{print $3}}')
    [ -z "$digest" ] ||
        ctr --namespace k8s.io images rm --sync $(ctr --namespace k8s.io images ls --quiet "target.digest==$digest")
    for content in $(ctr --namespace k8s.io content ls --quiet); do
        [ -e "/var/lib/containerd/io.containerd.content.v1.content/blobs/$(echo "$content" | tr : /)" ] ||
            ctr --namespace k8s.io content rm "$content"
    done
done
begin() {{ echo "$boot" >"$(mark "$1")"; sync "$(mark "$1")"; }}
"""
# Of a pull that fails, containerd deletes the layers.
_FETCH = (
    _DROP
    + """
failed=0
for name; do
    begin "$name"
    ${LIMIT_S:+timeout "$LIMIT_S"} ctr --namespace k8s.io images pull --hosts-dir /etc/containerd/certs.d "$name" ||
        failed=$?
    sync --file-system /var/lib/containerd
    rm -f "$(mark "$name")"
done
exit $failed"""
)


def fetch(changes: Changes) -> None:
    """Start pulling the images after a change, and those whose pull was interrupted."""
    versions = {f"{{{name}}}": packages.upstream(version) for name, version in changes.versions.items()}
    images = [filled(name, versions) for name in changes.spec.images]
    if broken := [name for name in images if was_interrupted(name)]:
        difference = Difference("images", dict.fromkeys(broken, "interrupted"), dict.fromkeys(broken, "complete"))
        changes.step(f"fetch {', '.join(broken)} again", difference)
    if not changes.check:
        changes.save()
        if changes.actions:
            start_fetching(images)


def was_interrupted(name: str) -> bool:
    """Whether an earlier boot began to pull an image and did not finish: the image may contain empty files."""
    mark = disk.read(_mark(name))
    return mark is not None and mark.strip() != (disk.read("/proc/sys/kernel/random/boot_id") or "").strip()


def start_fetching(names: Sequence[str]) -> None:
    """Start pulling images in the background; the kubelet pulls those that are still missing when it needs them."""
    if names:
        unit = [
            f"--unit={_UNIT}-{os.getpid()}",
            "--property=BindsTo=containerd.service",
            "--property=Nice=10",
            # Before containerd 2.0 ctr itself pulls.
            f"--property=EnvironmentFile=-{variables_file('containerd')}",
        ]
        run(["systemd-run", "--quiet", "--collect", *unit, "sh", "-c", f"{{ {_FETCH}\n}} >/dev/null", "sh", *names])


def fetching() -> bool:
    """Whether images are being pulled in the background."""
    listing = ["systemctl", "list-units", "--all", "--plain", "--no-legend", f"{_UNIT}-*"]
    return bool(run(listing).out.strip())


def lister() -> Callable[[str], bool]:
    """A function that tells whether containerd has an image, and its pull was completed; it has none if it is off."""
    # To look for deprecations ctr asks containerd for more than names, and that gives the machine an id (prepared.IDS).
    quiet = {"CONTAINERD_SUPPRESS_DEPRECATION_WARNINGS": "true"}
    listing = run(["ctr", "--namespace", "k8s.io", "images", "ls", "--quiet"], 60, environment=quiet)
    names = set(listing.out.split())
    return lambda name: name in names and disk.read(_mark(name)) is None


def pull(name: str, limit_s: float) -> CommandResult:
    """Pull an image as the background does, after it, and wait for it."""
    return _script(_FETCH, name, limit_s)


def begin(name: str) -> CommandResult:
    """Note that an image is about to be loaded in another way; delete what a power cut left of an earlier attempt."""
    return _script(f'{_DROP}\nfor name; do begin "$name"; done', name, _DROP_LIMIT_S)


def _script(script: str, name: str, limit_s: float) -> CommandResult:
    # Before containerd 2.0 ctr itself pulls. It is ended before the shell is: it would go on, with the machine's lock.
    environment = {**variables_of("containerd"), "LIMIT_S": f"{max(1, limit_s - 10):.0f}"}
    return run(["sh", "-c", f"{{ {script}\n}} >/dev/null", "sh", name], limit_s, environment=environment)


def complete(name: str) -> None:
    """Note that an image is on the disk that was pulled or loaded in another way."""
    run(["sync", "--file-system", "/var/lib/containerd"])
    disk.remove(_mark(name))


def _mark(name: str) -> str:
    """The file that marks an image while its pull is in progress."""
    return f"{_FETCHES}/{name.replace('/', '_')}"
