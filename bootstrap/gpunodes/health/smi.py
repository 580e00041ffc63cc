"""Reads the output of ``nvidia-smi -q`` for each GPU, as text or XML; either can be part of a longer text.

Only the fields below are kept. Source of their names: nvidia-smi's own output, drivers 390 to 595 (nvsmi_device_v10 to
v13.dtd); of their meaning: nvidia-smi(1), NVML API reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.parsers import expat

from gpunodes.errors import WrongInput
from gpunodes.health.smi_table import Table, group

_FIELDS = (
    ("persistence", r"persistence_mode"),
    ("recovery", r"gpu_recovery_action"),
    ("reset_required", r"gpu_reset_status/reset_required"),
    ("drain_and_reset", r"gpu_reset_status/drain_and_reset_recommended"),
    ("hw_slowdown", r"clocks_(?:event|throttle)_reasons/hw_slowdown"),
    ("hw_thermal", r"clocks_(?:event|throttle)_reasons/(?:hw_slowdown/)?hw_thermal_slowdown"),
    ("power_brake", r"clocks_(?:event|throttle)_reasons/(?:hw_slowdown/)?hw_power_brake_slowdown"),
    ("ecc_volatile", r"ecc_errors/volatile/(?:[sd]ram_uncorrectable\w*|double_bit/total)"),
    ("ecc_aggregate", r"ecc_errors/aggregate/(?:[sd]ram_uncorrectable\w*|double_bit/total)"),
    ("sram_threshold", r"ecc_errors/aggregate/sram_threshold_exceeded"),
    ("channel_repair", r"ecc_errors/channel_repair_pending"),
    ("tpc_repair", r"ecc_errors/tpc_repair_pending"),
    ("unrepairable_memory", r"ecc_errors/unrepairable_memory"),
    ("pages_pending", r"retired_pages/pending\w*"),
    ("remap_pending", r"remapped_rows/pending"),
    ("remap_failure", r"remapped_rows/(?:failure|remapping_failure_occurred)"),
)
_PATHS = re.compile("|".join(f"(?P<{name}>{path})" for name, path in _FIELDS))
_COUNTED = {"ecc_volatile", "ecc_aggregate"}
_LOST = ("GPU is lost", "GPU requires reset")
_UNREAD = ("Unknown Error", "[Unknown Error]")
MANY_GPUS = 256
_DEPTH = 32
_LINE = 4096


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """One GPU as nvidia-smi reports it; ``address`` is in nvidia-smi's notation (``00000000:3B:00.0``)."""

    address: str
    values: Mapping[str, str] = field(default_factory=dict)

    def yes(self, name: str) -> bool:
        """Whether a field is set."""
        return self.values.get(name, "").lower() in {"yes", "active"}

    @property
    def unread(self) -> list[str]:
        """The kinds of values that nvidia-smi could not read."""
        return self.values.get("unread", "").split()

    def number(self, name: str) -> int:
        """A counter's value; 0 if it is not supported."""
        return int(self.values.get(name, "0"))


class Reader:
    """Finds nvidia-smi's output in a stream of bytes, fed piece by piece."""

    def __init__(self) -> None:
        self._gpus: dict[str, dict[str, str]] = {}
        self._rest = b""
        self._xml: _Xml | None = None
        self._text: _Text | None = None
        self._table: Table | None = None
        self._found = False
        self._entities = False

    def feed(self, data: bytes) -> None:
        """Take the next piece. Raises WrongInput for XML that declares entities or is nested too deeply."""
        data = self._rest + data
        whole = data.rfind(b"\n") + 1
        if len(data) - whole > _LINE:
            whole = len(data)
        self._rest = data[whole:]
        self._take(data[:whole])

    def finish(self) -> tuple[SmiGpu, ...] | None:
        """All GPUs, each by its last occurrence; None if there was no such output."""
        self._take(self._rest + b"\n")
        return tuple(SmiGpu(address, values) for address, values in self._gpus.items()) if self._found else None

    def missing(self) -> list[int]:
        """The numbers that have no row in the last plain table, but others after them: lost, or not requested."""
        return self._table.missing() if self._table else []

    def _take(self, data: bytes) -> None:
        place = 0
        while place < len(data):
            if self._xml:
                found = data.find(_Xml.END, place)
                end = len(data) if found < 0 else found + len(_Xml.END)
                if not self._xml.feed(data[place:end]) or found >= 0:
                    self._xml = None
                place = end
                continue
            begin = data.find(_Xml.BEGIN, place)
            before = data[place:] if begin < 0 else data[place:begin]
            self._take_text(before)
            self._entities = self._entities or b"<!ENTITY" in before
            if begin < 0:
                return
            if self._entities:
                raise WrongInput(
                    "the XML declares entities", "the unchanged output of `nvidia-smi -q -x`", "leave it out"
                )
            self._found = True
            self._xml = _Xml(self._gpus)
            place = begin

    def _take_text(self, data: bytes) -> None:
        if self._table is None and b"| NVIDIA-SMI " in data:
            self._table = Table()
        if self._text is None and b"==NVSMI LOG==" not in data and self._table is None:
            return
        for line in data.splitlines():
            if self._table and line.startswith(b"|"):
                self._take_row(self._table, line[:_LINE].decode("ascii", "replace"))
            if b"==NVSMI LOG==" in line:
                self._found = True
                self._text = _Text(self._gpus)
            elif self._text and not self._text.take(line[:_LINE].decode("ascii", "replace")):
                self._text = None

    def _take_row(self, table: Table, line: str) -> None:
        row = table.take(line)
        if row is not None:
            self._found = True
            _new(self._gpus, row[0]).update(row[1])


