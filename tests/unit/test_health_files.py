"""Verdicts on saved logs: each documented format by name, real logs if available, and hostile files."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from backports import zstd
from gpunodes.errors import WrongInput
from gpunodes.health import judge, tables
from gpunodes.health.find import Places
from gpunodes.health.model import NOT_RECOGNISED, Action, SiteRules, State, Verdict
from gpunodes.operations import health

from tests.command import run

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "fixtures" / "health"
VERDICTS: Mapping[str, Mapping[str, Any]] = tomllib.loads((CASES / "verdicts.toml").read_text())
# Real kernel logs under many licences: they are read from this folder and are not part of this repository.
CORPUS = ROOT.parent / "shared" / "corpus"
XID79 = b"[100.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=a, GPU has fallen off the bus.\n"


def verdict_on(tmp_path: Path, content: bytes, name: str = "log") -> Verdict:
    path = tmp_path / name
    path.write_bytes(content)
    return health.of_files([str(path)])


def check(verdict: Verdict, want: Mapping[str, Any]) -> None:
    found = {
        "action": verdict.action.value,
        "state": verdict.state.value,
        "hung": verdict.hung_in_driver,
        "xids": list(verdict.xids),
        "sxids": list(verdict.sxids),
        "rules": sorted(finding.rule for finding in verdict.findings),
        "boot_id": verdict.boot_id,
        "gpus": verdict.gpus_seen,
        "count": verdict.findings[0].count if verdict.findings else 0,
    }
    assert {name: found[name] for name in want} == {
        name: sorted(value) if name == "rules" else value for name, value in want.items()
    }


def test_every_case_has_its_verdict() -> None:
    assert {path.name for path in CASES.iterdir()} - {"verdicts.toml"} == set(VERDICTS)


@pytest.mark.parametrize("name", VERDICTS)
def test_documented_format(name: str) -> None:
    check(health.of_files([str(CASES / name)]), {"hung": False, **VERDICTS[name]})


@pytest.mark.parametrize(
    ("codes", "actions"),
    [
        ([("61", 45), ("62", 45)], ["restart_app", "restart_app"]),
        ([("61", 45), ("62", 43)], ["none", "restart_app"]),
        ([("61", 45), ("61", 43)], ["none", "none"]),
        ([("61", 45), ("61", 79)], ["none", "reboot"]),
        ([("61", 45), ("61", 154)], ["none", "reset_gpu"]),
    ],
)
def test_only_another_code_of_the_same_gpu_explains_xid_45(
    tmp_path: Path, codes: list[tuple[str, int]], actions: list[str]
) -> None:
    detail = {154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"}
    lines = [
        f"[1{at}.1] NVRM: Xid (PCI:0000:{bus}:00): {code}, {detail.get(code, 'pid=1, name=a')}\n"
        for at, (bus, code) in enumerate(codes)
    ]
    verdict = verdict_on(tmp_path, "".join(lines).encode())
    assert sorted(finding.action.value for finding in verdict.findings) == actions
    assert (verdict.state is State.HEALTHY) == (set(actions) == {"none"})


class Pipe(io.BytesIO):
    """A stream that zipfile cannot seek in, so that it writes the sizes of a member after it."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise io.UnsupportedOperation

    tell = seek


