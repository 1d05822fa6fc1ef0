"""Folders for the report: a study by the contract, and real runs of every command."""

import io
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dohyo.lab.cli import main

_MADE = tempfile.TemporaryDirectory()
SMALL = ["--hidden", "8", "--latent", "2", "--device", "cpu"]


def write_study(folder: Path, **changes: Any) -> Path:
    """What `dohyo reproduce` leaves, written by hand: two cells, a conclusion of each kind, a table and a picture."""
    folder.mkdir(parents=True)
    for suffix in ("png", "svg"):
        (folder / f"rates.{suffix}").write_bytes(_picture(suffix))
    conclusions = [
        {"claim": "SUMO's terms fall as k^-2", "paper": "E[Delta_k^2] = O(k^-2)", "found": "slope -2.01 ± 0.02", "holds": True},
        {"claim": "Cross terms fall as i^-2 j^-2", "paper": "O(i^-2 j^-2)", "found": "-0.0001 ± 0.0003", "holds": None},
        {"claim": "The same holds on a trained VAE", "paper": "", "found": "slope -1.31 ± 0.05", "holds": False},
    ]
    slopes = [["toy", -2.0134, -2.0], ["VAE", -1.3102, None], ["both", None, None], ["leave-one-out", -10.5, -4.0]]
    table = {"title": "Fitted slopes", "columns": ["model", "slope", "the paper"], "rows": slopes, "note": "Least squares."}
    alt = "Second moments on log-log axes, falling with slope -2"
    found = {
        "schema_version": 1,
        "study": "rates",
        "title": "How fast the terms fall",
        "question": "How fast do the terms of the series fall?",
        "scale": "small",
        "config": {"trials": 10, "seed": 0},
        "seeds": [0, 1, 2],
        "versions": {"dohyo": "0.1.0", "torch": "2.13.0"},
        "seconds": 75.0,
        "cells_done": 2,
        "cells_total": 2,
        "cells": {f"toy_{i}": {"options": {"seed": i}, "result": {"slope": -2.0}, "seconds": 30.0 + i} for i in range(2)},
        "conclusions": conclusions,
        "tables": [table],
        "pictures": [{"file": "rates.png", "title": "Second moments", "alt": alt}],
    }
    (folder / "study.json").write_text(json.dumps(found | changes))
    return folder


@cache
def _picture(suffix: str) -> bytes:
    figure, file = Figure(figsize=(6, 3)), io.BytesIO()
    figure.subplots().loglog([1, 10, 100], [1, 1e-2, 1e-4])
    figure.savefig(file, format=suffix, dpi=150)
    return file.getvalue()


def write_runs(folder: Path, *names: str) -> Path:
    """Runs of these names: of each command, with replicas, and one that was stopped before its result."""
    for name in names:
        left = shutil.ignore_patterns("result.json", "*.png", "tensorboard") if name == "unfinished" else None
        shutil.copytree(_made("iwae" if name == "unfinished" else name), folder / name, ignore=left)
    return folder


@cache
def _made(name: str) -> Path:
    """A run, made once for all tests of a process; they get copies."""
    train = ["train", "--epochs", "2", "--test-terms", "5", "--valid-terms", "2", *SMALL]
    lines = {
        "iwae": [*train, "--estimator", "iwae", "--cost", "5"],
        "replicas": [*train, "--replicas", "2"],
        "funnel": ["reverse-kl", "--steps", "20", "--check-every", "10", "--check-draws", "25", "--check-terms", "5",
                   "--test-draws", "25", "--test-terms", "5", *SMALL],
        "bits": ["qpbo", "--variables", "10", "--policy", "latent", "--steps", "20", "--check-every", "10", *SMALL],
    }  # fmt: skip
    folder = Path(_MADE.name, name)
    assert main([*lines[name], "--out", str(folder), "--json"]) == 0
    return folder
