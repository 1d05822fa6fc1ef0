"""Options: their choices, what a resumed run may change, and which errors become one line."""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dohyo import DohyoError
from dohyo.lab.cli import main
from dohyo.lab.experiments.density_config import DensityConfig
from dohyo.lab.experiments.qpbo import QPBOConfig
from dohyo.lab.experiments.reverse_kl import ReverseKLConfig
from dohyo.lab.folder import read_records
from dohyo.lab.studies.study import StudyConfig
from dohyo.lab.training import DrawsConfig, LoopConfig
from dohyo.lab.training.config import StepConfig, resumable_fields
from dohyo.lab.training.state import identity
from real import finished

ROOT = Path(__file__).parents[1]
TRAIN = ["train", "--estimator", "iwae", "--cost", "2", "--hidden", "4", "--latent", "2", "--batch-size", "500",
         "--valid-terms", "2", "--test-terms", "2", "--device", "cpu"]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (LoopConfig, {"optimiser": "adm"}, "unknown optimiser 'adm': did you mean 'adam'"),
        (LoopConfig, {"program": "capturd"}, "did you mean 'captured'"),
        (LoopConfig, {"device": "gpu"}, "the names are auto, cpu, cuda, mps"),
        (DrawsConfig, {"decay": "liner"}, "did you mean 'linear'"),
        (DensityConfig, {"encoder": "dregg"}, "did you mean 'dreg'"),
        (DensityConfig, {"k_draw": "row"}, "unknown k_draw 'row'"),
        (DensityConfig, {"baseline": "zeros"}, "did you mean 'zero'"),
        (DensityConfig, {"data_kind": "gray"}, "did you mean 'grey'"),
        (DensityConfig, {"clip_decoder": "some"}, "unknown clip_decoder 'some': the names are auto"),
        (ReverseKLConfig, {"on_divergence": "stay"}, "unknown on_divergence 'stay'"),
        (ReverseKLConfig, {"paths": "every"}, "unknown paths 'every'"),
        (QPBOConfig, {"variables": 3, "policy": "latnet"}, "did you mean 'latent'"),
        (QPBOConfig, {"variables": 3, "entropy_decay": "lineer"}, "did you mean 'linear'"),
        (QPBOConfig, {"variables": 3, "scale": "atuo"}, "did you mean 'auto'"),
        (StudyConfig, {"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_a_wrong_choice_in_python_is_our_error(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DohyoError, match=re.escape(message)):
        make(**options)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (DensityConfig(), "max_rows checkpoint_seconds max_seconds device epochs stop_patience program data_dir test_terms"),
        (
            ReverseKLConfig(),
            "max_rows checkpoint_seconds max_seconds device program steps on_divergence test_draws test_terms anneal",
        ),
        (QPBOConfig(variables=3), "max_rows checkpoint_seconds max_seconds device program steps patience instance"),
    ],
)
def test_what_a_resumed_run_may_change(config: StepConfig, names: str) -> None:
    assert set(resumable_fields(config)) == set(names.split())
    begun_from = {"init_from"} & set(vars(config))  # what began with it is in the checkpoint, and the folder may have been moved
    assert set(vars(config)) - set(identity(config)) == set(names.split()) | begun_from


def test_a_resumed_run_changes_what_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN, "--epochs", "1", "--out", "a", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["train", "--resume", "a", "--test-terms", "9", "--max-rows", "700", "--json"]) == 0  # tested again
    again = json.loads(capsys.readouterr().out)
    assert (again["test_terms"], again["epochs"], len(read_records(tmp_path / "a"))) == (9, 1, 1)
    assert again["test_nll"] < first["test_nll"]
    config = yaml.safe_load((tmp_path / "a/config.yaml").read_text())
    assert (config["test_terms"], config["max_rows"]) == (9, 700)
    before = (tmp_path / "a/result.json").stat().st_mtime_ns
    assert main(["train", "--resume", "a", "--stop-patience", "5"]) == 0
    assert "already finished" in capsys.readouterr().out
    assert (tmp_path / "a/result.json").stat().st_mtime_ns == before
    assert main(["train", "--resume", "a", "--hidden", "5"]) == 2
    error = capsys.readouterr().err
    assert "--hidden 5 differs from the run's 4" in error
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in resumable_fields(DensityConfig):
        assert f"--{name.replace('_', '-')}" in error
    assert ", ".join(f"--{name.replace('_', '-')}" for name in resumable_fields(DensityConfig)) in text


