"""Seeds of bare machines: what they contain, and hostile keys, names and paths."""

from __future__ import annotations

import base64
import json
import re
import shlex
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpunodes import cli
from gpunodes.errors import WrongInput
from gpunodes.operations import public_keys, seed
from gpunodes.operations.seed import Format, Seed


def blob(kind: str = "ssh-ed25519") -> str:
    return base64.b64encode(len(kind).to_bytes(4, "big") + kind.encode() + b"\0\0\0\x20" + b"k" * 32).decode()


KEY = f"ssh-ed25519 {blob()} admin@example"
# Each would end a quotation, run a command, or begin another line in one of the formats.
HOSTILE = "it's \"; $(reboot) `reboot` # \\ {{ x }} %end ${x} : - !!python/object: &a *a"
ALL = [(Format.CLOUD_INIT, ""), (Format.PRESEED, "/dev/sda"), (Format.KICKSTART, "/dev/sda")]


def text(kind: Format, disk: str, **more: Any) -> str:
    return next(iter(seed.render(Seed("gpunodes", (KEY,), disk=disk, **more), kind).values()))


def key_file(folder: Path, content: str) -> Path:
    path = folder / "key.pub"
    path.write_text(content, encoding="utf-8")
    return path


def test_keys_are_read_without_repetition_and_superfluous_blanks(tmp_path: Path) -> None:
    bare = f"ecdsa-sha2-nistp256 {blob('ecdsa-sha2-nistp256')}"
    path = key_file(tmp_path, f"# mine\r\n\r\n {KEY}  \r\n{bare}\n{KEY}\n")
    assert public_keys.read([path, path]) == (KEY, bare)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f'command="reboot" {KEY}', "begins with options"),
        (f"no-pty {KEY}", "begins with options"),
        (f"cert-authority {KEY}", "begins with options"),
        (f"ssh-ed25519-cert-v01@openssh.com {blob()}", "does not begin with the type"),
        (f"ssh-dss {blob('ssh-dss')}", "does not begin with the type"),
        (f"ssh-rsa {blob()}", "is not a key of type ssh-rsa"),
        ("ssh-ed25519 AAAA", "is not a key of type"),
        ("ssh-ed25519 $(reboot)", "is not a key of type"),
        ("ssh-ed25519", "is not a key of type"),
        (f"{KEY}\x0bssh_pwauth: true", "contains a control character"),
        (f"{KEY}\x1b[2J", "contains a control character"),
        (f"{KEY}\u2028evil", "contains a control character"),
        (f"ssh-ed25519\t{blob()}", "contains a control character"),
        (f"{KEY}{'x' * 20000}", "characters"),
        ("", "contains no key"),
        ("# none\n", "contains no key"),
        ("---- BEGIN SSH2 PUBLIC KEY ----", "does not begin with the type"),
    ],
)
def test_something_else_than_plain_keys_is_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(WrongInput, match=re.escape(words)):
        public_keys.read([key_file(tmp_path, content)])


def test_a_private_key_is_refused_with_the_file_to_use(tmp_path: Path) -> None:
    path = tmp_path / "id"
    path.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nsecret\n")
    with pytest.raises(WrongInput, match="is a private key, which must not leave") as caught:
        public_keys.read([path])
    assert "ssh-keygen -y" in caught.value.problem.remedy
    assert "secret" not in str(caught.value)
    (tmp_path / "id.pub").write_text(KEY)
    with pytest.raises(WrongInput) as caught:
        public_keys.read([path])
    assert caught.value.problem.remedy == f"use --key {path}.pub"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_an_unreadable_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key.pub"
    if content:
        path.write_bytes(content)
    with pytest.raises(WrongInput, match=r"cannot be read|is not a text file"):
        public_keys.read([path])


@pytest.mark.parametrize(
    "user", ["", "root", "Admin", "a b", "-x", "x" * 33, "a;reboot", "a\nb", "a:b", "a.b", "a'b", "ä", "{{x}}", "a\n"]
)
@pytest.mark.parametrize(("kind", "disk"), ALL)
def test_other_user_names_are_refused(kind: Format, disk: str, user: str) -> None:
    with pytest.raises(WrongInput, match=r"user"):
        seed.render(Seed(user, (KEY,), disk=disk), kind)


@pytest.mark.parametrize("user", ["operator", "backup", "sudo", "wheel", "www-data"])
@pytest.mark.parametrize(("kind", "disk"), ALL)
def test_names_that_the_system_uses_are_refused(kind: Format, disk: str, user: str) -> None:
    """`useradd operator` fails on Debian, which has a group of this name: the machine would have no user at all."""
    with pytest.raises(WrongInput, match=f"{user} is a user or a group of the system itself"):
        seed.render(Seed(user, (KEY,), disk=disk), kind)


