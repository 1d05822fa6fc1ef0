import shutil
from pathlib import Path

import pytest

from attack.arena import SMALL
from dohyo.lab.cli import main


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", *SMALL, "--epochs", "1", "--out", str(folder), "--json"]) == 0
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    return folder
