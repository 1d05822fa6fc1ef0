"""The rooms: who may import whom, and what `import dohyo` may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dohyo

SOURCE = Path(dohyo.__file__).parent
# Each room and the rooms of dohyo that it may use. What is not named here may use anything but the command line.
ALLOWED = {
    "packing": set(),
    "names": set(),
    "laws": set(),
    "bounds": set(),
    "estimators": {"packing", "laws", "bounds", "estimators", "names"},
    "marginal": {"packing", "estimators"},
    "diagnostics": {"estimators", "laws", "bounds"},
    "tuning": {"bounds", "diagnostics", "estimators", "laws"},
    "evaluation": {"diagnostics", "estimators", "files", "marginal", "packing"},
    "score": {"estimators", "marginal"},
    "objectives": {"estimators", "marginal", "names", "packing", "objectives"},
    "models": {"packing", "models", "names"},
    "data": {"data", "files", "names"},
    "targets": {"names", "targets"},
    "rewards": {"files", "names", "rewards"},
    "divergence": {"diagnostics", "evaluation", "packing"},
    "training": {"estimators", "evaluation", "files", "names", "objectives", "packing", "training"},
}
LIBRARY = {*ALLOWED, "files"}


def rooms_used(path: Path) -> set[str]:
    used = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dohyo":
            names = [node.module.split(".")[1]] if "." in node.module else [alias.name for alias in node.names]
            used.update(names)
        elif isinstance(node, ast.Import):
            used.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("dohyo."))
    return used


def files_of(room: str) -> list[Path]:
    return [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else sorted((SOURCE / room).rglob("*.py"))


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms(room: str) -> None:
    assert files_of(room)
    for path in files_of(room):
        assert rooms_used(path) <= ALLOWED[room], path.name


def test_the_library_never_uses_the_command_line() -> None:
    for room in LIBRARY:
        for path in files_of(room):
            assert not rooms_used(path) & {"cli", "plots", "bank", "experiments", "studies", "report"}, path.name


def test_import_loads_nothing_heavier_than_torch() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import dohyo; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    added = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"matplotlib", "rich", "jsonargparse", "yaml", "lightning", "scipy", "jinja2", "tensorboard"} & set(added)


def test_plain_training_does_not_wait_for_the_compiler() -> None:
    code = "import sys, dohyo.lab.experiments.density; print('dohyo.lab.fast.products' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_import_changes_no_global_state() -> None:
    code = (
        "import torch; torch.manual_seed(0); a = torch.random.get_rng_state(); d = torch.get_default_dtype(); "
        "import dohyo; print(torch.equal(a, torch.random.get_rng_state()), d == torch.get_default_dtype())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["True", "True"]
