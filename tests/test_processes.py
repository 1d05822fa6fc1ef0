"""Two processes under torchrun, or forked as if they were, on the CPU."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dohyo.lab.folder import read_records
from dohyo.lab.training.state import load_checkpoint
from real import command, environment, finished, finished_together, torchrun

SMALL = ["--data", "digits", "--hidden", "16", "--latent", "4", "--test-terms", "50", "--valid-terms", "5", "--device", "cpu"]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return finished_together([sys.executable, *arguments], folder)


def test_two_processes(tmp_path: Path) -> None:
    """One log, one checkpoint, the same parameters and about the same estimates as one process; resumable; evaluated in parts."""
    options = [*SMALL, "--estimator", "sumo", "--cost", "15", "--epochs", "2", "--checkpoint-seconds", "0"]
    done = run("-m", "dohyo", "train", *options, "--out", "two", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test NLL") == 1
    assert "distributed" not in done.stderr  # Lightning's greetings
    alone = finished(command("train", *options, "--out", "one", "--json"), tmp_path)
    one, two = json.loads(alone.stdout), json.loads((tmp_path / "two/result.json").read_text())
    assert two["test_nll"] == pytest.approx(one["test_nll"], abs=0.7)
    assert [record["epoch"] for record in read_records(tmp_path / "two")] == [1, 2]
    assert len(load_checkpoint(tmp_path / "two")["noise"]) == 2
    noises = [noise["cpu"] for noise in load_checkpoint(tmp_path / "two")["noise"]]
    assert not torch.equal(*noises)

    again = run("-m", "dohyo", "train", "--resume", "two", "--epochs", "3", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(read_records(tmp_path / "two")) == 3
    refused = finished(command("train", "--resume", "two", "--epochs", "4"), tmp_path)
    assert refused.returncode == 2
    assert "2 processes" in refused.stderr

    evaluated = run("-m", "dohyo", "evaluate", "two", "--estimator", "iwae", "--cost", "50", "--replicates", "2", "--json",
                    folder=tmp_path)  # fmt: skip
    assert evaluated.returncode == 0, evaluated.stderr
    report = json.loads(evaluated.stdout)
    assert (report["data"], report["replicates"]) == (300, 2)
    assert 0 < report["noise_stderr"] < 0.2 * report["stderr"]
    assert report["nll"] == pytest.approx(json.loads((tmp_path / "two/result.json").read_text())["test_nll"], abs=0.2)


def test_two_processes_turn_to_chains_together(tmp_path: Path) -> None:
    options = [*SMALL, "--anneal", "2", "--cost", "1", "--epochs", "3", "--anneal-from", "0.4", "--out", "two"]
    done = run("-m", "dohyo", "train", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ["lost_chains" in record for record in read_records(tmp_path / "two")] == [False, True, True]


LATE = """
import os
import time

import torch
from dohyo.models import VAE

if os.environ["RANK"] == "0":
    save = torch.save

    def late(value, *others, **options):
        time.sleep(isinstance(value, dict))  # a checkpoint
        save(value, *others, **options)

    torch.save = late


class Late(VAE):
    pass
"""


def test_all_processes_test_what_the_last_checkpoint_holds(tmp_path: Path) -> None:
    """Though the first one, which writes it, takes its time: the others wait."""
    (tmp_path / "late.py").write_text(LATE)
    options = [*SMALL, "--anneal", "2", "--cost", "1", "--epochs", "3", "--anneal-from", "0.4", "--average", "2"]
    for model in ("vae", "late:Late"):
        done = run("-m", "dohyo", "train", *options, "--model", model, "--out", model[:3], folder=tmp_path)
        assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("vae", "lat")]
    for name in ("test_nll", "test_nll_annealed", "test_nll_average", "test_nll_average_annealed", "before_chains"):
        assert results[0][name] == results[1][name]


def test_a_last_batch_with_fewer_data_than_processes(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    sizes = {"train": 101, "valid": 11, "test": 11}
    np.savez(tmp_path / "odd.npz", **{name: generator.random((size, 3, 3)) for name, size in sizes.items()})
    options = ["--data", "odd.npz", *SMALL[2:], "--estimator", "sumo", "--cost", "8", "--epochs", "2", "--out", "odd"]
    done = run("-m", "dohyo", "train", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr


PROBE = """
import json, sys, torch
from pathlib import Path
from dohyo import SUMO
from dohyo.lab import LoopConfig, fit
from dohyo.lab.data import load
from dohyo.models import VAE
from dohyo.objectives import MaximumLikelihood
from dohyo.lab.training.processes import launch

