"""The page of a report with the keyboard alone, in a real browser whose keys are pressed by the DevTools protocol.

Skipped without Chromium, as test_report_browser.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from gpunodes.views import report_page

from tests import report_example as example
from tests.unit.views.test_report_browser import CHROMIUM, DARK, headless

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)"),
]

KEYS: dict[str, dict[str, Any]] = {
    "Tab": {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9},
    "Enter": {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
    "Space": {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32, "text": " "},
}
SHIFT = 8
# A shell cannot move descriptors of several digits.
MOVE = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"
LEAST_CONTRAST = 3.0
"""WCAG 2.2, success criterion 1.4.11 (AA): what shows the focus, against what is around it."""
# The elements that take keys, in the order of the page; those in a closed <details> cannot be reached, nor seen.
PAGE = """
const reached = () => [...document.querySelectorAll("a[href], summary")].filter(each =>
  each.checkVisibility({contentVisibilityAuto: true}) && !closed(each));
const closed = each => { for (let up = each.parentElement; up; up = up.parentElement)
  if (up.tagName == "DETAILS" && !up.open && !(each.tagName == "SUMMARY" && each.parentElement == up)) return true;
  return false; };
const rgb = text => text.match(/[0-9.]+/g).map(Number);
const light = colour => { const [r, g, b] = colour.slice(0, 3).map(each => each / 255)
  .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = element => { for (let each = element; each; each = each.parentElement) {
  const colour = rgb(getComputedStyle(each).backgroundColor);
  if (colour.length < 4 || colour[3] > 0.99) return colour; } return [255, 255, 255]; };
const focus = () => { const own = document.activeElement;
  if (!own || own == document.body) return null;
  const style = getComputedStyle(own), box = own.getBoundingClientRect();
  const both = [light(rgb(style.outlineColor)), light(ground(own.parentElement))];
  return {index: reached().indexOf(own), tag: own.tagName, text: own.textContent.trim().slice(0, 40),
    width: style.outlineStyle == "none" ? 0 : parseFloat(style.outlineWidth),
    contrast: (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05),
    seen: box.width > 1 && box.height > 1 && box.bottom > 0 && box.top < innerHeight,
    open: own.tagName == "SUMMARY" ? own.parentElement.open : null, hash: location.hash}; };
"""


class Page:
    """A page in a browser, which gets the keys that a user presses."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._session = ""

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result. Messages end with a zero byte."""
        number = next(self._numbers)
        message = {
            "id": number,
            "method": method,
            "params": given,
            **({"sessionId": self._session} if self._session else {}),
        }
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            text = bytearray()
            while (each := self._answers.read(1)) != b"\0":
                assert each, "the browser has ended"
                text += each
            answer = json.loads(text)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def open(self, path: Path) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.call("Emulation.setDeviceMetricsOverride", width=1000, height=700, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.as_uri())
        while self.value("location.href + document.readyState") != path.as_uri() + "complete":
            pass
        self.value(PAGE + "0")

    def value(self, expression: str) -> Any:
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def press(self, name: str, modifiers: int = 0) -> dict[str, Any] | None:
        """Press a key; what has the focus afterwards."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, modifiers=modifiers, **KEYS[name])
        found: dict[str, Any] | None = self.value("focus()")
        return found


@contextlib.contextmanager
def opened(folder: Path, *words: str) -> Iterator[Page]:
    """The example's page in a browser, which reads commands from descriptor 3 and writes to 4."""
    file = folder / "report.html"
    file.write_text(report_page.page(example.document()))
    given, taken = os.pipe(), os.pipe()
    line = [
        sys.executable,
        "-c",
        MOVE,
        str(given[0]),
        str(taken[1]),
        *headless(folder, "--remote-debugging-pipe", *words),
    ]
    with (folder / "browser.log").open("wb") as log:
        browser = subprocess.Popen(line, pass_fds=(given[0], taken[1]), stdout=log, stderr=log)
    os.close(given[0])
    os.close(taken[1])
    try:
        with os.fdopen(given[1], "wb") as commands, os.fdopen(taken[0], "rb") as answers:
            page = Page(commands, answers)
            page.open(file)
            yield page
            page.call("Browser.close")
    finally:
        browser.kill()
        browser.wait(60)


@pytest.mark.parametrize("scheme", DARK)
def test_tab_reaches_everything_in_order_and_the_focus_is_seen(tmp_path: Path, scheme: str) -> None:
    with opened(tmp_path, *DARK[scheme]) as page:
        many = page.value("reached().length")
        assert many > 30
        found = [page.press("Tab") for _ in range(many)]
        assert [each and each["index"] for each in found] == list(range(many))
        for each in found:
            assert each
            assert each["seen"], each
            assert each["width"] >= 2, each
            assert each["contrast"] >= LEAST_CONTRAST, each
        # And back, without a trap.
        back = [page.press("Tab", SHIFT) for _ in range(3)]
        assert [each and each["index"] for each in back] == [many - 2, many - 3, many - 4]


def test_the_first_link_skips_what_comes_before_the_machines_that_need_attention(tmp_path: Path) -> None:
    with opened(tmp_path) as page:
        first = page.press("Tab")
        assert first
        assert first["text"] == "Skip to what needs attention"
        page.press("Enter")
        assert page.value("location.hash") == "#attention"
        page.press("Tab")
        assert page.value('!!document.activeElement.closest("#attention, #attention ~ section")')
        assert page.value('!document.activeElement.closest("header, .tiles")')


def test_enter_and_space_open_and_close_what_can_be_opened(tmp_path: Path) -> None:
    """What a closed part hides is no stop; in an open one it is the next."""
    with opened(tmp_path) as page:
        many = page.value("document.querySelectorAll('summary').length")
        assert many > 5
        opened_ones = 0
        while opened_ones < many:
            found = page.press("Tab")
            assert found, f"{opened_ones} of {many} can be reached"
            if found["tag"] != "SUMMARY":
                continue
            before = found["open"]
            states = [page.press(key) for key in ("Enter", "Space", "Enter", "Space")]
            assert [each and each["open"] for each in states] == [not before, before, not before, before]
            if not before:
                page.press("Space")
            opened_ones += 1
        assert page.value("[...document.querySelectorAll('details')].every(each => each.open)")


def test_enter_on_a_machine_leads_to_its_verdict(tmp_path: Path) -> None:
    """The next stop is what opens that verdict."""
    with opened(tmp_path) as page:
        for _ in range(page.value("reached().length")):
            page.press("Tab")
            if page.value(
                "!!document.activeElement.closest('.map') && "
                "!!document.querySelector(`details${document.activeElement.hash}`)"
            ):
                break
        page.press("Enter")
        target = page.value("location.hash")
        found = page.press("Tab")
        assert found
        assert found["tag"] == "SUMMARY"
        assert page.value("'#' + document.activeElement.parentElement.id") == target
