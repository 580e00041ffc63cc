"""`etcd backup`: the exchange with the machine, the file, and that nothing half-made ever has its name."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gpunodes import clusters
from gpunodes.ansible.module_utils import containers, etcd_backup, etcd_snapshot, etcdctl, kubeconfig, static_pod_files
from gpunodes.ansible.module_utils.problem import MachineProblem
from gpunodes.ansible.module_utils.process import CommandResult
from gpunodes.cli import root
from gpunodes.engine import encryption
from gpunodes.engine.remote import stream
from gpunodes.errors import ExitCode, GpunodesError, WrongInput
from gpunodes.inventory import Inventory
from gpunodes.model import printable
from gpunodes.operations.etcd import archive, backup, timer

from tests import command
from tests.hostile import ATTACKS, CANARY, unprintable
from tests.unit import etcd_member
from tests.unit.etcd_member import needs_etcd
from tests.unit.operations.test_etcd_archive import ABOUT, snapshot

PARTS = {archive.SNAPSHOT: snapshot(), "pki/ca.key": b"-----BEGIN KEY-----"}
_PROGRAM = """
import json, sys
out = sys.stdout.buffer
print("Welcome"); print(); print("gpunodes-answer-follows"); sys.stdout.flush()
sys.stdin.readline()
{body}
"""


def sent(parts: Mapping[str, bytes] = PARTS, **changes: Any) -> str:
    """What the program on the machine writes, as a Python program."""
    head = {"parts": [{"name": name, "size": len(data)} for name, data in parts.items()], "about": ABOUT}
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}
    whole = json.dumps({**head, **changes.get("head", {})}).encode() + b"\n" + b"".join(parts.values())
    whole += json.dumps({"sha256": changes.get("sums", sums)}).encode() + b"\n"
    return f"out.write({whole[: changes.get('cut')]!r}); out.flush()"


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hosts.yml"
    path.write_text("control_plane: {hosts: {control-1: {ansible_host: 10.0.0.1}, control-2: {}}}\n")
    return Inventory(path)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The programs that machines run in the place of the one that is sent, by machine; none: it does not respond."""
    bodies: dict[str, str] = {}

    def started(machine: str, *_: Any) -> stream.Stream:
        body = bodies.get(machine, "sys.exit('ssh: connect to host: No route to host')")
        # Not an argument: those are limited to 128 KiB.
        program = tmp_path / f"{machine}.py"
        program.write_text(_PROGRAM.format(body=body))
        return stream.Stream(machine, [sys.executable, str(program)], b"\n")

    monkeypatch.setattr(stream, "over_ssh", started)
    return bodies


def run(inventory: Inventory, name: str = "b.tar", recipient: str = "") -> backup.Saved:
    return backup.run(inventory, Path(name), recipient, lambda _: None)


def left(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if "tar" in each.name)


def test_a_backup_is_a_private_file_that_can_be_read(
    inventory: Inventory, machines: dict[str, str], tmp_path: Path
) -> None:
    machines["control-1"] = sent()
    umask = os.umask(0)
    try:
        saved = run(inventory)
    finally:
        os.umask(umask)
    assert left(tmp_path) == ["b.tar"]
    assert stat.S_IMODE(saved.path.stat().st_mode) == 0o600
    assert saved.size == saved.path.stat().st_size
    with saved.path.open("rb") as file:
        assert archive.check(file, "b.tar") == saved.backup


def test_the_first_control_plane_that_responds_is_used(inventory: Inventory, machines: dict[str, str]) -> None:
    machines["control-2"] = sent()
    assert run(inventory).machine == "control-2"


