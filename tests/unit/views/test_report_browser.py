"""The page of a report in a real browser: widths, both colour schemes, contrast, and an empty console.

Skipped without Chromium, which `make test` installs, but not `make setup`: it has 400 MB with its libraries. What needs
no browser is in test_report_page.py. `GPUNODES_REPORT_SHOTS=FOLDER` keeps the pictures.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from gpunodes.operations.report import Section
from gpunodes.views import report_page
from gpunodes.views.report import SECTIONS

from tests import report_example as example
from tests.report_example import ATTACKS, replaced

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)"),
]

PHONES = (320, 360, 400)
WIDTHS = (*PHONES, 800, 1200)
DARK: Mapping[str, list[str]] = {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}
LEAST_CONTRAST = 4.5
"""WCAG 2.2, success criterion 1.4.3 (AA), for text of any size."""
# A frame is a viewport of its own, of any width; the page itself has no script, so another page measures it.
FRAMES = """<!doctype html><meta name="color-scheme" content="light dark">
<style>html, body {margin: 0} iframe {border: 0; display: block}</style>
%s
<pre id="measured"></pre>
<script>
const rgb = text => text.match(/[0-9.]+/g).map(Number);
const light = colour => {
  const [r, g, b] = colour.slice(0, 3).map(each => each / 255)
    .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = element => {
  for (let each = element; each; each = each.parentElement) {
    const colour = rgb(getComputedStyle(each).backgroundColor);
    if (colour.length < 4 || colour[3] > 0.99) return colour;
  }
  return [255, 255, 255];
};
const contrast = element => {
  const style = getComputedStyle(element);
  const both = [light(rgb(element.ownerSVGElement ? style.fill : style.color)), light(ground(element))];
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
};
const measure = frame => {
  const page = frame.contentDocument, root = page.documentElement;
  page.querySelectorAll("details").forEach(each => each.open = true);
  const texts = [...page.body.querySelectorAll("*")].filter(each => each.tagName != "title" &&
    [...each.childNodes].some(node => node.nodeType == 3 && node.data.trim()));
  const worst = texts.map(each => [contrast(each), each.tagName, each.textContent.trim().slice(0, 40)])
    .sort((a, b) => a[0] - b[0])[0];
  return {width: frame.width, page: root.scrollWidth, worst, ground: getComputedStyle(page.body).backgroundColor,
    pictures: page.images.length};
};
onload = () => document.getElementById("measured").textContent =
  JSON.stringify([...document.querySelectorAll("iframe")].map(measure));
</script>"""


def headless(folder: Path, *words: str) -> list[str]:
    """The command line of a Chromium without a window, whose profile is in ``folder``; it reaches no network."""
    line = [str(CHROMIUM), "--headless", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    # Its sandbox does not work for root, and not in every container; the page is our own.
    line += ["--no-sandbox", "--no-first-run", "--disable-extensions", f"--user-data-dir={folder / 'profile'}"]
    return [*line, "--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND", *words]


def chromium(folder: Path, page: Path, *words: str) -> str:
    """The output of a headless Chromium that has opened a file; anything on its console fails the test."""
    line = headless(folder, *words, page.as_uri())
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=300)
    assert [each for each in done.stderr.splitlines() if "CONSOLE" in each] == []
    return done.stdout


def framed(folder: Path, page: str, *sizes: tuple[int, int]) -> Path:
    """A file that shows a page in frames of these sizes, and measures it."""
    (folder / "report.html").write_text(page)
    frames = "".join(
        f'<iframe src="report.html" width="{width}" height="{height}"></iframe>' for width, height in sizes
    )
    (folder / "frames.html").write_text(FRAMES % frames)
    return folder / "frames.html"


NOTHING: dict[str, Any] = dict.fromkeys(SECTIONS, Section(why="no control plane responds", failed=True))
PAGES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "example": example.document,
    "large": lambda: example.document(150),
    "hostile": lambda: replaced(ATTACKS),
    "long words": lambda: replaced(["x" * 1000, "y" * 390]),
    "nothing": lambda: example.document(machines=(), **NOTHING),
}


@pytest.mark.parametrize(("name", "scheme"), list(itertools.product(PAGES, DARK)))
def test_the_page_fits_every_width_and_can_be_read(tmp_path: Path, name: str, scheme: str) -> None:
    """All of it: every <details> is open."""
    page = framed(tmp_path, report_page.page(PAGES[name]()), *((width, 800) for width in WIDTHS))
    shown = chromium(tmp_path, page, "--dump-dom", *DARK[scheme])
    measured = re.search(r'<pre id="measured">(.*?)</pre>', shown, re.DOTALL)
    assert measured
    found = json.loads(unescape(measured[1]))
    assert [each["page"] for each in found] == list(WIDTHS)
    for each in found:
        assert each["worst"][0] >= LEAST_CONTRAST, each["worst"]
        dark = sum(map(int, re.findall(r"\d+", each["ground"])[:3])) < 200
        assert dark is (scheme == "dark")
        assert each["pictures"] == 0


@pytest.mark.parametrize(("width", "scheme"), list(itertools.product((360, 1200), DARK)))
def test_pictures_of_the_page(tmp_path: Path, width: int, scheme: str) -> None:
    """The page opens by file:// as it is, and draws something."""
    folder = Path(os.environ.get("GPUNODES_REPORT_SHOTS") or tmp_path)
    shot = folder / f"report-{width}-{scheme}.png"
    page = framed(tmp_path, report_page.page(example.document()), (width, 1000))
    chromium(tmp_path, page, f"--screenshot={shot}", f"--window-size={width},1000", *DARK[scheme])
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert shot.stat().st_size > 20_000
    assert "Cluster 10.20.0.1" in re.sub(r"<[^>]+>", "", chromium(tmp_path, tmp_path / "report.html", "--dump-dom"))
