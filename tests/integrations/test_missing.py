"""Nobody waits for a library that they do not use, and one that is missing is named in one line."""

import subprocess
import sys
import tomllib
from pathlib import Path

import dohyo

SOURCE = Path(dohyo.__file__).parent
LIBRARIES = {  # the extra, and what is imported of it
    "pyro": ["pyro"],
    "lightning": ["lightning", "pytorch_lightning"],
    "scvi": ["scvi"],
    "jax": ["jax"],
    "arviz": ["arviz"],
}


PROGRAM = """
import importlib, sys
import dohyo, dohyo.models, dohyo.objectives
libraries = {libraries}
print([name for names in libraries.values() for name in names if name in sys.modules])
for extra, names in libraries.items():
    sys.modules.update(dict.fromkeys(names))
    try:
        importlib.import_module(f"dohyo.integrations.{{extra}}")
    except ModuleNotFoundError as error:
        print(isinstance(error, dohyo.DohyoError), error.__cause__, error)
"""


def test_dohyo_loads_none_of_them_and_a_missing_one_is_one_line_with_its_extra() -> None:
    program = PROGRAM.format(libraries=LIBRARIES)
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True).stdout
    loaded, *said = out.splitlines()
    assert loaded == "[]"
    expected = [
        f"True None dohyo.integrations.{extra} needs {names[0]}, which is not installed: pip install 'dohyo[{extra}]'"
        for extra, names in LIBRARIES.items()
    ]
    assert said == expected


def test_the_extras_exist() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*LIBRARIES, "zuko"} <= set(project["optional-dependencies"])


def test_nobody_imports_the_integrations() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.parent.name != "integrations":
            assert "dohyo.integrations" not in path.read_text(encoding="utf-8"), path.name