fabric = launch("cpu")
seen = []
class Spy(VAE):
    def bind(self, x, detach_posterior=False):
        source = super().bind(x, detach_posterior)
        def log_weights(rows):
            if self.training:
                seen.append((rows.bincount(minlength=len(x)).tolist(), x[:2].sum(-1).tolist()))
            return source(rows)
        return log_weights
torch.manual_seed(fabric.global_rank)  # not the same start: the first process's parameters must win
model = Spy(data=64, hidden=8, latent=2)
objective = MaximumLikelihood(SUMO(2), k_draw=sys.argv[1])
list(fit(model, load("digits"), objective, LoopConfig(epochs=1, device="cpu"), fabric=fabric))
state = torch.cat([p.flatten() for p in model.parameters()]).tolist()
Path(f"rank{fabric.global_rank}.json").write_text(json.dumps({"seen": seen[:5], "parameters": state}))
"""


@pytest.mark.parametrize("k_draw", ["batch", "datum", pytest.param("stratified", marks=pytest.mark.slow)])
def test_ranks_share_parameters_and_a_batch_k_but_not_data(tmp_path: Path, k_draw: str) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    done = run("probe.py", k_draw, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    counts = [[step[0] for step in rank["seen"]] for rank in ranks]
    assert all(len(c) == 50 for rank in counts for c in rank)
    if k_draw == "batch":
        assert counts[0] == counts[1]
        assert all(len(set(c)) == 1 for c in counts[0])
    else:
        assert counts[0] != counts[1]
        assert all(len(set(c)) > 1 for c in counts[0])
        halves = [c.count(3) == 25 for rank in counts for c in rank]  # K is 1 with probability 1/2
        assert all(halves) if k_draw == "stratified" else not all(halves)
    assert [step[1] for step in ranks[0]["seen"]] != [step[1] for step in ranks[1]["seen"]]


GRADIENT = """
import json, torch
from pathlib import Path
from torch import nn
from dohyo import IWAE
from dohyo.lab import LoopConfig, fit
from dohyo.lab.data import Dataset
from dohyo.objectives import MaximumLikelihood
from dohyo.lab.training.processes import launch

class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(3))
    def log_weights(self, x, rows):
        return x[rows] @ self.theta

fabric = launch("cpu")
x = (torch.arange(21).view(7, 3) % 2).float()
data = Dataset("seven", x, x, x, "binary", (3,))
model = Linear()
list(fit(model, data, MaximumLikelihood(IWAE(1)), LoopConfig(epochs=1, batch_size=7, device="cpu"), fabric=fabric))
Path(f"grad{fabric.global_rank}.json").write_text(json.dumps([model.theta.grad.tolist(), (-x.mean(0)).tolist()]))
"""


def test_the_gradient_is_the_mean_over_all_processes(tmp_path: Path) -> None:
    """Adam would hide a wrong factor, so the gradient itself is looked at; seven data are not shared out evenly."""
    (tmp_path / "gradient.py").write_text(GRADIENT)
    done = run("gradient.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found, exact = json.loads((tmp_path / f"grad{rank}.json").read_text())
        assert found == pytest.approx(exact)


FOREVER = [*SMALL, "--estimator", "iwae", "--cost", "5", "--epochs", "100000", "--checkpoint-seconds", "0", "--out", "run"]


def test_a_killed_rank_ends_the_job_with_a_usable_checkpoint(tmp_path: Path) -> None:
    def kill(ranks: list[BaseProcess]) -> None:
        while len(read_records(tmp_path / "run")) < 2:
            assert all(rank.is_alive() for rank in ranks)
            time.sleep(0.02)
        ranks[1].kill()
        ranks[0].join(60)
        assert ranks[0].exitcode  # by itself: torchrun has nothing to end

    done = finished_together(command("train", *FOREVER), tmp_path, kill)
    assert "another process of the job failed" in done.stderr
    goes_on(tmp_path)


def goes_on(folder: Path) -> None:
    epoch = load_checkpoint(folder / "run")["numbers"]["epoch"]
    assert epoch >= 1
    done = run("-m", "dohyo", "train", "--resume", "run", "--epochs", str(epoch + 1), folder=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # torchrun and its processes take 16 s to start
def test_a_rank_killed_under_torchrun(tmp_path: Path) -> None:
    job = subprocess.Popen(
        torchrun("-m", "dohyo", "train", *FOREVER),
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    while job.poll() is None and len(read_records(tmp_path / "run")) < 2:
        time.sleep(0.05)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if b"dohyo" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, error = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "Signal 9" in error or "SIGKILL" in error or "another process" in error
    goes_on(tmp_path)


APART = """
import os
from pathlib import Path
from dohyo.lab.training import processes
from dohyo.lab.training.processes import only_writer

