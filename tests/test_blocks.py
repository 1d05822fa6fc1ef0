"""What docs/ makes of results: tables as Markdown, the blocks of a page, the gallery."""

import html
import importlib
import re
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dohyo.lab.report.grids import grid
from folders import write_study

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
blocks = importlib.import_module("blocks")


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1))
@example("1. a")
@example("--- &amp; $x$ [a](b) <b> | \\ `c`")
def test_markdown_shows_text_as_it_is(text: str) -> None:
    shown = re.fullmatch("<p>(.*)</p>\n", MarkdownIt().enable("table").render(blocks.escaped(text)))
    assert shown is not None
    assert "<" not in shown[1]
    assert html.unescape(shown[1]) == text


def test_blocks_of_results(tmp_path: Path) -> None:
    write_study(tmp_path / "results/rates")
    text = "# A\n\n<!-- results:rates -->\nold\n<!-- end -->\n\nb\n\n<!-- results:rates Fitted slopes -->\n<!-- end -->\n\nc\n"
    made = blocks.filled(text, tmp_path / "results", tmp_path / "docs")
    assert "\nold\n" not in made
    assert "| SUMO's terms fall as k^-2 | E\\[Delta\\_k^2\\] = O(k^-2) | slope -2.01 ± 0.02 | **holds** |" in made
    assert "| toy | -2.01 | -2 |" in made
    assert "[every number](../results/rates/study.json)" in made
    assert re.sub(r"(results:[^\n]*\n).*?(<!-- end)", r"\1\2", made, flags=re.DOTALL) == text.replace("old\n", "")
    assert blocks.filled(made, tmp_path / "results", tmp_path / "docs") == made
    assert blocks.filled(made.replace("| -2.01 |", "| -2.5 |"), tmp_path / "results", tmp_path / "docs") == made
    for wrong, message in (
        ("<!-- results:rates -->\n", "has no end"),
        ("<!-- results:ratse -->\n<!-- end -->\n", "dohyo reproduce ratse"),
        ("<!-- results:rates Fited slopes -->\n<!-- end -->\n", "did you mean 'Fitted slopes'"),
    ):
        with pytest.raises(ValueError, match=message):
            blocks.filled(wrong, tmp_path / "results", tmp_path)


def test_readme_and_docs_are_as_the_results_are() -> None:
    """If not: python docs/tables.py."""
    assert importlib.import_module("tables").stale() == []


def test_the_gallery_holds_every_study_and_picture(tmp_path: Path) -> None:
    gallery = importlib.import_module("gallery").gallery
    assert gallery(tmp_path, tmp_path) == ""
    write_study(tmp_path / "rates", cells_done=1)
    made = gallery(tmp_path, tmp_path)
    for text in ("## How fast the terms fall", "**Not finished: 1 of 2 cells.**", "**does not hold**", "**Fitted slopes**",
                 "![Second moments on log-log axes, falling with slope -2](../results/rates/rates.png)"):  # fmt: skip
        assert text in made
    real = gallery()
    for path in (*ROOT.glob("results/*.png"), *ROOT.glob("results/*/study.json")):
        assert path.name in real, path
        assert path.parent.name in real, path


def test_a_table_of_markdown_keeps_its_columns() -> None:
    made = blocks.table(grid("", ["a|b", "c"], [["x|y\nz", 1.5]], note="see `c`"))
    assert made == "| a\\|b | c |\n|---|---:|\n| x\\|y z | 1.500 |\n\nsee \\`c\\`\n"


def test_a_partial_study_says_so_in_markdown(tmp_path: Path) -> None:
    write_study(tmp_path / "rates", cells_done=1)
    made = blocks.filled("<!-- results:rates -->\n<!-- end -->\n", tmp_path, tmp_path)
    assert "`dohyo reproduce rates --scale small`, 1 min 15 s, 1 of 2 cells so far; [every number]" in made
