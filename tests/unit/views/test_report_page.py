"""The page of a report: what it shows, that no text of a machine becomes a part of it, and that it stays small."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest
from gpunodes.health.model import Verdict
from gpunodes.operations.report import Section
from gpunodes.views import report_page, report_parts
from gpunodes.views.report import MOST_ENTRIES, SECTIONS

from tests import report_example as example
from tests.report_example import ATTACKS, WORDS, replaced

VOID = {"meta", "link"}


class Page(HTMLParser):
    """The elements and texts of a page; an element that is not closed fails the test."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def shapes(self) -> Counter[tuple[str, ...]]:
        """How many elements there are of each name with each set of attributes."""
        return Counter((tag, *sorted(attributes)) for tag, attributes in self.elements)


def page(document: dict[str, Any]) -> Page:
    return Page(report_page.page(document))


def test_no_element_and_no_attribute_comes_from_data() -> None:
    found = page(replaced(ATTACKS))
    assert found.shapes() == page(replaced(WORDS)).shapes()
    for tag, attributes in found.elements:
        assert not [name for name in attributes if name.startswith("on") or name in {"style", "src", "srcset"}]
        assert re.fullmatch(r"#[a-z0-9-]+|data:,", attributes.get("href") or "#x"), attributes
        for name in ("class", "id", "role", "scope", "data-label", "rel", "name"):
            assert re.fullmatch(r"[A-Za-z0-9 -]*", attributes.get(name) or ""), (tag, attributes)
    assert not {"script", "img", "iframe", "form", "object", "embed", "base"} & {tag for tag, _ in found.elements}


def test_hostile_text_is_shown_as_text_in_one_short_line() -> None:
    made = report_page.page(replaced(ATTACKS))
    assert [character for character in made if not character.isprintable() and character != "\n"] == []
    found = Page(made)
    for attack in ("<script>alert(1)</script>", "{{ 7 * 7 }}{% for x in (1, 2) %}", "javascript:alert(1)"):
        assert attack in found.text
    assert "x" * 1000 not in made
    assert "more characters)" in found.text
    # It can be written, whatever a machine reported.
    made.encode()


def test_the_page_loads_nothing_and_refuses_to() -> None:
    made = report_page.page(example.document())
    found = Page(made)
    policy = [each for tag, each in found.elements if tag == "meta" and "http-equiv" in each]
    assert [each["content"] for each in policy] == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert re.findall(r"url\([^)]*\)", made) == ["url(#hatch)"]
    assert not re.search(r"@import|https?:|<script|//[a-z]", made)


def test_every_link_has_a_target_and_every_id_is_one_element() -> None:
    for machines in (14, 120):
        found = page(example.document(machines))
        ids = [each["id"] for _, each in found.elements if "id" in each]
        assert len(ids) == len(set(ids))
        links = {str(each["href"])[1:] for tag, each in found.elements if tag == "a"}
        assert links <= set(ids)


def test_what_the_page_shows() -> None:
    text = page(example.document()).text
    for expected in (
        "Cluster 10.20.0.1",
        "Endpoint k8s.example.net:6443",
        "train-03 hung: A task is stuck in the NVIDIA driver: only a reboot ends it; its node is not ready",
        "os_acquire_rwlock_write+0x35/0x50 [nvidia]",
        "Xid (PCI:0000:9d:00): 79",
        "8 of 8 GPUs respond, 2,184 kernel lines read",
        "v1.36.3 \N{MULTIPLICATION SIGN} 4",
        "a driver of branch 570.86 or newer with open modules",
        "`gpunodes runtime upgrade MACHINE` drains the node",
        "infer-04, infer-05, infer-06",
        "legacy-1",
        "first of 3 machines",
        "stopped runtime containerd 2.2",
        "2 of 14 machines done, 10 waiting",
        "train-05 replace a fan",
        "infer 5 of 6 on, from 2 to 6",
        "train-08 repair needs-repair in 7 min 54 s",
        "8 succeeded",
    ):
        assert expected in text, expected


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_that_failed_says_why(name: str) -> None:
    failed: dict[str, Any] = {name: Section(why="no response from <b>cp-1</b>", failed=True)}
    document = example.document(**failed)
    assert document[name] is None
    found = page(document)
    assert "Not read: no response from <b>cp-1</b>." in found.text
    place, title = report_parts.PLACES[name]
    assert f"error {title} not read: no response" in found.text
    assert ("section", place) in {(tag, each.get("id")) for tag, each in found.elements}


def test_a_report_of_nothing() -> None:
    """Every source failed, and no machine is known."""
    failed: dict[str, Any] = {name: Section(why="no control plane responds", failed=True) for name in SECTIONS}
    document = example.document(**failed, machines=())
    assert len(document["missing"]) == len(SECTIONS)
    assert page(document).text.count("Not read:") == len(SECTIONS)


def test_what_was_left_out_is_no_error() -> None:
    text = page(example.document(health=Section(why="left out by --no-scan"))).text
    assert "Nothing to show: left out by --no-scan." in text
    assert "Health not read" not in text