def test_only_our_errors_become_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (ValueError("a bug"), TypeError("a bug"), RuntimeError("a bug"), KeyError("a bug")):

        def broken(options: Any, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr("dohyo.lab.cli.sample.run", broken)
        with pytest.raises(type(error), match="a bug"):
            main(["sample", str(tmp_path)])
    for wrong in (DohyoError("a  mistake"), FileNotFoundError("a  mistake")):

        def mistaken(options: Any, error: Exception = wrong) -> int:
            raise error

        monkeypatch.setattr("dohyo.lab.cli.sample.run", mistaken)
        assert main(["sample", str(tmp_path)]) == 2
        assert capsys.readouterr().err == "dohyo: error: a mistake\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--epochs", "ten", "--out", "x"], "epochs"),
        (["train", "--no-such-option", "3", "--out", "x"], "no_such_option"),
        (["train", "--encoder", "dregg", "--out", "x"], "unknown encoder 'dregg': did you mean 'dreg'?"),
        (["train", "--clip-encoder", "much", "--out", "x"], "unknown clip_encoder 'much': the names are auto, a number, null"),
        (["evaluate", "x", "--split", "tset"], "unknown split 'tset': did you mean 'test'?"),
        (["trian"], "trian"),
    ],
)
def test_wrong_options_get_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n"), error.startswith("dohyo: error: ")) == ("", 1, True)
    assert message in error


def test_a_bug_in_a_process_shows_its_traceback(tmp_path: Path) -> None:
    """A model that passes the checks and then fails in training."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom dohyo.models import VAE\n\n"
        "class Broken(VAE):\n"
        "    def state_dict(self, *args, **kwargs):\n"
        "        raise ValueError('a bug of the user')\n"
    )
    line = [sys.executable, "-m", "dohyo", *TRAIN, "--model", "mine:Broken", "--epochs", "1", "--out", "a"]
    done = finished(line, tmp_path)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: a bug of the user")


@pytest.mark.parametrize("way", ["script", "module"])
def test_a_users_module_may_import_its_neighbour_late(way: str, tmp_path: Path) -> None:
    """`dohyo` and `python -m dohyo` are one: the current folder is searched as long as the command runs."""
    (tmp_path / "neighbour.py").write_text("def scale():\n    return 2.0\n")
    (tmp_path / "density.py").write_text(
        "def log_density(x):\n    from neighbour import scale\n    return -scale() * x.square().sum(-1)\n"
    )
    start = [sys.executable, "-m", "dohyo"]
    if way == "script":  # what pip writes for [project.scripts], in a folder of its own
        module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["dohyo"].partition(":")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/dohyo").write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        start = [sys.executable, str(tmp_path / "bin/dohyo")]
    options = (
        "--target density:log_density --dimension 2 --steps 4 --check-every 2 --hidden 4 --latent 2 --check-draws 25 "
        "--check-terms 5 --test-draws 25 --test-terms 5 --device cpu --out r --json"
    )
    done = finished([*start, "reverse-kl", *options.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    import dohyo

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dohyo {dohyo.__version__}\n"


def test_the_expected_cost_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SUMO with one term more costs one more: 6.3 is not to be had."""
    line = [*TRAIN, "--estimator", "sumo", "--cost", "6.3", "--epochs", "1", "--out", str(tmp_path / "a")]
    assert main(line) == 0, capsys.readouterr().err
    assert "sumo at an expected cost of 6.078" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "a"), "--estimator", "sumo", "--cost", "6.3", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert "expected cost" in " ".join(table.split())
    assert " 6.078 " in table
    assert main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "r.html")]) == 0
    assert "sumo at cost 6.3 (expected 6.078)" in (tmp_path / "r.html").read_text()