def test_a_control_plane_of_another_cluster_makes_no_backup(
    inventory: Inventory, machines: dict[str, str], tmp_path: Path
) -> None:
    """Under this cluster's name it would replace good backups, night after night."""
    other = {"about": {**ABOUT, "ca_hash": f"sha256:{'1' * 64}"}}
    machines["control-2"] = sent()
    assert run(inventory, "first.tar").machine == "control-2"
    machines["control-1"] = sent(head=other)
    assert run(inventory, "second.tar").machine == "control-2"
    machines["control-2"] = sent(head=other)
    with pytest.raises(GpunodesError, match="control-1 belongs to another cluster"):
        run(inventory, "third.tar")
    assert left(tmp_path) == ["first.tar", "second.tar"]
    # The cluster was created anew, and another command has found that.
    clusters.remember_ca(inventory.cluster, f"sha256:{'1' * 64}")
    assert run(inventory, "fourth.tar").machine == "control-1"


def test_a_single_control_plane_may_have_been_created_anew(
    tmp_path: Path, machines: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "one.yml").write_text("control_plane: {hosts: {control-1: {}}}\n")
    inventory = Inventory(tmp_path / "one.yml")
    machines["control-1"] = sent()
    run(inventory, str(tmp_path / "old.tar"))
    machines["control-1"] = sent(head={"about": {**ABOUT, "ca_hash": f"sha256:{'1' * 64}"}})
    assert run(inventory, str(tmp_path / "new.tar")).machine == "control-1"


def test_an_error_of_the_only_machine_is_the_error(inventory: Inventory, machines: dict[str, str]) -> None:
    problem = {"found": "no etcd runs on this machine", "wanted": "one", "remedy": "see crictl"}
    line = json.dumps({"error": problem}).encode() + b"\n"
    machines["control-1"] = f"out.write({line!r})"
    with pytest.raises(GpunodesError, match="control-1: no etcd runs on this machine"):
        run(inventory)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_error_of_a_machine_is_shown_in_printable_lines(
    inventory: Inventory, machines: dict[str, str], tmp_path: Path, attack: str
) -> None:
    """Also what its login or its shell writes in place of a report."""
    line = json.dumps({"error": dict.fromkeys(("found", "wanted", "remedy"), attack)}).encode() + b"\n"
    machines["control-1"] = f"out.write({line!r})"
    machines["control-2"] = f"sys.exit({attack!r})"
    done = command.run(tmp_path, "etcd", "backup", "-i", str(inventory.path))
    assert done.returncode == 1
    assert unprintable(done.stdout + done.stderr) == []
    assert f"control-1: {printable(attack)}" in done.stderr
    assert "control-2: " in done.stderr
    assert CANARY not in done.stderr.splitlines()
    assert left(tmp_path) == []


