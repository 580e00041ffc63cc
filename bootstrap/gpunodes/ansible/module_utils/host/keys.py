"""The keys of package sources: fetched, and checked against their fingerprints."""

from __future__ import annotations

from .. import openpgp
from ..problem import MachineProblem
from ..proxies import Proxies, opener, within
from .spec import Repository

_LIMIT_S = 30
_WHOLE_S = 60


def checked_key(text: str, repository: Repository) -> str:
    """The key for the repository from the key file ``text``; raises MachineProblem if the file does not contain it.

    If a fingerprint is set, only the key with this fingerprint is returned: an attacker could add another key.
    """
    found = openpgp.fingerprints(text)
    if not found:
        raise MachineProblem(
            f"the key of the package source {repository.name} is not an OpenPGP key",
            "an armoured public key",
            f"check gpunodes_{repository.name}_packages_key",
        )
    wanted = openpgp.only(text, repository.fingerprint) if repository.fingerprint else text
    if not wanted and openpgp.plain(repository.fingerprint) in found:
        raise MachineProblem(
            f"the key of the package source {repository.name} has no signed user id",
            "a key with its user id and a signature",
            f"check for a proxy that changes the key between {repository.url} and this machine",
        )
    if not wanted:
        raise MachineProblem(
            f"the key of the package source {repository.name} has the fingerprint {found[0]}",
            openpgp.plain(repository.fingerprint),
            f"if the source is right, set gpunodes_{repository.name}_packages_fingerprint",
        )
    if not repository.fingerprint and repository.key.startswith("http://"):
        raise MachineProblem(
            f"the key of the package source {repository.name} comes over plain HTTP",
            "a fingerprint to verify it, or the armoured key in the setting",
            f"set gpunodes_{repository.name}_packages_fingerprint",
        )
    return wanted


def fetch(url: str, proxies: Proxies | None = None) -> str:
    """The text at ``url`` (http or https); raises MachineProblem if it cannot be fetched."""
    if not url.startswith(("http://", "https://")):
        raise MachineProblem(f"{url} is not an http or https address", "the address of a key", "correct the setting")

    def read() -> bytes:
        with opener(proxies).open(url, timeout=_LIMIT_S) as response:
            content: bytes = response.read(1 << 20)
            return content

    try:
        data = within(_WHOLE_S, read)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise MachineProblem(f"{url} cannot be fetched: {reason}", "", "check the network and the setting") from error
    return data.decode("ascii", errors="replace")
