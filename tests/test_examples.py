"""The examples: their commands are real ones, the tutorial's page shows those of its script, and, slowly, both really run."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dohyo.lab.cli import _parser, _underscored

ROOT = Path(__file__).parents[1]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_of_the_tutorial_is_right_and_on_its_page() -> None:
    lines = example("tutorial").COMMANDS.strip().split("\n")
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert [line.removeprefix("$ dohyo ") for line in re.findall(r"^\$ dohyo .*", page, re.MULTILINE)] == lines
    for line in lines:
        arguments = [_underscored(argument) for argument in shlex.split(line)]
        assert _parser(arguments)[0].parse_args(arguments).command == arguments[0]


def test_the_pictures_of_the_tutorial_are_there() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    for file in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page):
        assert (ROOT / "docs" / file).stat().st_size < 300_000


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "made"), [
    (["tutorial.py", "--quick"], ["tutorial/report.html", "tutorial/samples.png", "tutorial/large/evaluation.npz"]),
    (["demo.py"], ["demo/bounds.png", "demo/funnel.png", "demo/report.html"]),
])  # fmt: skip
def test_it_runs(arguments: list[str], made: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / arguments[0]), *arguments[1:]]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=1200)
    for file in made:
        assert (tmp_path / file).stat().st_size > 0