def test_a_healthy_fleet_needs_no_attention() -> None:
    document = example.document()
    for name in ("findings", "maintenance"):
        document[name] = []
    document["health"] = [each for each in document["health"] if each["state"] == "healthy"]
    document["cluster"] |= {"warnings": [], "nodes": [each for each in document["cluster"]["nodes"] if each["ready"]]}
    document["rollout"]["rollout"] = None
    text = page(document).text
    assert "Attention Nothing in what could be read." in text
    assert "No conflict." in text
    assert "No roll-out is unfinished." in text


def test_findings_that_differ_only_in_the_machine_are_one_row() -> None:
    def finding(machine: str, remedy: str) -> dict[str, str]:
        found = {"check": "runtime", "fact": "old", "limit": "", "severity": "warning"}
        return {**found, "machine": machine, "remedy": remedy}

    rows = report_parts.findings([finding(name, f"reset {name}") for name in ("gpu-1", "gpu-11", "gpu-2")])["rows"]
    assert [(row["remedy"], row["machines"]) for row in rows] == [("reset MACHINE", ["gpu-1", "gpu-11", "gpu-2"])]
    (alone,) = report_parts.findings([finding("gpu-1", "reset gpu-1, not gpu-11")])["rows"]
    assert alone["remedy"] == "reset gpu-1, not gpu-11"
    two = report_parts.findings([finding("gpu-1", "reset gpu-11"), finding("gpu-2", "reset gpu-2")])["rows"]
    assert len(two) == 2


def test_a_long_history_is_cut() -> None:
    (entry,) = [each for each in example.report().history.value or () if each.kind == "burn-in"]
    document = example.document(history=Section([entry] * (MOST_ENTRIES + 500)))
    assert len(document["history"]["entries"]) == MOST_ENTRIES
    found = page(document)
    assert f"gpunodes history has all {MOST_ENTRIES + 500:,} entries" in found.text
    assert found.text.count("burn-in dcgmi") == report_parts.MANY_EVENTS


def test_the_repairs_of_30_days_are_counted_in_the_whole_history() -> None:
    """Before the newest entries of a large fleet, which are the only ones on the page."""
    entries = list(example.report().history.value or ())
    burn_in = next(each for each in entries if each.kind == "burn-in")
    before = example.document()["history"]["repairs"]
    document = example.document(history=Section([*entries, *[burn_in] * (MOST_ENTRIES + 1)]))
    assert {each["kind"] for each in document["history"]["entries"]} == {"burn-in"}
    assert document["history"]["repairs"] == before
    assert (len(before), before[-1]["day"]) == (30, "2026-11-25")
    repaired, other = (sum(each[name] for each in before) for name in ("repaired", "other"))
    assert min(repaired, other) > 0
    found = page(document)
    assert f"Repairs {repaired + other} in 30 days, {repaired} succeeded" in found.text
    assert any(tag == "rect" and each.get("class") == "bar-good" for tag, each in found.elements)


def test_a_repair_that_did_not_end_is_unfinished() -> None:
    entries = [each for each in example.document()["history"]["entries"] if each["machine"] == "train-06"][:-1]
    (day,) = report_parts.timeline(entries)["days"]
    assert [(each["title"], each["outcome"]) for each in day[1]] == [("repair", "unfinished")]


def test_times_that_no_calendar_has() -> None:
    assert report_page.stamp(1e300) == report_page.stamp(float("nan")) == "unreadable"
    assert (report_page.stamp("never"), report_page.stamp(None)) == ("unreadable", "-")
    assert report_page.stamp("2026-11-25T14:30:00+00:00") == report_page.stamp(example.NOW) == "2026-11-25 14:30"


@pytest.mark.long
def test_a_large_fleet_has_a_page_of_about_a_kilobyte_for_each_machine_and_takes_time_in_proportion() -> None:
    """A ratio, so that the speed of this machine does not matter: 4 times the machines, at most 10 times the time."""

    def rendered(machines: int) -> tuple[int, float]:
        document = example.document(machines)
        began = time.process_time()
        return len(report_page.page(document)), time.process_time() - began

    small, again, large = rendered(250), rendered(250), rendered(1000)
    assert large[0] < 1_200_000
    assert large[0] - small[0] < 750 * 1_100
    assert large[1] < 10 * min(small[1], again[1])


@pytest.mark.long
def test_any_amount_of_evidence_makes_a_page_of_limited_size() -> None:
    finding = dict(example.document()["health"][5]["findings"][0], evidence=["<" * 5000] * 50, message='"' * 5000)
    document = example.document()
    for verdict in document["health"]:
        verdict |= {"state": "sick", "findings": [finding] * 50}
    made = report_page.page(document)
    most = report_parts.MANY_FINDINGS * (report_parts.MANY_LINES + 3) * (report_page.LONGEST * 5 + 300)
    assert len(made) < len(document["health"]) * most + 200_000
    assert "And 38 findings more" in Page(made).text


def test_the_map_of_a_large_fleet_has_letters_and_links_only_for_what_is_not_healthy() -> None:
    found = page(example.document(300))
    cells = [(tag, each) for tag, each in found.elements if (each.get("class") or "").startswith("cell ")]
    links = [each for tag, each in cells if tag == "a"]
    assert len(cells) > 300
    assert len(links) == sum(each.state != "healthy" for each in verdicts(300))
    assert all(each.get("title") for each in links)


def verdicts(machines: int) -> Sequence[Verdict]:
    return example.report(machines).health.value or ()
