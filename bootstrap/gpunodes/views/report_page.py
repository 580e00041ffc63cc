"""The report on a cluster as one page of HTML without scripts, made of the document ``gpunodes.report/1``.

Nearly every text in it may come from a machine. It is made printable and short before the template sees it, and jinja2
escapes it there: data becomes text of the page, never an element, an attribute's name, a class or an address.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpunodes.health.model import State
from gpunodes.model import printable
from gpunodes.views import report_parts as parts
from gpunodes.views.screen import duration

TEMPLATES = Path(__file__).parent / "templates"
LONGEST = 400
"""Characters of a text on the page; `--json` has it whole."""
_TONES = {
    "good": "healthy, ready, ok, repaired, done, passed, drained, on",
    "warn": "degraded, unknown, warning, not-repaired, unfinished, running, expired, cordoned, not-drained",
    "bad": "sick, hung, unreachable, not ready, error, failed, needs-repair, not healthy, giving-up, stopped, not read",
}
_TONE = {word: tone for tone, words in _TONES.items() for word in words.split(", ")}


def page(document: Mapping[str, Any]) -> str:
    """The page of a document."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"tone": tone, "stamp": stamp, "duration": duration, "plural": plural}
    return environment.get_template("report.html.j2").render(context(clean(document)))


def context(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the template reads."""
    pools = parts.pools(document["machines"])
    verdicts = parts.verdicts(document["health"] or ())
    certificates = parts.certificates(document["certificates"] or ())
    return {
        "report": document,
        "missing": {each["section"]: each for each in document["missing"]},
        "attention": parts.attention(document),
        "tiles": parts.tiles(document, certificates),
        "pools": pools,
        "map": parts.health_map(pools, verdicts),
        "verdicts": verdicts,
        "letters": {state.value: letter for state, letter in parts.LETTERS.items()},
        "states": parts.counted(document["health"] or ()),
        "healthy": State.HEALTHY.value,
        "versions": [parts.versions(each) for each in pools],
        "findings": parts.findings(document["findings"] or ()),
        "certificates": certificates,
        "strangers": [node for node in (document["cluster"] or {}).get("nodes", ()) if not node["machine"]],
        "timeline": parts.timeline((document["history"] or {}).get("entries", ())),
        "days": parts.days((document["history"] or {}).get("repairs", ())),
    }


def clean(value: Any) -> Any:
    """The same document with every text, keys too, on one printable line of at most ``LONGEST`` characters."""
    if isinstance(value, str):
        more = len(value) - LONGEST
        return printable(value) if more <= 0 else f"{printable(value[:LONGEST])}… ({more} more characters)"
    if isinstance(value, Mapping):
        return {clean(key): clean(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [clean(each) for each in value]
    return value


def tone(word: str) -> str:
    """The class of a state: one of a few, whatever the word is."""
    return _TONE.get(word, "plain")


def plural(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``; ``2 entries``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun.removesuffix('y')}ies" if noun.endswith("y") else f"{number:,} {noun}s"


def stamp(moment: object) -> str:
    """A time in seconds since 1970, or in ISO 8601, for display; "-" for none."""
    try:
        if isinstance(moment, str):
            found = dt.datetime.fromisoformat(moment)
        elif isinstance(moment, int | float):
            found = dt.datetime.fromtimestamp(moment, dt.UTC)
        else:
            return "-"
    except (ValueError, OverflowError, OSError):
        return "unreadable"
    return found.strftime("%Y-%m-%d %H:%M")
