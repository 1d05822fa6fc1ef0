"""A run's folder: what the first version wrote still opens, damage is named, and reading it needs no training code."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dohyo import DohyoError
from dohyo.lab.cli import main
from dohyo.lab.experiments.density import DensityRun
from dohyo.lab.experiments.qpbo import QPBORun
from dohyo.lab.experiments.reverse_kl import ReverseKLRun
from dohyo.lab.experiments.run import Run
from dohyo.lab.folder import check_values, read_config, read_json, read_records
from dohyo.lab.report import read
from dohyo.lab.training.loop import RunLog
from dohyo.lab.training.state import load_checkpoint

# What dohyo 0.1.0 wrote, schema version 1, as the files held it.
CONFIG = """\
batch_size: 400
optimiser: amsgrad
learning_rate: 0.001
beta1: 0.9
beta2: 0.999
epsilon: 0.0001
clip_decoder: 20.0
clip_encoder: 125.0
max_rows: null
checkpoint_seconds: 5.0
seed: 0
device: cpu
tf32: true
epochs: 1
lr_factor: 0.8
lr_patience: 50
stop_patience: 300
valid_terms: 2
k_seed: null
program: auto
data: digits
data_dir: null
data_kind: auto
data_seed: null
model: vae
hidden: 3
latent: 2
estimator: sumo
cost: 15.0
max_terms: null
encoder: dreg
k_draw: batch
baseline: zero
clip_datum: null
test_terms: 3
replicas: 1
"""
METRICS = (
    '{"epoch": 1, "step": 4, "train_nll": 27.304692615408516, "train_iwae_nll": 27.35997750558082, "clipped_data": 0.0, '
    '"learning_rate": 0.001, "clipped_decoder": 0.0, "clipped_encoder": 0.0, "program": "plain", "valid_nll": 44.5, '
    '"seconds": 0.25}\n'
)
RESULT = (
    '{"schema_version": 1, "test_nll": 27.449010563753006, "test_nll_stderr": 0.20683527504403568, "test_terms": 3, '
    '"valid_nll": 44.5, "estimator": "sumo", "expected_cost": 15.077979278945516, "estimator_arguments": {"name": "sumo", '
    '"m": 10, "law": {"name": "harmonic-tail", "alpha": 80, "decay": 0.9}, "centre": []}, "encoder": "dreg", '
    '"data": "digits", "model": "vae", "best_epoch": 1, "warnings": [], "seed": 0, "epochs": 1, "steps": 4, "seconds": 0.25, '
    '"versions": {"dohyo": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}}\n'
)
NUMBERS = {"epoch": 1, "step": 4, "stale": 0, "drops": 0, "best_score": 44.5, "best_epoch": 1, "baseline": None,
           "seconds": 0.25, "step_seconds": 0.24, "stopped": False}  # fmt: skip
SHAPES = {
    "encoder.0.weight": (3, 64), "encoder.0.bias": (3,), "encoder.2.weight": (3, 3), "encoder.2.bias": (3,),
    "encoder.4.weight": (4, 3), "encoder.4.bias": (4,), "decoder.0.weight": (3, 2), "decoder.0.bias": (3,),
    "decoder.2.weight": (3, 3), "decoder.2.bias": (3,), "decoder.4.weight": (64, 3), "decoder.4.bias": (64,),
}  # fmt: skip
RESUMABLE = {"epochs", "stop_patience", "device", "max_rows", "checkpoint_seconds", "data_dir", "program", "test_terms"}
REVERSE_KL = """\
{batch_size: 100, optimiser: adam, learning_rate: 0.0005, beta1: 0.9, beta2: 0.99, epsilon: 1.0e-08, clip_decoder: null,
clip_encoder: null, max_rows: 10000, checkpoint_seconds: 5.0, seed: 0, device: cpu, tf32: false, steps: 40, check_every: 20,
max_seconds: null, decay: linear, target: funnel, dimension: null, hidden: 16, latent: 4, estimator: sumo, cost: 15.0,
encoder: sleep, k_draw: datum, paths: x, baseline: zero, on_divergence: stop, check_draws: 50, check_terms: 20,
test_draws: 60, test_terms: 20}
"""
QPBO = """\
{batch_size: 100, optimiser: adam, learning_rate: 0.001, beta1: 0.9, beta2: 0.999, epsilon: 0.001, clip_decoder: null,
clip_encoder: null, max_rows: null, checkpoint_seconds: 5.0, seed: 0, device: cpu, tf32: false, steps: 40, check_every: 10,
max_seconds: null, decay: none, variables: 20, instance: null, index: null, reward: null, instance_seed: 0, policy: latent,
hidden: 16, latent: 4, estimator: sumo, cost: 15.0, encoder: sleep, k_draw: datum, entropy: 0.1, entropy_decay: none,
scale: 2.6698566085124393, baseline: leave-one-out, restarts: 2}
"""


def write_old_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "metrics.jsonl").write_text(METRICS)
    (folder / "result.json").write_text(RESULT)
    model = {name: 0.1 * torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape) for name, shape in SHAPES.items()}
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    state = [{"step": torch.tensor(4.0)} | {name: 1e-3 * value.abs() for name in moments} for value in model.values()]
    noise = [torch.Generator().manual_seed(seed).get_state() for seed in range(3)]
    options = yaml.safe_load(CONFIG).items()
    identity = {key: value for key, value in options if key not in RESUMABLE | {"tf32"}}  # which did not exist at first
    checkpoint: dict[str, Any] = {
        "model": model,
        "best": {name: value.clone() for name, value in model.items()},
        "optimiser": {"state": dict(enumerate(state))},
        "config": identity,
        "order": noise[0],
        "noise": [{"depth": noise[1], "task": {}, "cpu": noise[2]}],
        "numbers": NUMBERS,
    }
    torch.save(checkpoint, folder / "checkpoint.pt")
    return folder


def test_an_old_run_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = DensityRun.open(write_old_run(tmp_path / "old"))
    assert run.finished
    assert run.result == json.loads(RESULT)
    assert (run.config.k_seed, run.config.encoder, run.config.clip_decoder) == (None, "dreg", 20.0)
    assert yaml.safe_load(CONFIG).keys() <= vars(run.config).keys()
    assert float(run.trained().state_dict()["decoder.4.bias"][0]) == pytest.approx(-0.1)
    assert main(["evaluate", str(tmp_path / "old"), "--estimator", "iwae", "--cost", "3", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == 300
    entry = read(tmp_path / "old")
    assert (entry.state, entry.outcome) == ("finished", "test NLL 27.45 ± 0.21")


def test_an_old_run_is_continued_with_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What follows is what the version that wrote it gave for the same folder."""
    folder = write_old_run(tmp_path / "old")
    assert main(["train", "--resume", str(folder), "--epochs", "3", "--json"]) == 0, capsys.readouterr().err
    result = json.loads(capsys.readouterr().out)
    assert [record["valid_nll"] for record in read_records(folder)] == pytest.approx(
        [44.5, 44.349159635246814, 44.28188345291571], rel=1e-6
    )
    assert result["test_nll"] == pytest.approx(44.30063287026859, rel=1e-6)
    assert (result["epochs"], result["steps"]) == (3, 12)
    assert yaml.safe_load((folder / "config.yaml").read_text())["epochs"] == 3


