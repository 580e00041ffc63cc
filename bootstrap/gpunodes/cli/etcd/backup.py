"""gpunodes etcd backup"""

from __future__ import annotations

from pathlib import Path

import click

from gpunodes.cli import options, terminal
from gpunodes.errors import ExitCode, WrongInput
from gpunodes.operations import checked
from gpunodes.operations.etcd import backup, timer
from gpunodes.views import document


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The new file; by default gpunodes-backup-CLUSTER-TIME.tar in the current folder.",
)
@click.option(
    "--encrypt-to",
    "recipient",
    metavar="RECIPIENT",
    default="",
    help="Encrypt the file with age to age1... or an SSH public key, or with gpg to the fingerprint of an OpenPGP key.",
)
@click.option(
    "--keep",
    type=options.Whole(1),
    metavar="NUMBER",
    help="Afterwards delete all but so many backups of this cluster in the current folder.",
)
@options.inventory_option
@options.json_option
def command(output: Path | None, recipient: str, keep: int | None, inventory_path: Path, as_json: bool) -> int:
    """Back the cluster up into one file.

    The file has a snapshot of etcd, the certificate authorities with their keys, the encryption key of Secrets and the
    audit policy. A user who reads it controls the cluster: it has mode 0600; keep it as you keep root's passwords. The
    first control plane that responds makes the snapshot. The cluster keeps running.
    """
    if keep and output:
        raise WrongInput("--keep with --output", "backups of one folder, by their own names", "leave one out")
    saved = backup.run(checked.inventory(inventory_path, checked.Needs.CLUSTER), output, recipient, terminal.progress)
    deleted = timer.prune(saved.path.parent, saved.path.name, keep) if keep else []
    about = saved.backup.about
    if as_json:
        terminal.echo(
            document.dump(
                {
                    "schema": "gpunodes.etcd-backup/1",
                    "path": str(saved.path),
                    "machine": saved.machine,
                    "size": saved.size,
                    "encrypted": bool(recipient),
                    "about": about,
                    "parts": [
                        {"name": part.name, "size": part.size, "sha256": part.sha256} for part in saved.backup.parts
                    ],
                    "deleted": [str(path) for path in deleted],
                }
            )
        )
        return ExitCode.DONE
    etcd = about["etcd"]
    terminal.line(f"{saved.path}: {saved.size >> 10} KiB, {etcd['keys']} keys at revision {etcd['revision']}")
    for path in deleted:
        terminal.line(f"deleted {path}")
    return ExitCode.DONE
