"""The report's page in a real browser, headless Chromium: what a reader sees, does and is kept safe from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from browser import CHROMIUM, Browser
from dohyo.errors import DohyoError
from dohyo.lab.report import read, write_report
from dohyo.lab.report.grids import NOTHING
from folders import write_runs, write_study

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed")

# The lowest contrast of any text with what is behind it, and that text (WCAG 2, relative luminance).
CONTRAST = """(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    const c = parts(getComputedStyle(e).backgroundColor);
    return c.length < 4 || c[3] > 0 ? c : behind(e.parentElement);
  };
  let lowest = [99, ""];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || ["SCRIPT", "STYLE"].includes(e.tagName)) continue;
    const [a, b] = [light(parts(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < lowest[0]) lowest = [ratio, walk.currentNode.data];
  }
  return lowest;
})()"""
SLOPES = "[...document.querySelectorAll('table')].find((t) => t.caption?.textContent === 'Fitted slopes')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.open(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = ("replicas", "iwae", "bits", "unfinished")
    folder = write_runs(tmp_path_factory.mktemp("page"), *runs)
    write_study(folder / "rates")
    write_study(folder / "partial", cells_done=1)
    write_report([read(folder / name) for name in ("rates", "partial", *runs)], folder / "page.html")
    return folder / "page.html"


@pytest.fixture(autouse=True)
def _forget(browser: Browser) -> None:
    browser.requests.clear()
    browser.problems.clear()


def column(browser: Browser, number: int) -> list[str]:
    found: list[str] = browser.ask(f"[...{SLOPES}.tBodies[0].rows].map((row) => row.cells[{number}].textContent.trim())")
    return found


def directions(browser: Browser) -> list[str | None]:
    found: list[str | None] = browser.ask(f"[...{SLOPES}.tHead.rows[0].cells].map((cell) => cell.getAttribute('aria-sort'))")
    return found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1300, 390, 320])
def test_it_renders_and_fits(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.show(page, width, dark=dark)
    assert browser.problems == []
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask("[...document.images].every((image) => image.complete && image.naturalWidth > 100)")
    hidden = "(box) => box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX !== 'auto'"
    assert browser.ask(f"[...document.querySelectorAll('.scroll, pre')].filter({hidden}).length") == 0
    for element, size in (("h1", 20), ("figure img", 100), (".findings li", 100), ("table", 100)):
        assert browser.ask(f"document.querySelector('{element}').getBoundingClientRect().width") > size
    back = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(24, 22, 19)") is dark
    lowest, text = browser.ask(CONTRAST)
    assert lowest >= 4.5, text


def test_pale_text_would_be_seen(browser: Browser, page: Path) -> None:
    browser.show(page)
    browser.ask("document.querySelector('.question').style.setProperty('color', '#999999')")
    assert browser.ask(CONTRAST)[0] < 4.5


def test_a_click_sorts(browser: Browser, page: Path) -> None:
    browser.show(page)
    heading = f"{SLOPES}.tHead.rows[0].cells[1].querySelector('button')"
    before = column(browser, 1)
    assert before == ["-2.01", "-1.31", NOTHING, "-10.50"]
    browser.click(heading)
    assert column(browser, 1) == ["-10.50", "-2.01", "-1.31", NOTHING]  # as numbers, and what is missing last
    assert column(browser, 0) == ["leave-one-out", "toy", "VAE", "both"]  # rows stay whole
    assert directions(browser) == [None, "ascending", None]
    browser.click(heading)
    assert column(browser, 1) == ["-1.31", "-2.01", "-10.50", NOTHING]  # still last
    assert directions(browser) == [None, "descending", None]
    browser.click(f"{SLOPES}.tHead.rows[0].cells[0].querySelector('button')")
    assert column(browser, 0) == ["both", "leave-one-out", "toy", "VAE"]  # capitals do not come first
    assert directions(browser) == ["ascending", None, None]
    assert browser.problems == []


def test_the_keyboard_sorts(browser: Browser, page: Path) -> None:
    browser.show(page)
    browser.press("Tab")
    assert browser.ask("document.activeElement.className") == "skip"
    assert browser.ask("document.activeElement.getBoundingClientRect().left") > 0  # seen once it has the focus
    browser.ask(f"{SLOPES}.parentElement.focus()")
    browser.press("Tab")
    browser.press("Tab")
    assert browser.ask("document.activeElement.textContent") == "slope"
    assert browser.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("Enter", "\r")
    assert column(browser, 1) == ["-10.50", "-2.01", "-1.31", NOTHING]
    assert browser.ask("document.activeElement.textContent") == "slope"
    browser.press(" ", " ")
    assert directions(browser) == [None, "descending", None]


def test_everything_on_demand_opens(browser: Browser, page: Path) -> None:
    browser.show(page, 390)
    assert browser.ask("document.querySelector('details pre').checkVisibility()") is False
    browser.click("document.querySelector('details summary')")
    assert browser.ask("document.querySelector('details pre').checkVisibility()") is True
    assert "trials: 10" in browser.ask("document.querySelector('details pre').innerText")
    browser.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    assert browser.ask(CONTRAST)[0] >= 4.5


def test_links_lead_to_their_sections(browser: Browser, page: Path) -> None:
    browser.show(page)
    browser.click("document.querySelector('nav li:last-child a')")
    assert browser.ask("document.querySelector(':target').textContent") == "unfinished"


def test_it_prints(browser: Browser, page: Path) -> None:
    browser.show(page, dark=True)
    assert browser.pdf().startswith(b"%PDF")
    browser.send("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.ask(CONTRAST)[0] >= 4.5
    browser.send("Emulation.setEmulatedMedia", media="")


EVIL = "</pre></title>\"'><script>window.evil = 1</script><img src=http://127.0.0.1:9/x onerror='window.evil = 1'>{{ 7 * 7 }}"


def evil(value: Any) -> Any:
    """Every text within replaced, but for what must be right for the folder to be read."""
    if isinstance(value, dict):
        return {key if key in KEPT else f"{key}{EVIL}": one if key == "file" else evil(one) for key, one in value.items()}
    return [evil(one) for one in value] if isinstance(value, list) else f"{EVIL}" if isinstance(value, str) else value


KEPT = ("options", "result", "seconds", "claim", "paper", "found", "holds", "title", "columns", "rows", "note", "file", "alt")


def test_texts_are_harmless(browser: Browser, tmp_path: Path) -> None:
    study = write_study(tmp_path / "rates")
    found = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps({key: evil(value) for key, value in found.items()}))
    name = tmp_path / f"{EVIL.replace('/', ' ')}{'x' * 90}"
    name.mkdir()
    config = yaml.safe_load((write_runs(tmp_path / "runs", "iwae") / "iwae/config.yaml").read_text())
    texts = dict.fromkeys(("model", "data", "estimator", "encoder"), EVIL)
    (name / "config.yaml").write_text(json.dumps(config | texts))
    page = tmp_path / "page.html"
    write_report([read(study), read(name)], page)
    browser.show(page, 390)
    assert browser.ask("document.documentElement.scrollWidth") <= 390  # long words are broken
    assert browser.ask("document.scripts.length") == 1
    assert browser.ask("document.images.length") == 1
    assert browser.ask("window.evil ?? null") is None
    assert browser.ask("document.body.innerText.includes('<script>window.evil = 1</script>')")
    assert "49" not in browser.ask("document.title + document.querySelector('h2 ~ p').innerText")
    assert (browser.problems, browser.requests) == ([], [page.resolve().as_uri()])


def test_even_a_page_that_was_broken_into_runs_and_loads_nothing(browser: Browser, page: Path, tmp_path: Path) -> None:
    """The policy stands behind the escaping; and the checks above do see what goes wrong."""
    broken = tmp_path / "broken.html"
    bad = "<script>window.evil = 1</script><img src=http://127.0.0.1:9/x onerror='window.evil = 1'></main>"
    broken.write_text(page.read_text(encoding="utf-8").replace("</main>", bad), encoding="utf-8")
    browser.show(broken)
    assert browser.ask("window.evil ?? null") is None
    assert len(browser.problems) >= 2
    assert all("Content Security Policy" in problem for problem in browser.problems)


def test_zero_is_a_number(browser: Browser, tmp_path: Path) -> None:
    table = {"title": "Fitted slopes", "columns": ["model", "slope"], "rows": [["a", 1.5], ["b", 0.0], ["c", -1.5]], "note": ""}
    write_report([read(write_study(tmp_path / "rates", tables=[table]))], tmp_path / "page.html")
    browser.show(tmp_path / "page.html")
    browser.click(f"{SLOPES}.tHead.rows[0].cells[1].querySelector('button')")
    assert column(browser, 0) == ["c", "b", "a"]


def test_every_link_of_the_overview_leads_to_its_section(browser: Browser, page: Path) -> None:
    browser.show(page)
    section = "document.getElementById(a.hash.slice(1)).closest('section').querySelector('.facts').textContent"
    pairs = browser.ask(f"[...document.querySelectorAll('#glance ~ .scroll a')].map((a) => [a.textContent, {section}])")
    folders = ["rates", "partial", "replicas", "iwae", "bits", "unfinished"]
    assert len(pairs) == 6
    assert all(str(page.parent / folder) in facts for (_, facts), folder in zip(pairs, folders, strict=True))


def test_a_mark_is_a_dot_within_its_bar(browser: Browser, page: Path) -> None:
    browser.show(page)
    marks = browser.ask("[...document.querySelectorAll('.marks')].map((m) => [m.children[1].x1, m.children[2].cx, "
                        "m.children[1].x2].map((length) => length.baseVal.value))")  # fmt: skip
    assert marks
    for low, middle, high in marks:
        assert low < middle < high
        assert abs(middle - low - (high - middle)) < 0.05


def test_verdicts_by_word_sign_and_colour(browser: Browser, page: Path) -> None:
    browser.show(page)
    found = browser.ask("[...document.querySelectorAll('.verdict')].slice(0, 3).map((v) => [v.innerText, v.className])")
    assert found == [["✓ holds", "verdict yes"], ["? cannot tell", "verdict open"], ["✕ does not hold", "verdict no"]]


def test_times_are_sorted_as_seconds(browser: Browser, tmp_path: Path) -> None:
    seconds = {"a": 75.0, "b": 9.0, "c": 4000.0}
    write_report([read(write_study(tmp_path / n, title=n, seconds=s)) for n, s in seconds.items()], tmp_path / "page.html")
    browser.show(tmp_path / "page.html")
    overview = "document.querySelector('#glance ~ .scroll table')"
    browser.click(f"{overview}.tHead.rows[0].cells[4].querySelector('button')")
    assert browser.ask(f"[...{overview}.tBodies[0].rows].map((row) => row.cells[0].innerText)") == ["b", "a", "c"]


@pytest.mark.parametrize(("file", "key"), [("config.yaml", "seed"), ("result.json", "test_terms")])
def test_a_text_in_the_place_of_a_number_is_refused(tmp_path: Path, file: str, key: str) -> None:
    run = write_runs(tmp_path, "iwae") / "iwae"
    found = yaml.safe_load((run / file).read_text())
    (run / file).write_text(json.dumps(found | {key: EVIL}))
    with pytest.raises(DohyoError, match=rf"{file}: {key} is .* it must be a"):
        read(run)


def test_a_results_texts_are_harmless(browser: Browser, tmp_path: Path) -> None:
    run = write_runs(tmp_path, "iwae") / "iwae"
    result = json.loads((run / "result.json").read_text())
    texts = {"warnings": [EVIL], "versions": {EVIL: EVIL}, "estimator": EVIL, "data": EVIL}
    (run / "result.json").write_text(json.dumps(result | texts))
    write_report([read(run)], tmp_path / "page.html")
    browser.problems.clear()
    browser.show(tmp_path / "page.html")
    assert (browser.ask("document.scripts.length"), browser.ask("document.images.length"), browser.problems) == (1, 3, [])
