"""The parts of the page of a report, from its document: what is counted, grouped, ordered and left out. Pure."""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpunodes.ansible.module_utils.certificates import SOON_DAYS
from gpunodes.health.model import State
from gpunodes.views.health_map import LETTERS

__all__ = ["LETTERS"]

Row = Mapping[str, Any]

MANY_NAMES = 60
"""Machines of a map whose cells have names."""
MANY_FINDINGS = 12
"""Findings of a verdict on the page."""
MANY_LINES = 8
"""Lines of evidence of a finding."""
MANY_CONFLICTS = 200
MANY_EVENTS = 150
MANY_ENTRIES = 30
"""Entries of one event of the time line."""
MANY_CERTIFICATES = 100
MANY_NOTES = 12
"""Lines about what needs attention."""
NO_POOL = "no pool"
_RANK = {state.value: state.rank for state in State}
_FINE = {State.HEALTHY.value, State.OFF.value}
_BAD = {State.SICK.value, State.HUNG.value, State.UNREACHABLE.value}
_OWN_NAME = "MACHINE"
_KEYS = ("kubernetes", "os", "kernel", "runtime", "driver", "cuda", "cudnn")


def pools(machines: Sequence[Row]) -> list[dict[str, Any]]:
    """The machines by pool, those without one last."""
    found: dict[str, list[Row]] = {}
    for machine in machines:
        found.setdefault(machine["pool"], []).append(machine)
    ordered = sorted(found.items(), key=lambda each: (not each[0], each[0]))
    return [{"name": name or NO_POOL, "machines": each} for name, each in ordered]


def versions(pool: Row) -> dict[str, Any]:
    """The versions in a pool, with the number of machines of each, the most frequent first."""
    machines = pool["machines"]
    gpus: Counter[str] = Counter()
    for machine in machines:
        gpus.update(machine["gpus"])
    counts = {key: Counter(machine[key] for machine in machines if machine[key]) for key in _KEYS}
    return {
        "name": pool["name"],
        "machines": len(machines),
        "gpus": gpus.most_common(),
        **{key: found.most_common(10) for key, found in counts.items()},
    }


def counted(verdicts: Sequence[Row]) -> list[tuple[str, int]]:
    """The number of machines in each state, the best first."""
    found = Counter(each["state"] for each in verdicts)
    return [(state, found[state]) for state in sorted(found, key=lambda each: _RANK.get(each, 0))]


def verdicts(found: Sequence[Row]) -> list[dict[str, Any]]:
    """The verdicts, the worst first, each with the id of its place on the page, and with limited evidence."""
    ordered = sorted(found, key=lambda each: (-_RANK.get(each["state"], 0), each["name"]))
    return [
        {
            **each,
            "id": f"v{number}",
            "basis": _basis(each),
            "findings": [
                {**one, "evidence": one["evidence"][:MANY_LINES], "more": len(one["evidence"]) - MANY_LINES}
                for one in each["findings"][:MANY_FINDINGS]
            ],
            "more": len(each["findings"]) - MANY_FINDINGS,
        }
        for number, each in enumerate(ordered)
    ]


def _basis(verdict: Row) -> str:
    """What a verdict is based on, or what it lacks."""
    if verdict["wanted"]:
        return str(verdict["wanted"])
    lines, seen, expected = verdict["kernel_lines"], verdict["gpus"]["seen"], verdict["gpus"]["expected"]
    parts = [f"{seen} of {expected} GPUs respond" if expected else f"{seen} GPUs respond"] if seen is not None else []
    parts += [f"{lines:,} kernel lines read"] if lines else []
    return ", ".join(parts)


def health_map(found: Sequence[Row], verdicts: Sequence[Row]) -> list[dict[str, Any]]:
    """The cells of the map by pool, in the inventory's order; cells of a small fleet have names."""
    by_name = {each["name"]: each for each in verdicts}
    made = []
    for pool in found:
        cells = [by_name[machine["name"]] for machine in pool["machines"] if machine["name"] in by_name]
        healthy = sum(each["state"] in _FINE for each in cells)
        made.append({"name": pool["name"], "cells": cells, "healthy": healthy, "named": len(by_name) <= MANY_NAMES})
    return [each for each in made if each["cells"]]