@pytest.mark.parametrize(("run_type", "text"), [(ReverseKLRun, REVERSE_KL), (QPBORun, QPBO)])
def test_old_configs_of_the_other_commands_open(run_type: type[Run[Any]], text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    config = run_type.open(tmp_path).config
    assert {key: getattr(config, key) for key in yaml.safe_load(text)} == yaml.safe_load(text)
    assert config.k_seed is None


def test_a_last_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epoch": 2, "tr')
    assert read_records(tmp_path) == [{"epoch": 1}]


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b'{"step": 3}', b'{"epoch": null}', b"\xff\xfe"])
def test_a_damaged_record_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"epoch": 1}\n' + line + b"\n")
    with pytest.raises(DohyoError, match=r"metrics.jsonl: line 2 is not a record of an epoch"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"seed: [", "is damaged"), (b"\xff", "is damaged"), (b"", "is not the config"), (b"[1, 2]", "is not"), (b"1: 2", "is not")],
)
def test_a_damaged_config_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DohyoError, match="holds no run"):
        read_config(tmp_path)
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(DohyoError, match=f"config.yaml: {message}"):
        read_config(tmp_path)


def test_values_are_checked(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"n": 3, "x": 2, "flag": true, "none": null}')
    found = read_json(tmp_path / "a.json", "make it again")
    kinds = {"n": int, "x": float | int, "flag": bool, "none": str | None, "absent": float | int | None}
    assert check_values(found, kinds, Path("a"), "make it again") is found
    for key, kind, message in (
        ("n", str, "a: n is 3; it must be a text; make it again"),
        ("flag", int, "a: flag is True; it must be a whole number"),
        ("none", float | int, "a: none is None; it must be a number"),
        ("absent", bool, "a: absent is missing"),
    ):
        with pytest.raises(DohyoError, match=message):
            check_values(found, {key: kind}, Path("a"), "make it again")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DohyoError, match=r"a.json: holds a list where an object should be; make it again"):
        read_json(tmp_path / "a.json", "make it again")


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 not a zip", None, {"model": {}}, {"numbers": 3}])
def test_a_checkpoint_that_is_none(damage: Any, tmp_path: Path) -> None:
    with pytest.raises(DohyoError, match="train it first"):
        load_checkpoint(tmp_path)
    if isinstance(damage, bytes):
        (tmp_path / "checkpoint.pt").write_bytes(damage)
    else:
        torch.save(damage, tmp_path / "checkpoint.pt")
    with pytest.raises(DohyoError, match=r"checkpoint.pt: is not a checkpoint of dohyo, or is damaged"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("installed", [True, False])
def test_tensorboard_is_optional(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not installed:
        for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "tensorboard", None)  # as Python marks what cannot be imported
    log = RunLog(tmp_path, 0)
    log.append({"epoch": 1, "valid_nll": 2.5, "program": "plain"})
    log.close()
    assert read_records(tmp_path) == [{"epoch": 1, "valid_nll": 2.5, "program": "plain"}]
    assert (tmp_path / "tensorboard").exists() == installed