@pytest.mark.parametrize(
    "name", ["localhost", "A", "-a", "a-", "a.b", "a b", "a\n", "a;b", "x" * 64, "$(x)", "a'", 'a"', "ä", "{{x}}"]
)
@pytest.mark.parametrize(("kind", "disk"), ALL)
def test_other_host_names_are_refused(kind: Format, disk: str, name: str) -> None:
    with pytest.raises(WrongInput, match=r"host name"):
        text(kind, disk, hostname=name)


@pytest.mark.parametrize(
    "disk", ["", "sda", "/dev/../etc", "/dev/sda /dev/sdb", "/dev/sda\n", "/dev/$(x)", "/dev/", "/tmp"]
)
@pytest.mark.parametrize("kind", [Format.PRESEED, Format.KICKSTART])
def test_an_installer_needs_the_one_disk_that_it_erases(kind: Format, disk: str) -> None:
    with pytest.raises(WrongInput, match=r"disk"):
        text(kind, disk)
    with pytest.raises(WrongInput, match="--disk with cloud-init"):
        text(Format.CLOUD_INIT, "/dev/sda")


def test_cloud_init_gets_a_user_with_keys_and_nothing_that_a_comment_adds() -> None:
    hostile = f"{KEY} {HOSTILE}"
    files = seed.render(Seed("admin", (hostile,), hostname="1e3"), Format.CLOUD_INIT)
    assert files["user-data"].startswith("#cloud-config\n")
    document = yaml.safe_load(files["user-data"])
    assert document["users"] == [
        {
            "name": "admin",
            "gecos": "gpunodes",
            "shell": "/bin/bash",
            "lock_passwd": True,
            "sudo": "ALL=(ALL) NOPASSWD:ALL",
            "ssh_authorized_keys": [hostile],
        }
    ]
    assert (document["ssh_pwauth"], document["disable_root"], document["swap"]) == (False, True, {"size": 0})
    assert document["packages"] == ["openssh-server", "python3", "sudo"]
    assert document["hostname"] == "1e3"
    assert yaml.safe_load(files["meta-data"])["local-hostname"] == "1e3"


@pytest.mark.parametrize("word", ["no", "on", "null", "123", "0x10", "1-1-1", "true"])
def test_a_name_that_yaml_would_take_for_another_type_stays_a_name(word: str) -> None:
    document = yaml.safe_load(text(Format.CLOUD_INIT, "", hostname=word))
    assert document["hostname"] == word
    assert yaml.safe_load(seed.render(Seed("on", (KEY,)), Format.CLOUD_INIT)["user-data"])["users"][0]["name"] == "on"


def test_the_instance_id_follows_from_the_content() -> None:
    """cloud-init applies the same seed only once: SSH host keys stay."""

    def made(**more: Any) -> str:
        files = seed.render(Seed("admin", (KEY,), **more), Format.CLOUD_INIT)
        return str(yaml.safe_load(files["meta-data"])["instance-id"])

    assert made() == made()
    assert len({made(), made(hostname="a"), made(hostname="b")}) == 3
    assert re.fullmatch(r"gpunodes-[0-9a-f]{16}", made())


def scripts(kind: Format, keys: tuple[str, ...]) -> str:
    """What the installer runs in the installed system."""
    made = next(iter(seed.render(Seed("gpunodes", keys, disk="/dev/sda"), kind).values()))
    if kind is Format.KICKSTART:
        return made.split("%post --erroronfail\n")[1].split("%end")[0]
    line = next(line for line in made.splitlines() if "late_command" in line)
    assert line.count("'") == 2
    assert "$" not in line
    words = shlex.split(line)
    assert words[:7] == ["d-i", "preseed/late_command", "string", "in-target", "sh", "-c", words[6]]
    return words[6]