fabric = processes.launch("cpu")
processes._LATEST = 0.5
os.chdir(f"node{fabric.global_rank}")
with only_writer(Path("run"), fabric=fabric):
    processes.check_common(fabric, Path("run/.dohyo.lock"))
"""


def test_machines_without_a_common_folder_are_told_so(tmp_path: Path) -> None:
    (tmp_path / "apart.py").write_text(APART)
    for rank in (0, 1):
        (tmp_path / f"node{rank}").mkdir()
    done = run("apart.py", folder=tmp_path)
    assert done.returncode != 0
    assert "run is not the same folder for all processes; give one that all machines share" in done.stderr


@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    """Two torchruns that meet on the loopback, with one process each, and again to go on: one log, one checkpoint of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free.getsockname()[1]}"]
    node = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meeting]
    options = [*SMALL, "--estimator", "sumo", "--cost", "15", "--epochs", "2", "--out", "run"]
    for line in (["train", *options], ["train", "--resume", "run", "--epochs", "3"]):
        nodes = [
            subprocess.Popen(
                [*node, "-m", "dohyo", *line],
                cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
            )
            for _ in range(2)
        ]  # fmt: skip
        answers = [each.communicate(timeout=300) for each in nodes]
        assert [each.returncode for each in nodes] == [0, 0], answers
        assert sum("test NLL" in out for out, _ in answers) == 1
    assert [record["epoch"] for record in read_records(tmp_path / "run")] == [1, 2, 3]
    noises = [noise["cpu"] for noise in load_checkpoint(tmp_path / "run")["noise"]]
    assert len(noises) == 2
    assert not torch.equal(*noises)


@pytest.mark.parametrize("options", [[*SMALL, "--estimator", "iwae", "--cost", "2"], None])
def test_a_batch_smaller_than_the_processes_is_refused_before_any_file(options: list[str] | None, tmp_path: Path) -> None:
    line = ["train", *options] if options else ["qpbo", "--variables", "6", "--device", "cpu"]
    done = run("-m", "dohyo", *line, "--batch-size", "1", "--out", "run", folder=tmp_path)
    assert done.returncode != 0
    errors = [text for text in done.stderr.splitlines() if text.startswith("dohyo: error: ")]
    wanted = (
        "dohyo: error: batch_size is 1 for 2 processes; each needs a part of every batch: set it to 2 or more, or start fewer"
    )
    assert errors
    assert all(text.startswith(wanted) for text in errors)
    assert "another process" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_only_the_other_processes_say_that_one_failed(tmp_path: Path) -> None:
    """The second rank's own error shows its traceback; it never blames another."""
    (tmp_path / "mine.py").write_text(
        "import os\nfrom dohyo.models import VAE\n\n"
        "class Fails(VAE):\n"
        "    steps = 0\n"
        "    def encode(self, x):\n"
        "        Fails.steps += 1\n"
        "        if self.training and Fails.steps > 8 and os.environ['RANK'] == '1':\n"
        "            raise RuntimeError('mine alone')\n"
        "        return super().encode(x)\n"
    )
    options = [*SMALL, "--estimator", "iwae", "--cost", "2", "--epochs", "50", "--model", "mine:Fails", "--out", "run"]
    done = run("-m", "dohyo", "train", *options, folder=tmp_path)
    assert done.returncode != 0
    assert "RuntimeError: mine alone" in done.stderr
    assert "another process of the job failed (mine alone)" not in done.stderr
    assert done.stderr.count("another process of the job failed") <= 1  # torchrun may end the first rank before it can say so