def _keep(gpu: dict[str, str], path: str, value: str) -> None:
    """Keep a field's value if it is one of `_FIELDS`."""
    value = value.strip()
    if value in _LOST:
        gpu["lost"] = value
    if value in _UNREAD and (kind := group(path)) and kind not in gpu.get("unread", "").split():
        gpu["unread"] = f"{gpu.get('unread', '')} {kind}".strip()
    found = _PATHS.fullmatch(path)
    name = found.lastgroup if found else None
    if name is None:
        return
    if name in _COUNTED:
        if re.fullmatch("[0-9]{1,18}", value):
            gpu[name] = str(int(gpu.get(name, "0")) + int(value))
    elif name not in gpu or value.lower() in {"yes", "active"}:
        gpu[name] = value[:80]


def _new(gpus: dict[str, dict[str, str]], address: str) -> dict[str, str]:
    """New fields for a GPU; they replace those of its earlier occurrence."""
    fields: dict[str, str] = {}
    if re.fullmatch(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9]", address) and len(gpus) < MANY_GPUS:
        gpus[address] = fields
    return fields


class _Text:
    """The lines after ``NVSMI LOG``: keys with values below section names, nested by indentation."""

    _GPU = re.compile(r"GPU ([0-9A-Fa-f:.]+)\s*")
    _FIELD = re.compile(r"( *+)([^:]{1,80}?)\s{0,200}(?::\s*+(.*))?")
    _HEAD = re.compile(r"[A-Z][A-Za-z ]{1,30}?\s{1,200}:\s.*|HIC Info\b.*|\s*")
    """Lines about the driver before the GPUs: their names change."""

    def __init__(self, gpus: dict[str, dict[str, str]]) -> None:
        self._gpus = gpus
        self._gpu: dict[str, str] = {}
        self._path: list[tuple[int, str]] = []

    def take(self, line: str) -> bool:
        """Take a line; False if it no longer belongs to nvidia-smi's output."""
        if found := self._GPU.fullmatch(line):
            self._gpu = _new(self._gpus, found[1])
            self._path.clear()
            return True
        if self._HEAD.fullmatch(line):
            return True
        found = self._FIELD.fullmatch(line)
        if found is None:
            return line.startswith(" ")
        indent, name, value = len(found[1]), found[2], found[3]
        if indent == 0:
            return False
        while self._path and self._path[-1][0] >= indent:
            self._path.pop()
        self._path.append((indent, re.sub(r"[^a-z0-9]+", "_", name.lower())))
        if value is not None and len(self._path) <= _DEPTH:
            _keep(self._gpu, "/".join(part for _, part in self._path), value)
        return True


class _Xml:
    """One ``<nvidia_smi_log>``. Parsing starts at that element, so a document type or entities cannot be declared."""

    BEGIN = b"<nvidia_smi_log"
    END = b"</nvidia_smi_log>"

    def __init__(self, gpus: dict[str, dict[str, str]]) -> None:
        self._gpus = gpus
        self._gpu: dict[str, str] = {}
        self._path: list[str] = []
        self._value = ""
        self._parser = expat.ParserCreate("UTF-8")
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._characters

    def feed(self, data: bytes) -> bool:
        """Parse the next piece; False if the document is malformed here: then only the part before it counts."""
        try:
            self._parser.Parse(data)
        except expat.ExpatError:
            return False
        return True

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        if len(self._path) >= _DEPTH:
            raise WrongInput("the XML is nested too deeply", "the output of `nvidia-smi -q -x`", "leave it out")
        self._path.append(name[:80])
        self._value = ""
        if name == "gpu" and len(self._path) == 2:  # noqa: PLR2004 - below the root
            self._gpu = _new(self._gpus, attributes.get("id", ""))

    def _characters(self, data: str) -> None:
        if len(self._value) < _LINE:
            self._value += data

    def _end(self, name: str) -> None:
        leaf = re.sub(r"^(?:clocks_(?:event|throttle)_reason|remapped_row)_", "", name)
        _keep(self._gpu, "/".join((*self._path[2:-1], leaf)), self._value)
        self._path.pop()
        self._value = ""
