"""Makes the package manager and services of a machine use its HTTP proxies."""

from __future__ import annotations

from urllib.parse import urlsplit

from .. import disk, packages
from ..process import run
from ..proxies import Proxies, environment_file, excepted_by
from . import files
from .changes import Changes
from .spec import File

_MARK = "Managed by gpunodes."


def configure(changes: Changes) -> None:
    """Write the files that name the proxies, or remove those of an earlier run where there are none now.

    They come before packages and services: both need them. A service whose files change is restarted later.
    """
    spec = changes.spec
    if spec.packages or spec.repositories:
        path = apt_file(spec.section)
        if spec.proxies is None:
            files.remove(changes, path)
        elif isinstance(packages.detect(), packages.Apt):
            files.write(changes, File(path, for_apt(spec.proxies, _hosts(changes)), mode_of(spec.proxies)))
    for service in spec.services:
        if service.proxied:
            drop_in, variables = drop_in_file(service.name), variables_file(service.name)
            if spec.proxies is None:
                files.remove(changes, drop_in)
                files.remove(changes, variables)
            else:
                # Everybody may read a unit (`systemctl show`). Without the file the service starts all the same.
                files.write(changes, File(variables, for_systemd(spec.proxies), mode_of(spec.proxies)))
                files.write(changes, File(drop_in, f"# {_MARK}\n[Service]\nEnvironmentFile=-{variables}\n"))


def apt_file(section: str) -> str:
    """The path of apt's proxy configuration; each section of the ledger has its own, which is removed with it.

    apt reads the files in alphabetical order, and the last one decides.
    """
    return f"/etc/apt/apt.conf.d/zz-gpunodes{f'-{section}' if section else ''}-proxy"


def drop_in_file(service: str) -> str:
    """The path of the drop-in by which a service reads its proxy variables."""
    return f"/etc/systemd/system/{service}.service.d/30-gpunodes-proxy.conf"


def variables_file(service: str) -> str:
    """The path of the file with the proxy variables of a service."""
    return f"/etc/gpunodes/proxy-{service}.env"


def variables_of(service: str) -> dict[str, str]:
    """The proxy variables of a service, for programs that download for it; {} if it has none."""
    return environment_file(disk.read(variables_file(service)))


def mode_of(proxies: Proxies) -> str:
    """The mode of a file that contains the proxies' URLs."""
    return "0600" if proxies.secret else "0644"


def for_systemd(proxies: Proxies) -> str:
    """The content of a file for EnvironmentFile= (systemd.exec(5))."""
    return f"# {_MARK}\n" + "".join(f'{name}="{value}"\n' for name, value in proxies.environment().items())


def for_apt(proxies: Proxies, hosts: set[str]) -> str:
    """apt's configuration (apt-transport-http(1)); ``hosts`` are those of its package sources.

    apt knows neither domains nor networks as exceptions: each host that is reached directly has its line.
    """
    names = {entry for entry in proxies.no_proxy if not entry.startswith(".") and "/" not in entry}
    direct = sorted(names | set(filter(excepted_by(proxies.no_proxy), hosts)))
    lines = []
    for scheme, url in (("http", proxies.http), ("https", proxies.https)):
        if url:
            lines.append(f'Acquire::{scheme}::Proxy "{url}";\n')
            # In a name of an option "::" separates its parts.
            lines += [f'Acquire::{scheme}::Proxy::{name} "DIRECT";\n' for name in direct if ":" not in name]
    return f"// {_MARK}\n" + "".join(lines)


def _hosts(changes: Changes) -> set[str]:
    """The hosts of the package sources: apt's present ones, and those that this run configures."""
    listing = run(["apt-get", "indextargets", "--format", "$(REPO_URI)"]).out
    urls = [*listing.split(), *(repository.url for repository in changes.spec.repositories)]
    return {host for url in urls if url.startswith(("http://", "https://")) and (host := _host(url))}


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
