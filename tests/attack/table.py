"""The inputs. A newcomer adds a line: what is wrong, the command line, a part of the message, and the files that it finds.

Each line begins in an empty folder. {run} is a copy of a small trained run; a file below run/ replaces one of its own.
"""

import gzip
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import torch
from PIL import Image

from attack.arena import Input

# ---- what strangers' files hold -------------------------------------------------------------------------------------------
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP_JSON, DEEP_YAML = '{"a":' * 100_000, "a: " + "[" * 10_000
LAUGHS = f"<!DOCTYPE svg [<!ENTITY a0 '{'x' * 99}'>" + "".join(
    f"<!ENTITY a{i + 1} '{f'&a{i};' * 10}'>" for i in range(9)
) + "]><svg viewBox='0 0 1 1'>&a9;</svg>"  # fmt: skip
WEIGHTS = "0.5,1.5,-0.5,0.1\n"


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def claims(shape: str) -> bytes:
    """An array's header with nothing behind it."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def npz(members: dict[str, bytes], damage: int = 0) -> bytes:
    """Compressed, with one byte changed at `damage` if given."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    content = bytearray(file.getvalue())
    if damage:
        content[damage] ^= 0xFF
    return bytes(content)


def png(width: int, height: int) -> bytes:
    """An image's header with nothing behind it."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


def sparse(content: bytes) -> Callable[[Path], None]:
    """A file of a terabyte that begins like this, and takes no room."""

    def write(path: Path) -> None:
        path.write_bytes(content)
        os.truncate(path, 10**12)

    return write


def images(path: Path) -> None:
    """A folder of many images that are one."""
    path.mkdir()
    Image.new("L", (5000, 5000)).save(path / "0.png")
    for i in range(1, 4000):
        os.link(path / "0.png", path / f"{i}.png")


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def replaced(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """In place of a file that is there."""

    def write(path: Path) -> None:
        path.unlink()
        make(path)

    return write


def checkpoint(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The run's own checkpoint with a part of it changed."""

    def write(path: Path) -> None:
        found = torch.load(path, weights_only=True)
        change(found)
        torch.save(found, path)

    return write


def repacked(path: Path) -> None:
    """The run's own checkpoint, compressed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def gzipped(path: Path) -> None:
    """Two megabytes that become two gigabytes."""
    path.write_bytes(gzip.compress(bytes(10**7)) * 200)


def matrix(path: Path) -> None:
    """A MATLAB file that claims to have 10^18 pixels."""
    scipy.io.savemat(path, {"X": np.zeros((3, 5), dtype=np.uint8)})
    path.write_bytes(path.read_bytes().replace(struct.pack("<ii", 3, 5), struct.pack("<ii", 10**9, 10**9)))


def header(text: str) -> bytes:
    """An array's header that says this."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"


def added(text: str) -> Callable[[Path], None]:
    """The run's own file with this at its end; in YAML the last of two values holds."""
    return lambda path: path.write_text(path.read_text() + text) and None


def study(**changes: Any) -> str:
    return json.dumps({"study": "convergence", "cells": {}, "pictures": [], **changes})


CELL = {"options": {}, "result": {}, "seconds": 1.0}
TRAIN = "train --epochs 1 --hidden 4 --latent 2 --device cpu"
NOISE = npy(np.random.RandomState(0).normal(size=(20, 8)))

