"""Random options and randomly damaged files: the answer is a result or one line, whatever comes. Brief in `make test`, long in
`make test-slow`."""

import contextlib
import io
import json
import math
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attack.arena import Answer, answer_here

BRIEF = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = settings(BRIEF, max_examples=int(os.environ.get("DOHYO_FUZZ", "1500")), derandomize=False, print_blob=True)
LENGTHS = [pytest.param(BRIEF, id="brief"), pytest.param(LONG, id="long", marks=pytest.mark.slow)]
VALUES = st.text(max_size=8) | st.sampled_from(
    ["-1", "0", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 30, "1e12", "0x10", "null", "true", "[]", "[1, 2]", "{a: b}", "{",
     "&a b", "*a", "!!python/object:os.system x", "é", "\x00", "'", '"', "a[/b]", "%s", "{0}", "../..", "/", "/dev/null", "-",
     "--", "a:b", ":", "x" * 3000, "\U0001f600", " ", "\n", "1_000", "\u0661"]
)  # fmt: skip
TRAIN = shlex.split(
    "batch-size optimiser learning-rate beta1 epsilon clip-decoder max-rows checkpoint-seconds seed k-seed device tf32 epochs "
    "lr-factor lr-patience valid-terms program data data-dir data-kind data-seed model hidden latent estimator cost max-terms "
    "encoder k-draw baseline clip-datum test-terms replicas config resume"
)
BYTES = [b"[" * 200, b"null", b"-", b"\n", b"1e999", b'"', b"&a"]
EVALUATE = ["anneal", "estimator", "split", "replicates", "target-stderr", "max-rows", "out", "seed", "device", "config"]
EVALUATED = shlex.split("evaluate run --anneal 0 --estimator elbo --cost 1 --device cpu --json")
STUDY = shlex.split("reproduce convergence --scale smoke --part toy --device cpu --json --out study")
JUNK: list[Any] = [
    *(None, True, -1, 0, 10**400, 1e308, math.inf, math.nan),
    *("", "\ud800", "x" * 3000, "../..", "<b>"),
    *([], {}, [[]], [3, "a"], {"a": {}}),
]
ESTIMATE = ["estimator", "cost", "replicates", "confidence", "seed", "key", "out", "plot", "config"]


def check(answer: Answer) -> None:
    """No exception has come this far; an error is one line."""
    assert answer.status in (0, 2), answer
    if answer.status == 2:
        assert answer.error.startswith("dohyo: error: "), answer.error
        assert answer.error.count("\n") == 1, answer.error
        assert len(answer.error) < 1000, answer.error


@pytest.mark.parametrize("length", LENGTHS)
def test_options(length: settings, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is refused in the end, because the folder holds a run; the others may succeed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.csv").write_text("0.5,1.5,-0.5,0.1\n0.2,0.3,0.4,0.5\n")
    commands = {
        "train": (["--out", str(run)], TRAIN),
        "evaluate": ([str(run), "--anneal", "0", "--cost", "1"], EVALUATE),
        "estimate": (["w.csv"], ESTIMATE),
    }

    @length
    @given(st.sampled_from(list(commands)), st.data())
    def attack(command: str, data: st.DataObject) -> None:
        first, names = commands[command]
        options = data.draw(st.lists(st.tuples(st.sampled_from(names), VALUES), min_size=1, max_size=2))
        check(answer_here([command, *first, *(f"--{name}={value}" for name, value in options)]))

    attack()


@pytest.mark.parametrize("length", LENGTHS)
def test_damaged_files(length: settings, run: Path) -> None:
    """A file of a run, or of log-weights, with some bytes changed, and every command that reads it."""
    arrays = io.BytesIO()
    np.savez_compressed(arrays, a=np.random.RandomState(0).normal(size=(6, 9)), b=np.arange(5))
    names = ["config.yaml", "checkpoint.pt", "result.json", "metrics.jsonl", "learning_curves.png", "w.npz", "w.csv"]

    @length
    @given(st.sampled_from(names), st.data())
    def attack(name: str, data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            folder = Path("run")
            shutil.copytree(run, folder)
            (folder / "w.npz").write_bytes(arrays.getvalue())
            (folder / "w.csv").write_bytes(b"1.5,2.5,0.25\n-1,2e3,nan\n")
            content = bytearray((folder / name).read_bytes())
            for _ in range(data.draw(st.integers(1, 4))):
                at = data.draw(st.integers(0, len(content)))
                new = data.draw(st.binary(max_size=6) | st.sampled_from(BYTES))
                content[at : at + data.draw(st.integers(0, 8))] = new
            if data.draw(st.booleans()):
                del content[data.draw(st.integers(0, len(content))) :]
            (folder / name).write_bytes(bytes(content))
            if name.startswith("w."):
                check(answer_here(["estimate", str(folder / name), "--estimator", "elbo", "--cost", "1", "--json"]))
                return
            check(answer_here(["report", "run", "--json"]))
            check(answer_here(EVALUATED))
            if name != "config.yaml":  # which may ask for any length of training
                check(answer_here(["train", "--resume", "run", "--device", "cpu", "--json"]))

    attack()


def changed(value: Any, data: st.DataObject) -> Any:
    """The value with junk in the place of a part, which may be deep inside, or without it."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 9)):
        key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        copy: Any = value.copy()
        if data.draw(st.integers(0, 9)):
            copy[key] = changed(value[key], data)
        else:
            del copy[key]
        return copy
    return data.draw(st.sampled_from(JUNK))


@pytest.mark.parametrize("length", LENGTHS)
def test_changed_values(length: settings, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a run or of a study that can be read, but holds other values, and every command that reads it."""
    shutil.copytree(run, tmp_path / "kept/run")
    monkeypatch.chdir(tmp_path / "kept")
    assert answer_here(EVALUATED).status == answer_here(STUDY).status == 0
    names = ["run/config.yaml", "run/result.json", "run/evaluation.json", "study/study.json", "study/cells/toy_01.json"]

    @length
    @given(st.sampled_from(names), st.data())
    def attack(name: str, data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            for folder in ("run", "study"):
                shutil.copytree(tmp_path / "kept" / folder, folder)
            found = changed(yaml.safe_load(Path(name).read_text()), data)
            Path(name).write_text(yaml.safe_dump(found) if name.endswith("yaml") else json.dumps(found))
            check(answer_here(["report", "run", "study", "--json"]))
            lines = {
                "run/config.yaml": [EVALUATED],
                "run/result.json": [["compare", "run", "run", "--json"], ["train", "--resume", "run"]],
            }
            for line in lines.get(name, [STUDY] if name.startswith("study/") else []):
                check(answer_here(line))

    attack()