def findings(found: Sequence[Row]) -> dict[str, Any]:
    """The findings of preflight, errors first. Those that differ only in the machine's name are one row."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in found:
        texts = {key: each[key] for key in ("fact", "limit", "remedy")}
        own = re.compile(rf"(?<![\w.-]){re.escape(each['machine'])}(?![\w-])") if each["machine"] else None
        same = tuple(own.sub(_OWN_NAME, text) if own else text for text in texts.values())
        row = rows.setdefault((each["severity"], each["check"], *same), {**each, "machines": []})
        if row["machines"]:
            row |= dict(zip(texts, same, strict=True))
        row["machines"].append(each["machine"])
    ordered = sorted(rows.values(), key=lambda row: (row["severity"] != "error", row["check"] != "gpu", row["check"]))
    severities = Counter(each["severity"] for each in found)
    return {
        "rows": ordered[:MANY_CONFLICTS],
        "more": max(0, len(ordered) - MANY_CONFLICTS),
        "errors": severities["error"],
        "warnings": severities["warning"],
    }


def certificates(machines: Sequence[Row]) -> dict[str, Any]:
    """When certificates end: the first of each name, those that need attention, and machines that did not report."""
    rows = [{**each, "machine": machine["machine"]} for machine in machines for each in machine["certificates"]]
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    firsts = [(min(same, key=_end), len(same)) for same in by_name.values()]
    ends = [{**first, "machines": number} for first, number in firsts if first["days"] is not None]
    soon = [row for row in rows if row["days"] is None or row["days"] < SOON_DAYS]
    return {
        "ends": sorted(ends, key=_end),
        "soon": sorted(soon, key=_end)[:MANY_CERTIFICATES],
        "more": max(0, len(soon) - MANY_CERTIFICATES),
        "silent": [machine for machine in machines if machine["cause"]],
    }


def _end(certificate: Mapping[str, Any]) -> float:
    return float("inf") if certificate["not_after"] is None else float(certificate["not_after"])


def timeline(entries: Sequence[Row]) -> dict[str, Any]:
    """What happened, by day, the newest first; the entries of one repair or roll-out of a machine are one event."""
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for number, each in enumerate(entries):
        key = (each["repair"], each["machine"]) if each["repair"] else (str(number),)
        grouped.setdefault(key, []).append(each)
    events = sorted((_event(each) for each in grouped.values()), key=lambda each: -float(each["time"]))
    made: dict[str, list[dict[str, Any]]] = {}
    for event in events[:MANY_EVENTS]:
        made.setdefault(_day(event["time"]).isoformat(), []).append(event)
    return {"days": list(made.items()), "more": max(0, len(events) - MANY_EVENTS)}


def _event(entries: Sequence[Row]) -> dict[str, Any]:
    """One event: a repair, or a roll-out on a machine, with its entries; or a single entry."""
    first, last = entries[0], entries[-1]
    kinds = {each["kind"] for each in entries}
    repair = first["repair"] and "rollout" not in kinds
    if repair:
        end = next((each for each in entries if each["kind"] == "end"), None)
        title, outcome = "repair", end["outcome"] if end else "unfinished"
        detail = (end or last)["detail"]
    else:
        # The last entry of a roll-out has its outcome.
        title = last["what"] if first["kind"] == "rollout" else f"{first['kind']} {first['what']}"
        outcome, detail = last["outcome"], last["detail"]
    return {
        "time": first["time"],
        "seconds": last["seconds"] if repair and "end" in kinds else 0,
        "machine": first["machine"],
        "title": title,
        "outcome": outcome,
        "detail": detail,
        "by": first["by"],
        "entries": entries[:MANY_ENTRIES] if len(entries) > 1 or first["evidence"] else [],
    }


def days(repairs: Sequence[Row]) -> dict[str, Any]:
    """The chart of the repairs that ended on each day: those that succeeded, and the others."""
    return {
        "bars": [{"day": each["day"], "good": each["repaired"], "bad": each["other"]} for each in repairs],
        "most": max((each["repaired"] + each["other"] for each in repairs), default=0),
        "repaired": sum(each["repaired"] for each in repairs),
        "other": sum(each["other"] for each in repairs),
    }


def _day(moment: float) -> dt.date:
    return dt.datetime.fromtimestamp(moment, dt.UTC).date()


def tiles(document: Row, certificates: Row) -> list[dict[str, str]]:
    """The numbers at the top: label, value, what it means, the section that it leads to, and its tone."""
    return list(_tiles(document, certificates))


def _tile(label: str, value: object, note: str, section: str, tone: str) -> dict[str, str]:
    return {"label": label, "value": str(value), "note": note, "section": section, "tone": tone}


def _tiles(document: Row, certificates: Row) -> Iterator[dict[str, str]]:
    cluster, health, found = document["cluster"], document["health"], document["findings"]
    if cluster is not None:
        nodes = cluster["nodes"]
        ready = sum(node["ready"] for node in nodes)
        off = f"ready, {len(cluster['off'])} off" if cluster["off"] else "ready"
        yield _tile("Nodes", f"{ready} of {len(nodes)}", off, "cluster", "good" if ready == len(nodes) else "bad")
    if health is not None:
        fine = sum(each["state"] == State.HEALTHY.value for each in health)
        states = ", ".join(f"{number} {state}" for state, number in reversed(counted(health)) if state not in _FINE)
        tone = "bad" if any(each["state"] in _BAD for each in health) else "warn" if states else "good"
        yield _tile("Health", f"{fine} of {len(health)}", f"healthy{'; ' + states if states else ''}", "health", tone)
    gpus = sum(number for machine in document["machines"] for number in machine["gpus"].values())
    if gpus:
        products = {product for machine in document["machines"] for product in machine["gpus"]}
        yield _tile(
            "GPUs",
            f"{gpus:,}",
            next(iter(products)) if len(products) == 1 else f"{len(products)} products",
            "machines",
            "plain",
        )
    if found is not None:
        counts = Counter(each["severity"] for each in found)
        tone = "bad" if counts["error"] else "warn" if counts["warning"] else "good"
        yield _tile("Conflicts", counts["error"], f"and {counts['warning']} warnings", "conflicts", tone)
    if ends := certificates["ends"]:
        left = ends[0]["days"]
        tone = "good" if left >= SOON_DAYS else "bad" if left < 0 else "warn"
        yield _tile("First certificate ends", f"{left} days", ends[0]["name"], "certificates", tone)
    if document["history"] is not None:
        chart = days(document["history"]["repairs"])
        yield _tile(
            "Repairs",
            chart["repaired"] + chart["other"],
            f"in {len(chart['bars'])} days, {chart['repaired']} succeeded",
            "repairs",
            "plain",
        )


def attention(document: Row) -> dict[str, Any]:
    """What needs attention, errors first: tone, text, and the section with the details."""
    notes = sorted(_notes(document), key=lambda each: each["tone"] != "bad")
    return {"notes": notes[:MANY_NOTES], "more": max(0, len(notes) - MANY_NOTES)}


def _note(tone: str, subject: str, text: str, section: str) -> dict[str, str]:
    return {"tone": tone, "subject": subject, "text": text, "section": section}


def _notes(document: Row) -> Iterator[dict[str, str]]:
    for each in document["missing"]:
        if each["failed"]:
            yield _note("bad", PLACES[each["section"]][1], f"not read: {each['why']}", PLACES[each["section"]][0])
    cluster, scaled = document["cluster"] or {}, document["autoscale"] or {}
    nodes = {
        node["machine"] or node["name"]: f"its node is not ready: {node['reason']}"
        for node in cluster.get("nodes", ())
        if not node["ready"]
    }
    for verdict in document["health"] or ():
        if verdict["state"] not in _FINE:
            why = verdict["findings"][0]["message"] if verdict["findings"] else verdict["wanted"] or ""
            state, node = f"{verdict['state']}{': ' if why else ''}{why}", nodes.pop(verdict["name"], "")
            tone = "bad" if node or verdict["state"] in _BAD else "warn"
            yield _note(tone, verdict["name"], f"{state.rstrip('.')}; {node}" if node else state, "health")
    for name, node in nodes.items():
        yield _note("bad", name, node, "cluster")
    if errors := sum(each["severity"] == "error" for each in document["findings"] or ()):
        yield _note("bad", "Conflicts", f"{errors} of the plan would stop a join or an installation", "conflicts")
    for warning in cluster.get("warnings", ()):
        yield _note("warn", "Control planes", warning, "cluster")
    for member in cluster.get("etcd", ()):
        if not member["healthy"]:
            yield _note("bad", "etcd", f"the member {member['name'] or member['id']} is not healthy", "cluster")
    yield from _work(document, scaled)


def _work(document: Row, scaled: Row) -> Iterator[dict[str, str]]:
    """What needs attention of roll-outs and the autoscaler."""
    rollout = (document["rollout"] or {}).get("rollout") or {}
    problem = (document["rollout"] or {}).get("problem") or rollout.get("stopped")
    if problem:
        yield _note("bad", "Roll-out", f"{rollout.get('work', 'its record')}: {problem}", "work")
    if scaled and not scaled["running"]:
        yield _note("bad", "Autoscaler", "it does not run: no machine is switched on or off", "scaling")
    for machine in scaled.get("machines", ()):
        if machine["phase"] in {"failed", "giving-up"}:
            yield _note("bad", machine["node"], f"{machine['phase']}: {machine['reason']}", "scaling")


PLACES = {
    "cluster": ("cluster", "Cluster"),
    "certificates": ("certificates", "Certificates"),
    "findings": ("conflicts", "Conflicts"),
    "health": ("health", "Health"),
    "history": ("repairs", "Repairs"),
    "rollout": ("work", "Roll-outs"),
    "maintenance": ("work", "Maintenance"),
    "autoscale": ("scaling", "Scaling"),
}
"""The place of each section on the page, and its title."""