BROKEN = {
    "half a snapshot": sent(cut=100_000),
    "no sums": sent(cut=-80),
    "other sums": sent(sums={archive.SNAPSHOT: "0" * 64, "pki/ca.key": "0" * 64}),
    "sums of another kind": sent(sums=["x"]),
    "no report": "",
    "text": "out.write(b'hello\\n')",
    "a long line": "out.write(b'x' * (2 << 20))",
    "a part with a path": sent(head={"parts": [{"name": "../x", "size": 3}, {"name": archive.SNAPSHOT, "size": 3}]}),
    "another form": sent(head={"about": {"ca_hash": "x"}}),
    "a huge part": sent(head={"parts": [{"name": archive.SNAPSHOT, "size": 1 << 60}]}),
    "a damaged snapshot": sent({**PARTS, archive.SNAPSHOT: snapshot()[:1000] + b"x" + snapshot()[1001:]}),
    "an error of another form": "out.write(b'{\"error\": 1}\\n')",
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_no_file_stays_after_a_failure(
    inventory: Inventory, machines: dict[str, str], tmp_path: Path, body: str
) -> None:
    machines["control-1"] = body
    with pytest.raises(GpunodesError, match=r"^control-1: "):
        run(inventory)
    assert left(tmp_path) == []


def test_a_connection_that_stalls_ends_the_backup(
    inventory: Inventory, machines: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "IDLE_S", 1.0)
    machines["control-1"] = sent(cut=100_000) + "; import time; time.sleep(60)"
    with pytest.raises(GpunodesError, match="no data arrived in time"):
        run(inventory)
    assert left(tmp_path) == []


# The command as a process of its own, whose machine has sent a part and waits.
_COMMAND = """
import sys
from gpunodes import cli
from gpunodes.engine.remote import stream
stream.over_ssh = lambda machine, *_: stream.Stream(machine, [sys.executable, "waits.py"], b"\\n")
sys.argv = ["gpunodes", "etcd", "backup", "-i", "hosts.yml", "-o", "killed.tar"]
cli.main()
"""


@contextlib.contextmanager
def receiving(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command while it receives a backup."""
    (folder / "waits.py").write_text(_PROGRAM.format(body=f"{sent(cut=100_000)}; sys.stdin.read()"))
    with subprocess.Popen([sys.executable, "-c", _COMMAND], cwd=folder, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while not any((folder / name).stat().st_size for name in left(folder)):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def test_the_next_backup_deletes_what_a_killed_one_left(
    inventory: Inventory, machines: dict[str, str], tmp_path: Path
) -> None:
    """The file has the keys of the authorities; that of a backup that goes on is left alone."""
    machines["control-1"] = sent()
    said: list[str] = []
    with receiving(tmp_path) as process:
        (partial,) = left(tmp_path)
        assert stat.S_IMODE((tmp_path / partial).stat().st_mode) == 0o600
        backup.run(inventory, Path("first.tar"), "", said.append)
        assert left(tmp_path) == [partial, "first.tar"]
        process.kill()
        process.wait(60)
    (tmp_path / f"{partial}x").symlink_to(inventory.path)
    backup.run(inventory, Path("second.tar"), "", said.append)
    assert left(tmp_path) == [f"{partial}x", "first.tar", "second.tar"]
    assert {line for line in said if partial in line} == {
        f"deleted {partial}, which a backup that was killed has left",
        f"{partial}x cannot be deleted: Too many levels of symbolic links",
    }


def test_a_backup_that_sigterm_ends_leaves_nothing(inventory: Inventory, tmp_path: Path) -> None:
    """Also that of a timer: systemd sends SIGTERM when the time of the unit is over."""
    assert inventory.path.parent == tmp_path
    with receiving(tmp_path) as process:
        process.terminate()
        assert process.wait(60) == ExitCode.INTERRUPTED
    assert left(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_an_existing_file_is_not_replaced(
    inventory: Inventory, machines: dict[str, str], tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "target"
    if kind != "dangling":
        target.write_text("theirs")
    if kind == "file":
        target.rename(tmp_path / "b.tar")
    else:
        (tmp_path / "b.tar").symlink_to(target)
    machines["control-1"] = "raise SystemExit('was contacted')"
    with pytest.raises(WrongInput, match="exists"):
        run(inventory)
    assert kind == "dangling" or (tmp_path / "b.tar").read_text() == "theirs"
    assert kind != "dangling" or not target.exists()


def test_a_file_that_appears_meanwhile_is_not_replaced(inventory: Inventory, machines: dict[str, str]) -> None:
    machines["control-1"] = f"open('b.tar', 'w').write('theirs'); {sent()}"
    with pytest.raises(GpunodesError, match="exists by now"):
        run(inventory)
    assert Path("b.tar").read_text() == "theirs"
    assert left(Path.cwd()) == ["b.tar"]


# Encryption, by the real gpg and by a program in the place of age


def fake_age(folder: Path, code: int = 0) -> None:
    folder.mkdir()
    program = folder / "age"
    program.write_text(f'#!/bin/sh\nprintf "age-encryption.org/v1\\n"; tr a-y b-z\nexit {code}\n')
    program.chmod(0o755)


RECIPIENT = f"age1{'q' * 58}"


def test_an_encrypted_backup_is_encrypted_and_read_again(
    inventory: Inventory, machines: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_age(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    # The fake changes letters only: the snapshot has none that it would not change back.
    parts = {archive.SNAPSHOT: _letters(), "pki/ca.key": b"secret words"}
    machines["control-1"] = sent(parts)
    saved = run(inventory, recipient=RECIPIENT)
    assert b"secret words" not in saved.path.read_bytes()
    assert stat.S_IMODE(saved.path.stat().st_mode) == 0o600
    assert saved.path.read_bytes().startswith(b"age-encryption.org/v1\n")
    with pytest.raises(WrongInput, match="--identity"), encryption.opened(saved.path, None):
        pass


def _letters() -> bytes:
    data = b"0123456789ABCDEF" * 64
    return data + hashlib.sha256(data).digest()


def test_a_failing_program_leaves_no_file(
    inventory: Inventory, machines: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_age(tmp_path / "bin", code=1)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    machines["control-1"] = sent()
    with pytest.raises(GpunodesError, match="age failed"):
        run(inventory, recipient=RECIPIENT)
    assert left(tmp_path) == []


@pytest.mark.skipif(shutil.which("gpg") is None, reason="gpg is not installed")
def test_gpg_encrypts_to_a_fingerprint(
    inventory: Inventory, machines: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "gnupg"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("GNUPGHOME", str(home))
    quick = ["gpg", "--batch", "--passphrase", "", "--quick-gen-key", "backup@example.org", "rsa2048", "encr", "never"]
    subprocess.run(quick, check=True, capture_output=True)
    listed = subprocess.run(["gpg", "-K", "--with-colons"], check=True, capture_output=True, text=True).stdout
    fingerprint = next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr"))
    machines["control-1"] = sent()
    try:
        saved = run(inventory, recipient=fingerprint)
        with encryption.opened(saved.path, None) as plain:
            assert archive.check(plain, "b.tar") == saved.backup
        damaged = bytearray(saved.path.read_bytes())
        damaged[-100] ^= 1
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(GpunodesError), encryption.opened(tmp_path / "damaged", None) as plain:
            archive.check(plain, "damaged")
    finally:
        subprocess.run(["gpgconf", "--kill", "gpg-agent"], check=False, capture_output=True)


@pytest.mark.parametrize("recipient", ["me@example.org", "ABCD1234", "age1", "-o/etc/passwd", "age1\n" + "q" * 58])
def test_a_recipient_that_may_be_someone_else_is_refused(inventory: Inventory, recipient: str) -> None:
    with pytest.raises(WrongInput, match="is not a recipient"):
        run(inventory, recipient=recipient)


def test_a_missing_program_is_one_sentence(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(WrongInput, match=r"^age is not installed on this machine"):
        run(inventory, recipient=RECIPIENT)


# The program on the machine


@pytest.fixture
def control_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control plane's files, without an API."""
    folder = tmp_path / "kubernetes"
    etcd_member.certificates(folder / "pki/etcd")
    for name in etcd_backup.KEYS:
        if not (folder / "pki" / name).exists():
            shutil.copy(folder / "pki/etcd" / f"ca.{'key' if name.endswith('key') else 'crt'}", folder / "pki" / name)
    (folder / "encryption.json").write_text('{"secret": "k"}')
    (folder / "manifests").mkdir()
    (folder / "manifests/kube-apiserver.yaml").write_text(
        f"    - --encryption-provider-config={folder}/encryption.json\n"
        "    image: registry.k8s.io/kube-apiserver:v1.36.3\n"
    )
    config = kubeconfig.Kubeconfig("https://10.0.0.1:6443", (folder / "pki/ca.crt").read_text(), None, None)
    monkeypatch.setattr(etcd_backup, "_PKI", str(folder / "pki"))
    monkeypatch.setattr(static_pod_files, "FOLDER", str(folder / "manifests"))
    monkeypatch.setattr(kubeconfig, "load", lambda _: config)
    monkeypatch.setattr(etcd_backup, "Client", lambda *_: _NoApi())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(etcd_snapshot, "_LOCK", str(tmp_path / "lock"))
    monkeypatch.setattr(etcdctl, "PKI", str(folder / "pki/etcd"))
    return folder


class _NoApi:
    def find(self, _: str) -> None:
        from gpunodes.ansible.module_utils.kube_api import ApiError

        raise ApiError(0, "refused")


class _Out:
    """Standard output, in memory."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()


def output(monkeypatch: pytest.MonkeyPatch) -> bytes:
    out = _Out()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        etcd_backup.main({})
    return out.buffer.getvalue()


@pytest.fixture
def member(tmp_path: Path, control_plane: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[etcd_member.Member]:
    (tmp_path / "etcd").mkdir()
    (tmp_path / "etcd/pki").symlink_to(control_plane / "pki/etcd")
    with etcd_member.running(tmp_path / "etcd") as made:
        monkeypatch.setattr(containers, "ids", lambda *_: ["0123456789ab"])
        monkeypatch.setattr(containers, "execute", made.execute)
        monkeypatch.setattr(etcd_snapshot, "DATA", str(made.data))
        yield made


@needs_etcd
def test_a_real_etcd_is_backed_up(
    member: etcd_member.Member,
    inventory: Inventory,
    machines: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """From a member with TLS to a checked file; nothing stays in its folder, not even of a killed backup."""
    member.etcdctl("put", "/registry/secrets/a", "1")
    (member.data / "gpunodes-snapshot-1-1.db.part").write_text("of a backup that was killed")
    (tmp_path / "output").write_bytes(output(monkeypatch))
    assert [each.name for each in member.data.iterdir()] == ["member"]
    machines["control-1"] = f"out.write(open({str(tmp_path / 'output')!r}, 'rb').read())"
    saved = run(inventory)
    about = saved.backup.about
    assert about["etcd"]["revision"] == 2
    assert about["etcd"]["keys"] >= 1
    assert [each["name"] for each in about["etcd"]["members"]] == ["control-1"]
    assert {part.name for part in saved.backup.parts} >= {archive.SNAPSHOT, "pki/sa.key", "pki/etcd/ca.key"}
    assert "kubernetes/encryption-configuration" in about["paths"]
    with saved.path.open("rb") as file:
        assert archive.check(file, "b.tar") == saved.backup


@needs_etcd
def test_a_damaged_snapshot_is_no_backup(member: etcd_member.Member, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = member.execute

    def damaging(container: str, argv: list[str], timeout_s: int) -> CommandResult:
        done = execute(container, argv, timeout_s)
        if "save" in argv:
            with Path(argv[-1]).open("r+b") as file:
                # All pages behind the two that name the root: which of the others are in use varies.
                size = file.seek(0, 2)
                file.seek(8192)
                file.write(b"damaged!" * ((size - 8192) // 8))
        return done

    monkeypatch.setattr(containers, "execute", damaging)
    assert "error" in json.loads(output(monkeypatch))
    assert [each.name for each in member.data.iterdir()] == ["member"]


STATUS = json.dumps(
    [
        {
            "Status": {
                "version": "3.6.8",
                "dbSize": 1 << 20,
                "leader": 255,
                "header": {"revision": 7, "member_id": 255},
            }
        }
    ]
)
MEMBERS = json.dumps(
    {
        "members": [
            {"ID": 255, "name": "control-1", "peerURLs": ["https://10.0.0.1:2380"]},
            {"ID": 16, "peerURLs": ["https://10.0.0.2:2380"], "isLearner": True},
        ]
    }
)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, CommandResult]:
    """The results of programs in a container that does not exist, by a word of their arguments."""
    data = tmp_path / "data"
    data.mkdir()
    found = {"endpoint": CommandResult([], 0, STATUS, ""), "member": CommandResult([], 0, MEMBERS, "")}

    def execute(_: str, argv: list[str], __: int) -> CommandResult:
        if "save" in argv:
            (data / f"{Path(argv[-1]).name}.part").write_bytes(b"x")
        return next(
            (each for word, each in found.items() if word in argv), CommandResult(argv, 1, "", '{"error": "timed out"}')
        )

    monkeypatch.setattr(containers, "ids", lambda *_: ["0123456789ab"])
    monkeypatch.setattr(containers, "execute", execute)
    monkeypatch.setattr(etcd_snapshot, "DATA", str(data))
    monkeypatch.setattr(etcd_snapshot, "_LOCK", str(tmp_path / "lock"))
    monkeypatch.setattr(etcd_backup, "_small_parts", lambda: ({}, {}))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return found


def test_a_failed_snapshot_leaves_nothing(
    answers: dict[str, CommandResult], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert answers
    error = json.loads(output(monkeypatch))["error"]
    assert error["found"] == "etcd does not carry out `etcdctl snapshot save`: timed out"
    assert list((tmp_path / "data").iterdir()) == []


def test_too_little_space_is_found_before_a_snapshot(
    answers: dict[str, CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers["endpoint"] = CommandResult([], 0, STATUS.replace(str(1 << 20), str(1 << 50)), "")
    assert "MiB free" in json.loads(output(monkeypatch))["error"]["found"]


def test_one_backup_at_a_time(answers: dict[str, CommandResult], monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers
    with etcd_snapshot._alone():
        assert "another backup" in json.loads(output(monkeypatch))["error"]["found"]


@pytest.mark.parametrize("text", ["", "[]", '[{"Status": 1}]', "null", '[{"Status": {"version": null}}]'])
def test_an_unexpected_answer_of_etcdctl_is_a_problem(answers: dict[str, CommandResult], text: str) -> None:
    answers["endpoint"] = CommandResult([], 0, text, "")
    with pytest.raises(MachineProblem, match="unexpected status"):
        etcd_snapshot.status()


def test_a_missing_encryption_key_is_no_backup(control_plane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (control_plane / "encryption.json").unlink()
    assert "encryption.json does not exist" in json.loads(output(monkeypatch))["error"]["found"]


# The timer


def test_units_quote_their_words() -> None:
    units = timer.units(
        ["/opt/a b/gpunodes", "etcd", "backup", "-i", '/x/"$y'], "me", Path("/var/100%"), keep=3, calendar="daily"
    )
    service = units["gpunodes-etcd-backup.service"]
    assert 'ExecStart="/opt/a b/gpunodes" etcd backup -i "/x/\\"$$y" --keep 3' in service
    assert "WorkingDirectory=/var/100%%" in service
    assert "OnCalendar=daily" in units["gpunodes-etcd-backup.timer"]


@pytest.mark.parametrize("calendar", ["", "daily\nUser=root", "%h", "$(x)"])
def test_a_calendar_event_cannot_add_lines(calendar: str) -> None:
    with pytest.raises(WrongInput, match="calendar event"):
        timer.units(["g"], "me", Path("/"), keep=1, calendar=calendar)


def test_only_old_backups_of_the_same_cluster_are_deleted(tmp_path: Path) -> None:
    names = [f"gpunodes-backup-a-2026112{day}T000000Z.tar" for day in range(4)]
    others = ["gpunodes-backup-a-b-20260101T000000Z.tar", "gpunodes-backup-a.tar", "notes.tar"]
    for name in [*names, *others]:
        (tmp_path / name).write_text("")
    (tmp_path / "gpunodes-backup-a-20260101T000000Z.tar").symlink_to(tmp_path / "notes.tar")
    assert [each.name for each in timer.prune(tmp_path, names[-1], 2)] == names[:2]
    assert {*others, *names[2:]} <= {each.name for each in tmp_path.iterdir()}


def test_the_backup_that_was_just_made_stays(tmp_path: Path) -> None:
    """Its name is the oldest where the clock was set back, or another controller's is ahead."""
    names = [f"gpunodes-backup-10.0.0.1-202611{day:02}T030000Z.tar" for day in range(1, 4)]
    new = "gpunodes-backup-10.0.0.1-20260101T030000Z.tar"
    for name in [*names, new]:
        (tmp_path / name).write_text("")
    assert [each.name for each in timer.prune(tmp_path, new, 3)] == names[:1]
    assert (tmp_path / new).exists()


def test_the_timer_is_printed(inventory: Inventory) -> None:
    done = CliRunner().invoke(root, ["etcd", "timer", "-i", str(inventory.path), "--keep", "3", "--json"])
    assert done.exit_code == 0
    assert "--keep 3" in json.loads(done.stdout)["units"]["gpunodes-etcd-backup.service"]