@pytest.mark.parametrize("kind", [Format.PRESEED, Format.KICKSTART])
def test_an_installer_s_script_writes_the_keys_and_runs_nothing_of_them(tmp_path: Path, kind: Format) -> None:
    """The script really runs, with its paths in a folder and without changes of owners."""
    keys = (f"{KEY} {HOSTILE}", KEY)
    script = scripts(kind, keys)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("chown", "restorecon", "reboot"):
        (programs / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/called\n")
        (programs / name).chmod(0o755)
    (tmp_path / "etc/sudoers.d").mkdir(parents=True)
    for path in ("/home/", "/etc/"):
        script = script.replace(path, f"{tmp_path}{path}")
    subprocess.run(["sh", "-c", script], check=True, env={"PATH": f"{programs}:/usr/bin:/bin"})
    authorized = tmp_path / "home/gpunodes/.ssh/authorized_keys"
    assert authorized.read_text().splitlines() == list(keys)
    assert stat.S_IMODE(authorized.stat().st_mode) == 0o600
    assert stat.S_IMODE(authorized.parent.stat().st_mode) == 0o700
    sudoers = tmp_path / "etc/sudoers.d/gpunodes"
    assert sudoers.read_text() == "gpunodes ALL=(ALL) NOPASSWD:ALL\n"
    assert stat.S_IMODE(sudoers.stat().st_mode) == 0o440
    assert "PasswordAuthentication no\n" in (tmp_path / "etc/ssh/sshd_config.d/01-gpunodes.conf").read_text()
    assert "reboot" not in (tmp_path / "called").read_text()


def test_an_answer_file_has_one_answer_a_line_and_no_swap() -> None:
    made = text(Format.PRESEED, "/dev/disk/by-id/nvme-X_1", hostname="gpu-1")
    assert made.startswith("#_preseed_V1\n")
    lines = made.splitlines()[2:]
    assert all(
        re.match(
            r"(d-i|tasksel|popularity-contest) [a-z0-9/_-]+ (string|select|boolean|password|note|multiselect)", line
        )
        for line in lines
    )
    assert "d-i partman-auto/disk string /dev/disk/by-id/nvme-X_1" in lines
    assert "d-i netcfg/hostname string gpu-1" in lines
    assert "d-i passwd/root-login boolean false" in lines
    recipe = next(line for line in lines if "expert_recipe" in line)
    assert "swap" not in recipe
    assert recipe.count(" .") == 3


def test_a_kickstart_erases_the_named_disk_only_and_makes_no_swap() -> None:
    made = text(Format.KICKSTART, "/dev/nvme0n1", hostname="gpu-1")
    lines = made.splitlines()
    assert "ignoredisk --only-use=nvme0n1" in lines
    assert "clearpart --all --initlabel --drives=nvme0n1" in lines
    assert [line for line in lines if line.startswith(("part ", "autopart"))] == [
        "part / --fstype=xfs --size=4096 --grow"
    ]
    assert lines.count("%end") == 2
    assert "rootpw --lock" in lines


def test_files_are_private_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "seed"
    folder.parent.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    for content in ("one", "two"):
        paths = seed.write(folder, {"user-data": content, "meta-data": content})
        assert paths == [folder / "user-data", folder / "meta-data"]
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
        assert {path.read_text() for path in paths} == {content}
    (folder / "user-data").unlink()
    (folder / "user-data").symlink_to(outside)
    seed.write(folder, {"user-data": "three"})
    assert outside.read_text() == "theirs"
    assert sorted(path.name for path in folder.iterdir()) == ["meta-data", "user-data"]


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    key_file(tmp_path, KEY)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["gpunodes", "provision", "seed", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_the_command_prints_user_data_for_the_default_user(command: Command) -> None:
    code, out, err = command("--key", "key.pub")
    assert (code, err) == (0, "")
    assert yaml.safe_load(out)["users"][0]["name"] == "gpunodes"


def test_the_command_takes_the_user_of_the_inventory(command: Command, tmp_path: Path) -> None:
    inventory = tmp_path / "inventory" / "hosts.yml"
    inventory.parent.mkdir()
    inventory.write_text("all: {vars: {site: ops, ansible_user: '{{ site }}'}}\nworkers: {hosts: {a: {}, b: {}}}\n")
    assert yaml.safe_load(command("--key", "key.pub")[1])["users"][0]["name"] == "ops"
    assert yaml.safe_load(command("--key", "key.pub", "--user", "other")[1])["users"][0]["name"] == "other"
    inventory.write_text("workers: {hosts: {a: {ansible_user: x}, b: {ansible_user: z}}}\n")
    code, _, err = command("--key", "key.pub")
    assert code == 2
    assert "have the users x, z" in err
    inventory.write_text("workers: {hosts: {a: {ansible_user: root}}}\n")
    assert command("--key", "key.pub")[0] == 2


def test_a_named_inventory_must_exist(command: Command) -> None:
    code, _, err = command("--key", "key.pub", "-i", "nowhere.yml")
    assert code == 2
    assert "there is no inventory at nowhere.yml" in err


def test_the_command_writes_a_nocloud_seed(command: Command, tmp_path: Path) -> None:
    code, out, _ = command("--key", "key.pub", "--hostname", "gpu-1", "--output", "made", "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["schema"], document["user"], document["hostname"]) == ("gpunodes.seed/1", "gpunodes", "gpu-1")
    assert document["paths"] == ["made/user-data", "made/meta-data"]
    for name, content in document["files"].items():
        assert (tmp_path / "made" / name).read_text() == content


def test_a_file_in_place_of_the_folder_is_refused(command: Command, tmp_path: Path) -> None:
    code, _, err = command("--key", "key.pub", "--output", "key.pub")
    assert code == 2
    assert "key.pub is not a folder" in err
    assert (tmp_path / "key.pub").read_text() == KEY


def test_a_folder_that_cannot_be_made_is_refused(command: Command) -> None:
    """Below a file; it was reported as an error of gpunodes."""
    code, _, err = command("--key", "key.pub", "--output", "key.pub/seed")
    assert code == 2
    assert "the folder key.pub/seed cannot be written: Not a directory" in err


def test_wrong_input_writes_nothing(command: Command, tmp_path: Path) -> None:
    for words in (["--hostname", "x y"], ["--format", "preseed"], ["--user", "root"]):
        code, out, err = command("--key", "key.pub", "--output", "made", *words)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
    assert not (tmp_path / "made").exists()
    assert command()[0] == 2