INPUTS = [
    # ---- options ----------------------------------------------------------------------------------------------------------
    Input("no command", "", "give a command"),
    Input("an unknown command", "trian", "trian"),
    Input("an unknown option", f"{TRAIN} --out a --epocs 3", "--epocs"),
    Input("an unknown estimator", f"{TRAIN} --out a --estimator sumoo", "did you mean 'sumo'"),
    Input("an empty --out", f"{TRAIN} --out ''", "what follows --out is empty"),
    Input("an empty --out=", f"{TRAIN} --out=", "what follows --out is empty"),
    Input("two dashes as --config", f"{TRAIN} --out a --config=--", "what follows --config is empty"),
    Input("a huge seed", f"{TRAIN} --out a --seed 18446744073709551615", "a seed is a whole number from 0"),
    Input("a negative seed", f"{TRAIN} --out a --seed -1", "a seed is a whole number from 0"),
    Input("a negative k-seed", f"{TRAIN} --out a --k-seed -1", "k_seed is -1"),
    Input("a negative data seed", f"{TRAIN} --out a --data-seed -7", "data_seed is -7"),
    Input("a million hidden units", f"{TRAIN} --out a --hidden 1000000", "not enough memory"),
    Input("a billion latent dimensions", f"{TRAIN} --out a --latent 1000000000", "not enough memory"),
    Input("a cost of 10^12 in training", f"{TRAIN} --out a --estimator iwae --cost 1e12", "not enough memory"),
    Input("a cost of 10^30", f"{TRAIN} --out a --estimator iwae --cost 1e30", "cost is 1e+30"),
    Input("a batch of 10^12", f"{TRAIN} --out a --batch-size 1000000000000", "batch_size is 1000000000000"),
    Input("10^12 terms of a test", f"{TRAIN} --out a --test-terms 1000000000000", "test_terms is"),
    Input("10^12 terms of a validation", f"{TRAIN} --out a --valid-terms 1000000000000", "valid_terms is"),
    Input("10^12 draws", "reverse-kl --target funnel --test-draws 1000000000000 --out a", "test_draws is"),
    Input("ten thousand replicas", f"{TRAIN} --out a --replicas 10000", "at most 1000"),
    Input("checkpoints before they are due", f"{TRAIN} --out a --checkpoint-seconds -1", "checkpoint_seconds is -1"),
    Input("no rows in training", f"{TRAIN} --out a --max-rows 0", "max_rows is 0"),
    Input("no rows", "evaluate {run} --max-rows 0", "max_rows is 0"),
    Input("10^12 replicates", "evaluate {run} --replicates 1000000000000", "estimates in all"),
    Input("10^7 replicates", "evaluate {run} --estimator elbo --cost 1 --replicates 10000000", "estimates in all"),
    Input("a cost of 10^12", "evaluate {run} --estimator iwae --cost 1e12", "lower --cost"),
    Input("a K that must not stream", "evaluate {run} --anneal 0 --estimator jvi --cost 1e8", "needs all 100000000 log-weights"),
    Input("no error bar at all", "evaluate {run} --anneal 0 --target-stderr 1e-12", "it would take"),
    Input("a target that underflows", "evaluate {run} --anneal 0 --target-stderr 1e-300", "it would take"),
    Input("10^9 leapfrogs", "evaluate {run} --anneal 1000000000", "at most 10000"),
    Input("10^9 leapfrogs of a sandwich", "sandwich {run} --anneal 1000000000", "at most 10000"),
    Input("damaged constants", "evaluate {run} --anneal 4", "annealing.json", {"run/annealing.json": DEEP_JSON}),
    Input("a damaged evaluation", "report {run}", "evaluation.json", {"run/evaluation.json": '{"verdict": 3}'}),
    Input("a negative seed of an evaluation", "evaluate {run} --seed -1", "--seed is -1"),
    Input("a negative seed of a sandwich", "sandwich {run} --seed -1", "--seed is -1"),
    Input("10^12 simulated data", "sandwich {run} --count 1000000000000", "at most"),
    Input("10^12 chains", "sandwich {run} --chains 1000000000000", "at most"),
    Input("no rows of a sandwich", "sandwich {run} --max-rows 0", "max_rows is 0"),
    Input("a billion samples", "sample {run} --count 1000000000", "from 1 to 10000"),
    Input("markup", "evaluate 'a[/b]'", "a[/b]: holds no run"),
    Input("markup in an estimator", "evaluate {run} --estimator 'a[/b]'", "unknown estimator"),
    Input("two folders", f"{TRAIN} --out a --resume b", "give --out FOLDER"),
    Input("a cost that is no number", f"{TRAIN} --out a --cost nan", "cost is 'nan'; give a number or null"),
    Input("half an epoch", "train --data digits --epochs 1.5 --out a", "epochs is '1.5'; give a whole number"),
    Input("no run to evaluate", "evaluate", "arguments are required: run"),
    Input("no run to begin with", f"{TRAIN} --out a --init-from b", "b: holds no run"),
    Input("another command's run to begin with", f"{TRAIN} --out a --init-from b", "holds a run of dohyo qpbo",
          {"b/config.yaml": "policy: latent\n"}),
    Input("another command's run to compare", "compare {run} b", "holds a run of dohyo qpbo",
          {"b/config.yaml": "policy: latent\n"}),
    Input("both ways to choose replicates", "evaluate {run} --target-stderr 0.1 --replicates 3", "not both"),
    Input("no study", "reproduce --scale smoke --out a", "give a study (convergence"),
    Input("a study without epochs", "reproduce table1 --scale smoke --epochs 0 --out a", "epochs is 0"),
    Input("a study's negative seed", "reproduce convergence --scale smoke --seed -1 --out a", "seed is -1"),
    Input("a study's training without epochs", "reproduce convergence --scale smoke --vae-epochs 0 --out a", "epochs is 0"),
    Input("everything there is", "report /", "folders below it"),
    Input("memory that ends in training", "reverse-kl --hidden 12000 --steps 2 --device cpu --out a", "not enough memory"),
    Input("memory that ends in a folder of a folder", "reverse-kl --batch-size 16000000 --hidden 64 --device cpu --out a/b/c",
          "not enough memory"),
    Input("seeds of replicas that are too large", f"{TRAIN} --out a --replicas 3 --seed 2147483646", "seed is 2147483648"),
    Input("a study's seeds that are too large", "reproduce table1 --scale smoke --seed 2147483647 --out a", "seed is 2147483648"),
    Input("10^12 trials", "reproduce convergence --scale smoke --trials 1000000000000 --out a", "at most 10000"),
    Input("10^9 replicas of a report", "report {run}", "replicas is 1000000000",
          {"run/config.yaml": added("replicas: 1000000000\n"), "run/result.json": replaced(lambda path: None)}),
    Input("a long path", f"{TRAIN} --out {'a/' * 3000}", "too long"),
    # ---- where the output goes --------------------------------------------------------------------------------------------
    Input("a page on a device", "report {run} --out /dev/null", "the ending of a page"),
    Input("a page on a pipe", "report {run} --out p.html", "is no regular file", {"p.html": fifo}),
    Input("a page on a folder", "report {run} --out p.html", "is a folder", {"p.html/x": b""}),
    Input("a page on a circle", "report {run} --out p.html", "leads to itself", {"p.html": link("p.html")}),
    Input("values on a pipe", "evaluate {run} --out v.npz", "is no regular file", {"v.npz": fifo}),
    Input("values on a device", "estimate w.csv --out d.csv", "is no regular file",
          {"w.csv": WEIGHTS, "d.csv": link("/dev/full")}),
    Input("a picture on a pipe", "sample {run} --out s.png", "is no regular file", {"s.png": fifo}),
    Input("a picture's numbers on a pipe", "sample {run} --out s.png", "is no regular file", {"s.json": fifo}),
    Input("a foreign checkpoint", f"{TRAIN} --out a", "holds checkpoint.pt of another run", {"a/checkpoint.pt": b"x"}),
    Input("foreign metrics", f"{TRAIN} --out a", "holds metrics.jsonl of another run", {"a/metrics.jsonl": b"{}\n"}),
    Input("a foreign result", f"{TRAIN} --out a", "holds result.json of another run", {"a/result.json": b"{}"}),
    Input("a run that is there", f"{TRAIN} --out run", "already holds a run", {"run/mine.txt": b""}),
    Input("a file as folder", f"{TRAIN} --out a", "a", {"a": b""}),
    Input("a folder as picture", f"{TRAIN} --out a", "samples.png: is no regular file", {"a/samples.png/x": b""}),
    Input("a file as folder of logs", f"{TRAIN} --out a", "tensorboard: is no folder", {"a/tensorboard": b""}),
    Input("a file as replica", f"{TRAIN} --out a --replicas 2", "replica_0: is no folder", {"a/replica_0": b""}),
    Input("a folder as a replica's picture", f"{TRAIN} --out a --replicas 2", "is no regular file",
          {"a/replica_1/samples.png/x": b""}),
    Input("a pipe as lock", f"{TRAIN} --out a", ".dohyo.lock: is no regular file", {"a/.dohyo.lock": fifo}),
    Input("a folder as evaluation", "evaluate {run} --anneal 0", "is no regular file", {"run/evaluation.json/x": b""}),
    Input("a file as cells", "reproduce convergence --scale smoke --out s", "cells: is no folder", {"s/cells": b""}),
    # ---- texts ------------------------------------------------------------------------------------------------------------
    Input("a bomb as config", "train --config c.yaml --out a", "anchors or aliases", {"c.yaml": BOMB}),
    Input("a bomb as estimator", "evaluate {run} --estimator e.yaml", "anchors or aliases", {"e.yaml": BOMB}),
    Input("a bomb as a run's config", "evaluate {run}", "anchors or aliases", {"run/config.yaml": BOMB}),
    Input("a bomb on the command line", f"{TRAIN} --out a --data-kind '{BOMB.splitlines()[0]}'", "data_kind"),
    Input("a deep config", "train --config c.yaml --out a", "deep", {"c.yaml": DEEP_YAML}),
    Input("a run's deep config", "evaluate {run}", "deep", {"run/config.yaml": DEEP_YAML}),
    Input("a deep result", "train --resume run", "deep", {"run/result.json": DEEP_JSON}),
    Input("deep metrics", "report {run}", "line 1", {"run/metrics.jsonl": DEEP_JSON + "\n", "run/result.json": "{}"}),
    Input("a deep study", "report s", "deep", {"s/study.json": DEEP_JSON}),
    Input("a result of another kind", "report {run}", "result.json", {"run/result.json": "[]"}),
    Input("a result without an estimator", "train --resume run", "result.json: is damaged",
          {"run/result.json": lambda path: path.write_text(path.read_text().replace('"estimator"', '"nothing"'))}),
    Input("a config that is a list", "evaluate {run}", "is not the config of a run", {"run/config.yaml": "[1, 2]"}),
    Input("a config of bytes", "evaluate {run}", "config.yaml", {"run/config.yaml": b"\xff\xfe\x00"}),
    Input("a config with a wrong type", "evaluate {run}", "config.yaml", {"run/config.yaml": "hidden: [1]\n"}),
    Input("an estimator that is a number", "evaluate {run} --estimator e.json", "e.json", {"e.json": "3"}),
    Input("an estimator of order 1000", "evaluate {run} --estimator e.json", "lower",
          {"e.json": '{"name": "jvi", "k": 100000, "order": 1000}'}),
    Input("a date that is none", "evaluate {run}", "cannot be read", {"run/config.yaml": added("seed: 2001-99-99\n")}),
    Input("a number of 5,000 digits", "evaluate {run}", "cannot be read", {"run/config.yaml": added(f"seed: {'9' * 5000}\n")}),
    Input("a longer one", "train --config c.yaml --out a", "beyond 1e+300", {"c.yaml": f"seed: 0x{'f' * 90_000}\n"}),
    Input("a number that is a text", "train --config c.yaml --out a", "cannot be read", {"c.yaml": "cost: !!float x\n"}),
    Input("a null as number", "evaluate {run}", "batch_size is null", {"run/config.yaml": added("batch_size:\n")}),
    Input("a null as option", "evaluate {run} --config c.yaml", "split is null", {"c.yaml": "split: null\nseed: 1\n"}),
    Input("a k of 400 digits", "evaluate {run} --estimator e.json", "beyond 1e+300",
          {"e.json": f'{{"name": "iwae", "k": {"9" * 400}}}'}),
    Input("constants that are texts", "evaluate {run} --estimator e.json", "e.json: could not convert",
          {"e.json": '{"name": "sumo", "centre": ["a"]}'}),
    # ---- studies of strangers -----------------------------------------------------------------------------------------------
    Input("cells above the folder", "reproduce convergence --scale smoke --out s", "is not a cell of a study",
          {"s/study.json": study(cells={"../../TRAV": CELL})}),
    Input("cells elsewhere", "reproduce convergence --scale smoke --out s", "is not a cell of a study",
          {"s/study.json": study(cells={"/tmp/dohyo-attack": CELL})}),
    Input("a cell that is a number", "reproduce convergence --scale smoke --out s", "is not a cell",
          {"s/study.json": study(cells={"toy_01": 3})}),
    Input("a cell without options", "reproduce convergence --scale smoke --out s", "options is missing",
          {"s/study.json": study(cells={"toy_01": {}})}),
    Input("a study without pictures", "reproduce convergence --scale smoke --out s", "pictures is missing",
          {"s/study.json": '{"study": "convergence", "cells": {}}'}),
    Input("a cell of another study", "reproduce convergence --scale smoke --part toy --out s", "was made with",
          {"s/study.json": study(cells={"toy_01": CELL})}),
    Input("a picture of somebody else", "report {run}", "leads out of the folder",
          {"private.png": b"\x89PNG", "run/x.png": link("../private.png")}),
    Input("a picture of 10^10 pixels", "report {run}", "samples.png", {"run/samples.png": png(100_000, 100_000)}),
    Input("a picture of 10^8 pixels", "report {run}", "samples.png", {"run/samples.png": png(10_000, 10_000)}),
    Input("a picture that laughs", "report {run}", "samples.svg", {"run/samples.svg": LAUGHS}),
    Input("an infinite picture", "report {run}", "view box", {"run/samples.svg": '<svg viewBox="0 0 1e999 inf"/>'}),
    Input("values of somebody else", "evaluate {run} --anneal 0", "leads out of the folder",
          {"private": b"mine", "run/evaluation.npz": link("../private")}),
    Input("a lock of somebody else", f"{TRAIN} --out a", "leads out of the folder",
          {"private": b"mine", "a/.dohyo.lock": link("../private")}),
    Input("records of somebody else", "train --resume run --epochs 3", "leads out of the folder",
          {"private": b"", "run/metrics.jsonl": replaced(link("../private"))}),
    Input("a cell of somebody else", "reproduce convergence --scale smoke --out s", "leads out of the folder",
          {"s/cells/toy_01.json": link("../../private")}),
    Input("a cell with a long name", "reproduce convergence --scale smoke --out s", "is not a cell of a study",
          {"s/study.json": study(cells={"a" * 300: CELL})}),
    Input("a cell's work elsewhere", "reproduce convergence --scale smoke --out s", "leads out of the folder",
          {"private/x": b"", "s/work/vae": link("../../private")}),
    Input("a replica elsewhere", f"{TRAIN} --out a --replicas 2", "leads out of the folder",
          {"private/x": b"", "a/replica_0": link("../private")}),
    Input("a study of somebody else", "reproduce convergence --scale smoke --out s", "leads out of the folder",
          {"s/cells": link("..")}),
    # ---- checkpoints ----------------------------------------------------------------------------------------------------------
    Input("a checkpoint of bytes", "evaluate {run}", "checkpoint.pt", {"run/checkpoint.pt": b"PK\x03\x04junk"}),
    Input("parameters of other shapes", "evaluate {run}", "does not fit",
          {"run/checkpoint.pt": checkpoint(lambda c: c["best"].update({"encoder.0.bias": torch.zeros(77)}))}),
    Input("parameters of another type", "evaluate {run}", "does not fit",
          {"run/checkpoint.pt": checkpoint(lambda c: c["best"].update({"encoder.0.bias": "text"}))}),
    Input("no parameters", "evaluate {run}", "does not fit", {"run/checkpoint.pt": checkpoint(lambda c: c["best"].clear())}),
    Input("numbers of another type", "train --resume run --epochs 3", "epoch is",
          {"run/checkpoint.pt": checkpoint(lambda c: c["numbers"].update(epoch="x"))}),
    Input("numbers beyond all", "train --resume run --epochs 3", "epoch is",
          {"run/checkpoint.pt": checkpoint(lambda c: c["numbers"].update(epoch=10**30))}),
    Input("moments of other shapes", "train --resume run --epochs 3", "of the optimiser is",
          {"run/checkpoint.pt": checkpoint(lambda c: c["optimiser"]["state"][0].update(exp_avg=torch.zeros(7)))}),
    Input("noise of another length", "train --resume run --epochs 3", "checkpoint.pt: is damaged",
          {"run/checkpoint.pt": checkpoint(lambda c: c["noise"][0].update(depth=torch.zeros(3, dtype=torch.uint8)))}),
    Input("no order", "train --resume run --epochs 3", "checkpoint.pt: is damaged",
          {"run/checkpoint.pt": checkpoint(lambda c: c.pop("order"))}),
    Input("a checkpoint that grows as it is read", "evaluate {run}", "compressed", {"run/checkpoint.pt": repacked}),
    Input("a checkpoint that makes bytes", "evaluate {run}", "bytearray",
          {"run/checkpoint.pt": checkpoint(lambda c: c.update(x=bytearray(9)))}),
    Input("a checkpoint without end", "evaluate {run}", "checkpoint.pt", {"run/checkpoint.pt": sparse(b"PK\x03\x04")}),
    # ---- files that never end, or never begin ---------------------------------------------------------------------------------
    Input("a config without end", "evaluate {run}", "is the most", {"run/config.yaml": sparse(b"")}),
    Input("an option's file without end", "train --config c.yaml --out a", "is the most", {"c.yaml": sparse(b"")}),
    Input("a device as option's file", "train --config c.yaml --out a", "c.yaml", {"c.yaml": link("/dev/zero")}),
    Input("an estimator without end", "evaluate {run} --estimator e.json", "is the most", {"e.json": sparse(b"{")}),
    Input("an estimator from a pipe", "evaluate {run} --estimator e.json", "no regular file", {"e.json": fifo}),
    Input("a result without end", "report {run}", "is the most", {"run/result.json": sparse(b"{")}),
    Input("a result from a device", "report {run}", "no regular file", {"run/result.json": replaced(link("/dev/zero"))}),
    Input("a result from a pipe", "train --resume run", "no regular file", {"run/result.json": replaced(fifo)}),
    Input("records without end", "report {run}", "is the most", {"run/metrics.jsonl": sparse(b"{}"), "run/result.json": "{}"}),
    Input("records from a device", "report {run}", "no regular file",
          {"run/metrics.jsonl": replaced(link("/dev/zero")), "run/result.json": "{}"}),
    Input("a picture without end", "report {run}", "is the most", {"run/samples.png": sparse(b"\x89PNG")}),
    Input("a picture from a pipe", "report {run}", "no regular file", {"run/samples.png": replaced(fifo)}),
    Input("a study without end", "reproduce convergence --scale smoke --out s", "is the most", {"s/study.json": sparse(b"{")}),
    Input("an estimator that would be ignored", "qpbo --variables 9 --estimator iwae --out a", "add --policy latent"),
    Input("a reward without end", "qpbo --instance r.txt --out a", "is the most", {"r.txt": sparse(b"1\n")}),
    Input("values from a pipe", "compare a.npz a.npz", "no saved evaluation", {"a.npz": fifo}),
    Input("values without end", "compare a.npz a.npz", "a.npz", {"a.npz": npz({"log_px": claims("(9200000000000,)")})}),
    # ---- data and log-weights --------------------------------------------------------------------------------------------------
    Input("no such file", f"{TRAIN} --data x.npy --out a", "there is no such file"),
    Input("a circle as data", f"{TRAIN} --data x.npy --out a", "leads to itself", {"x.npy": link("x.npy")}),
    Input("an array of 73 TB", "estimate x.npy", "bytes", {"x.npy": claims("(9200000000000,)")}),
    Input("an array that overflows", "estimate x.npy", "bytes", {"x.npy": claims("(4294967296, 4294967296, 4294967296)")}),
    Input("a negative array", "estimate x.npy", "shape", {"x.npy": claims("(-5,)")}),
    Input("a compressed array that is damaged", "estimate x.npz", "cannot be read",
          {"x.npz": npz({"a": NOISE}, damage=len(NOISE) // 3)}),
    Input("an archive that claims too much", "estimate x.npz", "bytes", {"x.npz": npz({"a": claims("(9200000000000,)")})}),
    Input("numbers of no bytes", "estimate x.npy", "x.npy",
          {"x.npy": header("{'descr': '|V0', 'fortran_order': False, 'shape': (9000000000000000,), }")}),
    Input("a header that is a program", "estimate x.npy", "cannot be read", {"x.npy": header("__import__('os').mkdir('x')")}),
    Input("a compressed MNIST that grows", f"{TRAIN} --data mnist --data-dir d --out a", "sha256",
          {"d/mnist/train-images-idx3-ubyte.gz": gzipped}),
    Input("a MATLAB file that grows", f"{TRAIN} --data mnist-static --data-dir d --out a", "of memory",
          {"d/mnist_static/binarized_mnist_train.mat": matrix}),
    Input("an OMNIGLOT of 73 TB", f"{TRAIN} --data omniglot --data-dir d --out a", "bytes",
          {"d/omniglot/omniglot28.npz": npz({"train": claims("(9200000000000,)"), "test": NOISE})}),
    Input("a pickle", "estimate x.npy", "Python objects", {"x.npy": npy(np.array([{}, []], dtype=object))}),
    Input("a field of 131,073 characters", "estimate x.csv", "x.csv", {"x.csv": "1" * 131_073}),
    Input("a key for an .npy", "estimate x.npy --key a", "leave it out", {"x.npy": NOISE}),
    Input("log-weights that overflow", "estimate x.csv", "beyond", {"x.csv": "1e308,-1e308\n"}),
    Input("more replicates than weights", "estimate x.csv --replicates 1000000000000", "replicates is", {"x.csv": WEIGHTS}),
    Input("a negative seed of an estimate", "estimate x.csv --seed -3", "--seed is -3", {"x.csv": WEIGHTS}),
    Input("a table with a long field", f"{TRAIN} --data x.csv --out a", "x.csv", {"x.csv": "1," + "1" * 131_073}),
    Input("an array of a terabyte", f"{TRAIN} --data x.npy --out a", "of memory", {"x.npy": sparse(claims("(120000000000,)"))}),
    Input("log-weights of a terabyte", "estimate x.npy", "of memory", {"x.npy": sparse(claims("(120000000000,)"))}),
    Input("a table of a terabyte", f"{TRAIN} --data x.csv --out a", "of memory", {"x.csv": sparse(b"0.25,0.5\n" * 10_000)}),
    Input("a CSV file of a terabyte", "estimate x.csv", "of memory", {"x.csv": sparse(b"0.25,0.5\n" * 10_000)}),
    Input("a row without end", f"{TRAIN} --data x.csv --out a", "a row of more than", {"x.csv": b"0.5," * 2**23}),
    Input("a row of log-weights without end", "estimate x.csv", "a row of more than", {"x.csv": b"0.5," * 2**23}),
    Input("a row of lines without end", f"{TRAIN} --data x.csv --out a", "a row of more than",
          {"x.csv": (b'"' + b"x" * 1021 + b'\n",') * 2**15}),
    Input("everything there is as images", f"{TRAIN} --data / --out a", "/: "),
    Input("a terabyte of images", f"{TRAIN} --data d --out a", "4000 images", {"d": images}),
    Input("an image of 10^10 pixels", f"{TRAIN} --data d --out a", "d/", {"d/x.png": png(100_000, 100_000)}),
    Input("an image cut short", f"{TRAIN} --data d --out a", "d/", {"d/x.png": png(8, 8)}),
    Input("values that are damaged", "compare a.npz a.npz", "a.npz", {"a.npz": npz({"log_px": NOISE}, damage=len(NOISE) // 3)}),
    Input("too many columns", f"{TRAIN} --data x.npy --out a", "at most 1048576",
          {"x.npy": npy(np.zeros((10, 2_000_000), dtype=np.uint8))}),
]  # fmt: skip

# These are run as processes of their own by `make test` too, one of each sort.
REAL = ("an unknown option", "a page on a pipe", "a bomb as config", "cells above the folder")