def zipped(members: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED, *, pipe: bool = False) -> bytes:
    stream = Pipe() if pipe else io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def packed(content: bytes) -> dict[str, bytes]:
    """The same content in every archive and compression format, and with other systems' line ends and encodings."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as tar:
        for name, data in (
            ("sos/etc/hosts", b"127.0.0.1 localhost\n"),
            ("sos/var/log/kern.log.gz", gzip.compress(content)),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("sos/dmesg")
        link.type, link.linkname = tarfile.SYMTYPE, "../../../etc/passwd"
        tar.addfile(link)
    return {
        "gzip": gzip.compress(content),
        "two gzips": gzip.compress(content[:100]) + gzip.compress(content[100:]),
        "xz": lzma.compress(content),
        "zstd": zstd.compress(content),
        "bzip2": bz2.compress(content),
        "two bzip2s": bz2.compress(content[:100]) + bz2.compress(content[100:]),
        "tar.bz2": bz2.compress(lzma.decompress(archive.getvalue())),
        "zip": zipped({"sos/": b"", "sos/etc/hosts": b"127.0.0.1\n", "sos/kern.log": content}),
        "zip, not compressed": zipped({"kern.log": content, "hosts": b"127.0.0.1\n"}, zipfile.ZIP_STORED),
        "zip, written to a pipe": zipped({"hosts": b"127.0.0.1\n", "kern.log.bz2": bz2.compress(content)}, pipe=True),
        "tar.xz": archive.getvalue(),
        "crlf": content.replace(b"\n", b"\r\n"),
        "utf-16": content.decode("latin-1").encode("utf-16"),
    }


@pytest.mark.parametrize("name", ["hung-frame.log", "xid-79-154.log", "xid-wrapped.log", "smi-remap.xml", "boots.log"])
def test_packing_does_not_change_the_verdict(name: str, tmp_path: Path) -> None:
    plain = health.of_files([str(CASES / name)])
    for how, content in packed((CASES / name).read_bytes()).items():
        verdict = verdict_on(tmp_path, content)
        assert (verdict.state, verdict.action, verdict.xids) == (plain.state, plain.action, plain.xids), how


def test_several_files_are_one_machine() -> None:
    verdict = health.of_files([str(CASES / "hung-frame.log"), str(CASES / "smi-well.txt"), str(CASES / "uvm.log")])
    assert verdict.state is State.HUNG
    assert verdict.gpus_seen == 1
    assert [finding.rule for finding in verdict.findings] == ["hung-in-driver", "uvm-fatal"]


def test_a_rotated_log_of_an_older_boot_does_not_count(tmp_path: Path) -> None:
    old, new = tmp_path / "kern.log.1", tmp_path / "kern.log"
    old.write_bytes(b"Mar  1 05:39:15 n kernel: " + XID79)
    new.write_bytes(b"Mar  1 06:00:00 n kernel: Linux version 6.12.0\nMar  1 06:00:01 n kernel: NVRM: loading\n")
    assert health.of_files([str(new), str(old)]).state is State.HEALTHY


def test_the_site_sets_actions_for_codes() -> None:
    site = SiteRules({31: Action.NONE, 79: Action.REPAIR}, {24007: Action.REBOOT})
    assert health.of_files([str(CASES / "xid-mig.log")], site).state is State.HEALTHY
    assert health.of_files([str(CASES / "off-bus-line.log")], site).action is Action.REBOOT
    assert health.of_files([str(CASES / "xid-79-154.log")], site).action is Action.REPAIR
    assert health.of_files([str(CASES / "sxid-fatal.log")], site).action is Action.REBOOT


def test_a_log_flood_is_one_finding(tmp_path: Path) -> None:
    lines = b"".join(b"[%d.%06d] NVRM: Xid (PCI:0000:3b:00): 62, %08x\n" % (i // 1000, i, i) for i in range(190_000))
    verdict = verdict_on(tmp_path, lines)
    (finding,) = verdict.findings
    assert (finding.count, finding.first, finding.last) == (190_000, "[0.000000]", "[189.189999]")
    assert len(finding.evidence) <= 3


# --- hostile files ---------------------------------------------------------------------------------------------------


def test_evidence_has_no_control_characters(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, b"[1.0] NVRM: Xid (PCI:0000:3b:00): 79, \x1b[2J\x07\x9b" + b"A" * 10_000 + b"\n")
    (line,) = verdict.findings[0].evidence
    assert len(line) <= 400
    assert line.isprintable()


def tar_of(name: str) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(XID79)
        tar.addfile(member, io.BytesIO(XID79))
    return archive.getvalue()


def nested() -> bytes:
    content = XID79
    for _ in range(8):
        content = gzip.compress(content)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar_of("../../etc/cron.d/x"), "path is outside the archive"),
        (tar_of("/etc/cron.d/x"), "path is outside the archive"),
        (zipped({"../../etc/cron.d/x": XID79}), "path is outside the archive"),
        (zipped({"..\\..\\x": XID79}), "path is outside the archive"),
        (zipped({"log": XID79}, zipfile.ZIP_LZMA), "not compressed with deflate"),
        (zipped({"log": XID79}).replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01"), "encrypted"),
        (nested(), "more than 4 nested archives"),
        (gzip.compress(XID79)[:-20] + b"\0" * 20, "cannot be unpacked"),
        (b"\xfd7zXZ\x00" + b"junk" * 100, "cannot be unpacked"),
        (b"BZh91AY&SY" + b"junk" * 100, "cannot be unpacked"),
        (zipped({"log": XID79 * 1000})[:60] + b"junk" * 100, "cannot be unpacked"),
        (b"\x28\xb5\x2f\xfd" + b"junk" * 100, "cannot be unpacked"),
        (b'<!DOCTYPE x [<!ENTITY a "b">]>\n<nvidia_smi_log>&a;</nvidia_smi_log>', "entities"),
        (b"<nvidia_smi_log>" + b"<a>" * 1000, "nested"),
    ],
    ids=(
        *(
            "parent folder",
            "absolute",
            "zip's parent folder",
            "backslashes",
            "zip with lzma",
            "encrypted zip",
            "nested",
        ),
        *("gzip", "xz", "bzip2", "zip", "zstd", "entities", "deep"),
    ),
)
def test_hostile_files_are_refused_with_a_message(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=message):
        verdict_on(tmp_path, content)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def bomb_of_many(content: bytes) -> bytes:
    """Each member unpacks to a size that is not checked, all together to one that is."""
    return zipped({str(number): content[: 2 << 20] for number in range(len(content) >> 21)})


@pytest.mark.long
@pytest.mark.parametrize(
    "packer",
    [gzip.compress, lzma.compress, zstd.compress, bz2.compress, lambda content: zipped({"log": content}), bomb_of_many],
)
def test_a_bomb_is_refused(packer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunodes.health.sources.UNCHECKED_BYTES", 4 << 20)
    with pytest.raises(WrongInput, match="times its size"):
        verdict_on(tmp_path, packer(bytes(64 << 20)))


def test_a_truncated_archive_is_read_as_far_as_possible(tmp_path: Path) -> None:
    assert verdict_on(tmp_path, gzip.compress(XID79 * 1000, 0)[:-30_000]).xids == (79,)
    assert verdict_on(tmp_path, zipped({"log": XID79 * 1000}, zipfile.ZIP_STORED)[:-30_000]).xids == (79,)


def test_the_names_and_the_directory_of_a_zip_archive_do_not_count(tmp_path: Path) -> None:
    """Nothing is written, and a directory that lists one member many times does not multiply it."""
    content = zipped({"NVRM: Xid (PCI:0000:3b:00): 31, x": XID79})
    begin, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
    overlapping = content[:end] + content[begin:end] * 1000 + content[end:]
    verdict = verdict_on(tmp_path, overlapping, "log.zip")
    assert (verdict.xids, verdict.findings[0].count) == ((79,), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["log.zip"]


def test_unterminated_json_is_not_an_entry(tmp_path: Path) -> None:
    entry = b'{"MESSAGE":' + b"[" * 30_000 + b'"NVRM: Xid (PCI:0000:3b:00): 79, x"' + b"\n"
    assert verdict_on(tmp_path, entry * 3).xids == ()


# --- the command -----------------------------------------------------------------------------------------------------


def gpunodes(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    return run(Path.cwd(), "health", *arguments, given=stdin)


def test_options_are_accepted_after_the_machines(tmp_path: Path) -> None:
    done = gpunodes("gpu-1", "--json", "-i", str(tmp_path / "none.yml"))
    assert done.returncode == 2
    assert str(tmp_path / "none.yml") in json.loads(done.stdout)["found"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--from", str(CASES / "load.log")), 0),
        (("--from", str(CASES / "hung-frame.log")), 3),
        (("--from", str(CASES / "nothing.txt")), 3),
        (("--from", "/nowhere"), 2),
        (("--from", "/"), 2),
        (("--from", str(CASES / "load.log"), "gpu-1"), 2),
        (("explain", "xid", "79"), 0),
        (("explain", "sxid", "24007", "--json"), 0),
        (("explain", "sxid", "79"), 2),
        (("rules",), 0),
        (("rules", "--json"), 0),
        (("rules", "extra"), 2),
        (("--", "rules", "-i", "/nowhere"), 2),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int) -> None:
    done = gpunodes(*arguments)
    assert done.returncode == code, done.stderr
    assert "a bug in gpunodes" not in done.stderr
    if "--json" in arguments:
        json.loads(done.stdout)


def test_several_files_after_one_flag_and_folders(tmp_path: Path) -> None:
    """Each file is reported with what it was recognised as; one that cannot be unpacked ends no folder."""
    folder = tmp_path / "logs"
    (folder / "deeper").mkdir(parents=True)
    (folder / "kern.log").write_bytes(XID79)
    (folder / "deeper" / "nothing.txt").write_bytes(b"nothing\n")
    (folder / "broken.gz").write_bytes(gzip.compress(os.urandom(3 << 20))[:-8] + bytes(8))
    (folder / "link").symlink_to("/etc/passwd")
    kinds = {"kern.log": ["kernel log"], "deeper/nothing.txt": [], "broken.gz": []}
    done = gpunodes("--from", str(folder), "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)["machines"][0]["files"]
    assert {file["path"].removeprefix(f"{folder}/"): file["kinds"] for file in found} == kinds
    assert [file["path"].rpartition("/")[2] for file in found if file["problem"]] == ["broken.gz"]
    names = [str(folder / "kern.log"), str(folder / "deeper" / "nothing.txt")]
    done = gpunodes("--from", *names)
    assert done.stderr.splitlines() == [f"{names[0]}: kernel log", f"{names[1]}: {NOT_RECOGNISED}"]


def test_text_that_is_no_log_is_reported_with_what_was_wanted(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    # The priority of a kernel line, in a binary file.
    path.write_bytes(b"nothing\n<5>\x93\x00no text\n")
    for given in (path, tmp_path):
        done = gpunodes("--from", str(given), "--json")
        (machine,) = json.loads(done.stdout)["machines"]
        assert machine["state"] == "unknown"
        assert [file["problem"] for file in machine["files"]] == [NOT_RECOGNISED]
        assert done.returncode == 3
    assert gpunodes("--from", str(path)).stderr == f"{path}: {NOT_RECOGNISED}\n"
    for number in range(20):
        (tmp_path / f"{number}.txt").write_bytes(b"nothing\n")
    assert gpunodes("--from", str(tmp_path)).stderr == f"21 files: {NOT_RECOGNISED}\n"


def test_the_name_of_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gpu-3"
    folder.mkdir()
    names = [f"aer-00{number}.log" for number in range(7)]
    for name in names:
        (folder / name).write_bytes(XID79)
    monkeypatch.chdir(folder)
    assert health.of_files(names).name == "aer-000.log and 6 other files, taken as one machine"
    two = ["../gpu-3/aer-000.log", "aer-001.log"]
    assert health.of_files(two).name == "aer-000.log and 1 other file, taken as one machine"
    assert [health.of_files([path]).name for path in (".", "../gpu-3/", str(folder))] == ["gpu-3"] * 3
    assert health.of_files(["/dev/null"]).name == "/dev/null"


def test_a_file_that_is_broken_late_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "log.gz").write_bytes(gzip.compress(os.urandom(3 << 20))[:-8] + bytes(8))
    done = gpunodes("--from", str(tmp_path / "log.gz"))
    assert (done.returncode, "log.gz cannot be unpacked" in done.stderr) == (2, True)


def test_a_file_that_is_named_as_a_machine_leads_to_from(tmp_path: Path) -> None:
    done = gpunodes(str(CASES / "load.log"), "-i", str(tmp_path / "none.yml"))
    assert done.returncode == 2
    assert f"`gpunodes health --from {CASES / 'load.log'}`" in done.stderr


def test_every_code_is_explained() -> None:
    for kind in ("xid", "sxid"):
        for row in tables.read(kind):
            meaning = health.explain(kind, int(row["code"]))
            assert meaning.code == int(row["code"])
            assert meaning.title
            assert meaning.advice
            assert "NVIDIA" in meaning.source


def test_standard_input() -> None:
    machine = json.loads(gpunodes("--from", "-", "--json", stdin=gzip.compress(XID79)).stdout)["machines"][0]
    assert (machine["name"], machine["state"], machine["xids"]) == ("standard input", "sick", [79])


def test_files_need_neither_ansible_nor_yaml() -> None:
    code = (
        "import sys\nfrom gpunodes.cli import main\n"
        f"sys.argv[1:] = ['health', '--json', '--from', {str(CASES / 'hung-frame.log')!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 3, end.code\n"
        "print(sorted({'ansible', 'ansible_runner', 'paramiko', 'yaml', 'jinja2', 'socket'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# --- real logs -------------------------------------------------------------------------------------------------------


def corpus() -> list[Path]:
    return sorted(CORPUS.glob("*/*.json"))


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of real logs is missing (../shared/corpus)")
def test_real_logs() -> None:
    wrong, rows = [], corpus()
    for case in rows:
        want = json.loads(case.read_text())["expected"]
        (log,) = [path for path in case.parent.glob(f"{case.stem}.*") if path.suffix != ".json"]
        verdict = health.of_files([str(log)])
        name = f"{case.parent.name}/{case.stem}"
        accepted = {want["expected_action"], *want.get("also_acceptable", ())}
        assert verdict.hung_in_driver == want["hung_nvidia"], name
        assert list(verdict.xids) == sorted(want["xids"]), name
        assert list(verdict.sxids) == sorted(want.get("sxids", [])), name
        if verdict.action.value not in accepted:
            wrong.append(name)
            modest = want["expected_action"] in {"none", "restart_app"}
            assert not (modest and verdict.action in {Action.REBOOT, Action.REPAIR}), name
    assert rows
    assert len(wrong) <= 0.03 * len(rows), wrong


FRAME = b"+0x1/0x1 [nvidia] "
LONG = {
    "one line of reports": (256, b"[1.0] x ", b"task\tx blocked for more " + FRAME),
    "lines of reports": (512, b"", b"task\tx blocked for more\n" + FRAME),
    "frames that need a page": (1024, b"", b"[1.0] task x blocked for more \n" + b"page_fault" * 6000 + FRAME + b"\n"),
    "blanks before a value": (256, b"==NVSMI LOG==\n", b" " * 4000 + b"x" * 90 + b"\n"),
    "blanks in a table": (512, b"| NVIDIA-SMI 610\n", b"| 1" + b" " * 4000 + b"x\n"),
    "empty documents": (2048, b"", b"<nvidia_smi_log></nvidia_smi_log>"),
    "brackets above a row": (256, b"", b"a," + b"[" * 2000 + b"\n" + b",[Unknown Error]\n" * 120),
}
"""KiB of a log, its beginning, and what is repeated."""


@pytest.mark.parametrize("name", LONG)
def test_a_log_that_is_made_to_cost_time_does_not(name: str) -> None:
    """A live machine may send 3 MiB: each of these took minutes or more then."""
    size, begin, unit = LONG[name]
    log = begin + unit * ((size << 10) // len(unit))
    began = time.process_time()
    judge.judge_files("gpu-1", [[log]], SiteRules())
    assert time.process_time() - began < 4


def test_a_marker_is_read_in_each_line_of_a_log_but_not_everywhere_in_a_text_of_markers() -> None:
    log, markers = Places(), Places()
    log.add(100_000 * 40)
    assert all(log.take(b" blocked ") for _ in range(100_000))
    markers.add(100_000 * 9)
    assert sum(markers.take(b" blocked ") for _ in range(100_000)) < 40_000
