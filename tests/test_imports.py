"""The rooms: which may import which, what `import dohyo` loads, and what it shows to editors and type checkers."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import dohyo
from test_folder import write_old_run

SOURCE = Path(dohyo.__file__).parent
ANYWHERE = {"errors", "files", "names"}
# Every room, and the rooms that it may import beside those.
ROOMS = {
    "errors": "",
    "files": "",
    "names": "",
    "packing": "",
    "bounds": "",
    "laws": "",
    "contract": "",
    "estimators": "bounds laws",
    "marginal": "contract estimators packing",
    "diagnostics": "estimators",
    "tuning": "bounds diagnostics estimators laws",
    "verdict": "estimators",
    "evaluation": "contract diagnostics estimators marginal packing verdict",
    "fisher": "contract estimators marginal",
    "kl": "annealing diagnostics evaluation packing",
    "objectives": "contract estimators packing",
    "models": "contract packing",
    "annealing": "contract diagnostics estimators evaluation marginal models packing verdict",
    "integrations": "estimators evaluation",
    "dohyo": "annealing contract diagnostics estimators evaluation fisher laws marginal packing tuning verdict",
    "__main__": "",
    "lab": "",
    "lab.claims": "",
    "lab.folder": "",
    "lab.choices": "",
    "lab.parsing": "lab.choices lab.folder",
    "lab.data": "lab.claims",
    "lab.targets": "",
    "lab.rewards": "",
    "lab.bank": "diagnostics estimators evaluation lab.claims lab.data packing",
    "lab.evaluations": "estimators evaluation lab.claims lab.folder",
    "lab.training": "annealing contract estimators evaluation lab.claims lab.folder objectives",
    "lab.fast": "annealing contract lab.training laws models objectives packing",
    "lab.experiments": "annealing contract diagnostics estimators evaluation kl lab.data lab.evaluations lab.fast lab.folder "
    "lab.parsing lab.rewards lab.targets lab.training models objectives packing verdict",
    "lab.plots": "estimators evaluation kl lab.bank lab.folder",
    "lab.studies": "annealing bounds contract estimators evaluation lab.experiments lab.folder lab.plots lab.targets "
    "lab.training laws marginal models objectives packing",
    "lab.report": "dohyo lab.evaluations lab.folder",
    "lab.cli": "dohyo estimators evaluation lab.bank lab.evaluations lab.experiments lab.folder lab.parsing lab.plots lab.report "
    "lab.studies lab.training",
}
# What is imported only when it is used: inside a function, or for type checkers.
LAZILY = {
    "dohyo": "kl lab models objectives",
    "__main__": "lab.cli",
    "lab": "lab.bank lab.data lab.experiments lab.rewards lab.targets lab.training",
    "lab.folder": "dohyo",
    "lab.training": "lab.fast",
    "lab.experiments": "lab.plots",
}


def room_of(path: Path) -> str:
    first, *rest = path.relative_to(SOURCE).with_suffix("").parts
    if first == "lab" and rest != ["__init__"]:
        return f"lab.{rest[0]}"
    return "dohyo" if first == "__init__" else first


FILES: dict[str, list[Path]] = {}
for file in sorted(SOURCE.rglob("*.py")):
    FILES.setdefault(room_of(file), []).append(file)


def arrows(node: ast.AST, lazily: bool = False) -> Iterator[tuple[str, bool]]:
    """The rooms that are imported below this node, and whether lazily."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        package, *inside = name.split(".")
        if package == "dohyo":
            room = next((part for part in (".".join(inside[:2]), *inside[:1]) if part in ROOMS or part in FILES), "dohyo")
            yield room, lazily
    for child in ast.iter_child_nodes(node):
        type_checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        yield from arrows(child, lazily or type_checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("room", sorted(FILES))
def test_every_arrow(room: str) -> None:
    assert room in ROOMS, f"{room} is a new room: add a row to ROOMS"
    allowed = {room, *ANYWHERE, *ROOMS[room].split()}
    for path in FILES[room]:
        for used, lazily in arrows(ast.parse(path.read_text(encoding="utf-8"))):
            assert used in allowed | (set(LAZILY.get(room, "").split()) if lazily else set()), f"{path.name} imports {used}"


def test_the_table() -> None:
    """It names real rooms, has no cycle, and separates library and laboratory."""
    assert set(ROOMS) == set(FILES)
    for table in (ROOMS, LAZILY):
        assert {used for row in table.values() for used in row.split()} <= set(ROOMS)
    TopologicalSorter({room: row.split() for room, row in ROOMS.items()}).prepare()  # raises CycleError
    for room in ROOMS:
        used = [*ROOMS[room].split(), *LAZILY.get(room, "").split()]
        if not room.startswith("lab") and room not in ("dohyo", "__main__"):
            assert not any(one.startswith("lab") for one in used), room
        assert "integrations" not in used, room


LIBRARIES = {  # the extra of an integration, and what is imported of it
    "pyro": ["pyro"],
    "lightning": ["lightning", "pytorch_lightning"],
    "scvi": ["scvi"],
    "jax": ["jax"],
    "arviz": ["arviz"],
}
# What is imported step by step, and, in forks, by those who go another way from there.
IMPORTS = """
import importlib, json, os, sys, torch, warnings
from pathlib import Path

def fork(act):
    if not (child := os.fork()):
        act()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def without():
    warnings.simplefilter("ignore")
    libraries, said = json.loads(sys.argv[1]), []
    loaded = [name for names in libraries.values() for name in names if name in sys.modules]
    for extra, names in libraries.items():
        sys.modules.update(dict.fromkeys(names))
        try:
            importlib.import_module(f"dohyo.integrations.{extra}")
        except ModuleNotFoundError as error:
            said.append(f"{isinstance(error, dohyo.DohyoError)} {error.__cause__} {error}")
    print(json.dumps({"libraries": loaded, "missing": said}))

def report():
    from dohyo.lab.report import read
    print(json.dumps({"notice": read(Path("old")).notices[0], "training": [name for name in
          ("dohyo.lab.training", "dohyo.lab.experiments", "lightning_fabric") if name in sys.modules]}))

before = set(sys.modules)
torch.manual_seed(0)
state, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
import dohyo
found = {"added": sorted({name.split(".")[0] for name in set(sys.modules) - before})}
found["unchanged"] = torch.equal(state, torch.random.get_rng_state()) and dtype == torch.get_default_dtype()
found["shown"] = [*dir(dohyo), *dir(dohyo.lab)]
fork(report)
import dohyo.models, dohyo.objectives
fork(without)
import dohyo.lab.plots.runs
found["pyplot"] = "matplotlib.pyplot" in sys.modules
import dohyo.lab.experiments.density
found["compiler"] = "dohyo.lab.fast.products" in sys.modules
for part in (dohyo, dohyo.lab):
    for name in dir(part):
        getattr(part, name)
print(json.dumps(found))
"""


@pytest.fixture(scope="session")  # a worker may come back to this file
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fresh interpreter sees as it imports more and more."""
    folder = tmp_path_factory.mktemp("imports")
    (write_old_run(folder / "old") / "result.json").unlink()
    line = [sys.executable, "-c", IMPORTS, json.dumps(LIBRARIES)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=True)
    return {key: value for text in done.stdout.splitlines() for key, value in json.loads(text).items()}


def test_import_loads_nothing_heavier_than_torch(imported: dict[str, Any]) -> None:
    heavy = {"matplotlib", "rich", "jsonargparse", "yaml", "lightning", "scipy", "jinja2", "tensorboard"}
    assert not heavy & set(imported["added"])


def test_import_changes_no_global_state(imported: dict[str, Any]) -> None:
    assert imported["unchanged"]


def test_plots_choose_no_backend(imported: dict[str, Any]) -> None:
    assert not imported["pyplot"]


def test_plain_training_does_not_wait_for_the_compiler(imported: dict[str, Any]) -> None:
    assert not imported["compiler"]


def test_dir_shows_everything_and_everything_is_there(imported: dict[str, Any]) -> None:
    shown = set(imported["shown"])
    assert {"evaluate", "SUMO", "models", "objectives", "kl", "lab", "fit", "train", "LoopConfig", "DrawsConfig", "load"} <= shown
    for wrong in ("fit", "divergence", "nothing"):
        with pytest.raises(AttributeError, match=wrong):
            getattr(dohyo, wrong)


def test_dohyo_loads_no_integration_and_one_that_is_missing_is_one_line_with_its_extra(imported: dict[str, Any]) -> None:
    assert imported["libraries"] == []
    assert imported["missing"] == [
        f"True None dohyo.integrations.{extra} needs {names[0]}, which is not installed: pip install 'dohyo[{extra}]'"
        for extra, names in LIBRARIES.items()
    ]
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*LIBRARIES, "zuko"} <= set(project["optional-dependencies"])


def test_the_report_reads_a_run_without_the_training_code(imported: dict[str, Any]) -> None:
    assert imported["notice"] == "Not finished: 1 of 1 epochs are done. dohyo train --resume old continues."
    assert imported["training"] == []


@pytest.mark.slow
def test_the_readmes_example_passes_mypy_in_a_project_of_its_own(tmp_path: Path) -> None:
    readme = Path(__file__).parent.parent / "README.md"
    lines = [line[4:] for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith((">>> ", "... "))]
    assert any("evaluate" in line for line in lines)
    assert any("lab.fit" in line for line in lines)
    assert (SOURCE / "py.typed").is_file()
    script = tmp_path / "readme.py"
    # Errors inside dohyo are not shown, as if it were installed; "silent" is what mypy does for site-packages.
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir=cache", script.name]
    environment = os.environ | {"MYPYPATH": str(SOURCE.parent)}

    def errors(text: str) -> str:
        script.write_text(text)
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout

    assert errors("\n".join(lines) + "\n").startswith("Success")
    assert "error" in errors("\n".join([*lines, "dohyo.fit(1)", "result.mean.nothing"]) + "\n")  # the power twin
