"""The public data sets: how files are read, a real HTTP server on this machine, and the real files where DOHYO_DATA has them."""

import contextlib
import gzip
import hashlib
import http.server
import math
import os
import resource
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch

from dohyo.lab.data import load
from dohyo.lab.data.mirrors import MIRRORS, download, find
from dohyo.lab.data.public import SHA256
from dohyo.lab.data.readers import read_amat, read_chardata, read_idx, read_mat
from test_data import digest, files_in, line_of, standard_errors

REAL = os.environ.get("DOHYO_DATA")
real_files = pytest.mark.skipif(
    not REAL, reason="needs the real files: set DOHYO_DATA to the folder that holds mnist/ and others"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no folder that happens to be set outside."""
    monkeypatch.delenv("DOHYO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "dohyo"


# --- how files are read ---

rng = np.random.default_rng(0)
PIXELS = (rng.random((20, 784)) > 0.5).astype(np.uint8)


def amat(pixels: np.ndarray) -> bytes:
    return "".join(" ".join(map(str, row)) + " \n" for row in pixels.tolist()).encode()


def idx(pixels: np.ndarray) -> bytes:
    return np.array([2051, len(pixels), 28, 28], ">i4").tobytes() + pixels.astype(np.uint8).tobytes()


def test_mat_and_amat_agree(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "x.mat", {"X": np.asfortranarray(PIXELS)}, do_compression=True)
    scipy.io.savemat(tmp_path / "double.mat", {"X": PIXELS.astype(np.float64)})
    (tmp_path / "x.amat").write_bytes(amat(PIXELS))
    (tmp_path / "crlf.amat").write_bytes(amat(PIXELS).replace(b" \n", b"\r\n"))
    for name, read in (("x.mat", read_mat), ("double.mat", read_mat), ("x.amat", read_amat), ("crlf.amat", read_amat)):
        assert np.array_equal(read(tmp_path / name, digest(PIXELS))["x"], PIXELS.reshape(-1, 28, 28))
        with pytest.raises(ValueError, match="sha256"):
            read(tmp_path / name, digest(PIXELS[::-1]))
    for wrong in (b"0 1 2 " * 784, b"0 1 0\n", b"0.0 " * 784):
        (tmp_path / "x.amat").write_bytes(wrong)
        with pytest.raises(ValueError, match="784 zeros and ones"):
            read_amat(tmp_path / "x.amat", digest(PIXELS))


def test_chardata_is_turned_upright(tmp_path: Path) -> None:
    pictures = rng.random((7, 28, 28))
    columns = pictures.transpose(0, 2, 1).reshape(7, 784).T
    scipy.io.savemat(tmp_path / "chardata.mat", {"data": columns[:, :5], "testdata": columns[:, 5:]})
    arrays = read_chardata(tmp_path / "chardata.mat", train=5, test=2)
    assert np.array_equal(np.concatenate([arrays["train"], arrays["test"]]), pictures)
    with pytest.raises(ValueError, match="testdata is not a matrix of 784 by 3"):
        read_chardata(tmp_path / "chardata.mat", train=5, test=3)
    for bad in (math.nan, 255.0):
        columns[3, 1] = bad
        scipy.io.savemat(tmp_path / "chardata.mat", {"data": columns[:, :5], "testdata": columns[:, 5:]})
        with pytest.raises(ValueError, match=r"data is not a matrix of 784 by 5 numbers in \[0, 1\]"):
            read_chardata(tmp_path / "chardata.mat", train=5, test=2)


@pytest.fixture
def small_mnist_static(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The .amat files of a data set with few pictures, whose checksums take the place of the real ones."""
    content = {}
    for i, split in enumerate(("train", "valid", "test")):
        pixels = np.roll(PIXELS, i, axis=1)
        monkeypatch.setitem(SHA256, f"mnist-static {split}", digest(pixels))
        content[f"mnist_static/binarized_mnist_{split}.amat"] = amat(pixels)
    return content


def put(folder: Path, content: dict[str, bytes]) -> None:
    for relative, body in content.items():
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        (folder / relative).write_bytes(body)


def test_folders_in_order(
    small_mnist_static: dict[str, bytes], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that lacks the file is an error with its name in it, so the message tells which one was taken."""
    for name in ("argument", "environment"):
        (tmp_path / name).mkdir()
    put(cache, small_mnist_static)
    assert torch.equal(load("mnist-static").flat().valid, torch.from_numpy(np.roll(PIXELS, 1, axis=1)).float())
    assert load("mnist-static").kind == "binary"
    monkeypatch.setenv("DOHYO_DATA", str(tmp_path / "environment"))
    with pytest.raises(ValueError, match=r"environment: mnist_static/binarized_mnist_train.mat or .*amat is missing") as error:
        load("mnist-static")
    line_of(error)
    with pytest.raises(ValueError, match=r"argument: mnist_static/binarized_mnist_train.mat or .*amat is missing"):
        load("mnist-static", tmp_path / "argument")
    put(tmp_path / "argument", small_mnist_static)
    assert load("mnist-static", tmp_path / "argument").shape == (1, 28, 28)
    with pytest.raises(ValueError, match="nowhere: there is no such data folder"):
        load("mnist-static", tmp_path / "nowhere")
    monkeypatch.setenv("DOHYO_DATA", "")
    assert len(load("mnist-static").test) == 20


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_damaged_public_file_in_a_folder(damage: str, small_mnist_static: dict[str, bytes], tmp_path: Path) -> None:
    put(tmp_path, small_mnist_static)
    path = tmp_path / "mnist_static/binarized_mnist_valid.amat"
    body = path.read_bytes()
    flipped = body[:-3] + (b"0" if body[-3:-2] == b"1" else b"1") + body[-2:]
    path.write_bytes({"truncated": body[: len(body) // 2], "changed": flipped, "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"cannot be read .*Delete it and get it again") as error:
        load("mnist-static", tmp_path)
    assert line_of(error).startswith(f"{path}: ")


def test_damaged_mat_and_gz(tmp_path: Path) -> None:
    scipy.io.savemat(tmp_path / "x.mat", {"X": PIXELS}, do_compression=True)
    (tmp_path / "x.gz").write_bytes(gzip.compress(idx(PIXELS), mtime=0))
    sha256 = {"x.mat": digest(PIXELS), "x.gz": hashlib.sha256(idx(PIXELS)).hexdigest()}
    random = np.random.default_rng(2)
    for name, read in (("x.mat", read_mat), ("x.gz", read_idx)):
        whole = (tmp_path / name).read_bytes()
        reader = partial(read, sha256=sha256[name])
        expected = find({name: reader}, tmp_path)["x"]
        for cut in (0, 1, 20, 127, 140, len(whole) // 2, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:cut])
            with pytest.raises(ValueError, match="Delete it") as error:
                find({name: reader}, tmp_path)
            line_of(error)
        for _ in range(50):
            damaged = bytearray(whole)
            damaged[random.integers(len(whole))] ^= 1 << random.integers(8)
            (tmp_path / name).write_bytes(damaged)
            try:
                found = find({name: reader}, tmp_path)["x"]
            except ValueError as error:
                assert str(error).startswith(str(tmp_path / name))  # noqa: PT017
            else:  # a byte that carries no content, such as a date
                assert np.array_equal(found, expected)


def test_mnist_has_its_splits_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 70,000 pictures, each with its number in its first three pixels."""
    for name, count, key in (("train", 60_000, "mnist train"), ("t10k", 10_000, "mnist test")):
        pixels = np.zeros((count, 784), np.uint8)
        pixels[:, :3] = np.stack([np.arange(count) // 256, np.arange(count) % 256, np.full(count, 255)], 1)
        monkeypatch.setitem(SHA256, key, hashlib.sha256(idx(pixels)).hexdigest())
        put(tmp_path, {f"mnist/{name}-images-idx3-ubyte.gz": gzip.compress(idx(pixels), 1)})
    data = load("mnist", tmp_path, kind="real")
    for split, numbers in (("train", range(50_000)), ("valid", range(50_000, 60_000)), ("test", range(10_000))):
        x = (getattr(data.flat(), split)[:, :2].double() * 255).round()
        assert torch.equal(x[:, 0] * 256 + x[:, 1], torch.tensor(numbers).double())
    assert data.train.max() == 1


# --- downloads ---


class Server(http.server.ThreadingHTTPServer):
    """Serves `bodies`, a way of failing for each first folder of the address."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: dict[str, bytes] = {}
        self.asked: list[str] = []

    def addresses(self, relative: str, *ways: str) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{self.server_port}/{way}/{relative}" for way in ways)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        way, relative = self.path[1:].split("/", 1)
        body = self.server.bodies[relative]
        if way == "missing":
            self.send_error(404)
            return
        if way == "slow":
            time.sleep(0.4)
        sent = {"truncated": body[: len(body) // 2], "corrupted": body[::-1], "page": b"<html>log in</html>"}.get(way, body)
        self.send_response(200)
        if way != "unsized":
            self.send_header("Content-Length", str(len(body) if way == "truncated" else len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # who asked did not wait
            super().handle()


@pytest.fixture
def server(small_mnist_static: dict[str, bytes]) -> Iterator[Server]:
    with Server() as server:
        server.bodies = small_mnist_static
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


TRAIN = "mnist_static/binarized_mnist_train.amat"
READ = partial(read_amat, sha256=digest(PIXELS))


def test_download_fills_the_cache_once(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for relative in server.bodies:
        monkeypatch.setitem(MIRRORS, relative, server.addresses(relative, "good"))
    first = load("mnist-static")
    assert server.asked == [f"/good/{relative}" for relative in server.bodies]
    assert {relative: (cache / relative).read_bytes() for relative in files_in(cache)} == server.bodies
    again = load("mnist-static")
    assert len(server.asked) == 3
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.flat().train, torch.from_numpy(PIXELS).float())


@pytest.mark.parametrize("way", ["missing", "truncated", "corrupted", "page", "slow"])
def test_the_next_mirror_is_tried(way: str, server: Server, tmp_path: Path) -> None:
    addresses = server.addresses(TRAIN, way, "good", "never")
    x = download(tmp_path / "x.amat", addresses, READ, timeout=0.2)["x"]
    assert np.array_equal(x.reshape(-1, 784), PIXELS)
    assert server.asked == [f"/{way}/{TRAIN}", f"/good/{TRAIN}"]
    assert files_in(tmp_path) == ["x.amat"]
    assert (tmp_path / "x.amat").read_bytes() == server.bodies[TRAIN]


def test_all_mirrors_fail(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = "http://127.0.0.1:1/x"
    monkeypatch.setitem(MIRRORS, TRAIN, (*server.addresses(TRAIN, "missing", "truncated", "corrupted", "page"), closed))
    with pytest.raises(ValueError, match="--data-dir or the environment variable DOHYO_DATA") as error:
        load("mnist-static")
    message = line_of(error)
    assert message.startswith(f"{cache / TRAIN}: could not be downloaded: ")
    half, whole = len(server.bodies[TRAIN]) // 2, len(server.bodies[TRAIN])
    for part in ("HTTP Error 404", f"broke off after {half} of {whole} bytes", "sha256", "zeros and ones", "refused"):
        assert part in message
    assert files_in(cache) == []


def test_in_chunks_and_without_the_size(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dohyo.lab.data.mirrors._CHUNK", 10_000)
    for way in ("good", "unsized"):
        download(tmp_path / way, server.addresses(TRAIN, way), READ)
        assert (tmp_path / way).read_bytes() == server.bodies[TRAIN]


def test_an_interrupted_download_leaves_nothing(server: Server, tmp_path: Path) -> None:
    def interrupt(path: Path) -> dict[str, Any]:
        assert path.stat().st_size > 0  # something is there to clean up
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(tmp_path / "x.amat", server.addresses(TRAIN, "good"), interrupt)
    assert files_in(tmp_path) == []


def test_a_failed_download_keeps_the_old_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "x.amat").write_text("old")
    with pytest.raises(ValueError, match="could not be downloaded"):
        download(tmp_path / "x.amat", server.addresses(TRAIN, "corrupted"), READ)
    assert (tmp_path / "x.amat").read_text() == "old"


def test_a_full_disk_is_no_failure_of_the_mirror(server: Server, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a file of more than 1,000 bytes cannot be written
    try:
        with pytest.raises(ValueError, match=r"x.amat: cannot be written \(File too large\); make room") as error:
            download(tmp_path / "x.amat", server.addresses(TRAIN, "good", "never"), READ)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    line_of(error)
    assert len(server.asked) == 1
    assert files_in(tmp_path) == []


def test_every_public_file_has_several_mirrors() -> None:
    assert len(MIRRORS) == 6
    for relative, addresses in MIRRORS.items():
        assert len(set(addresses)) >= 2
        assert all(address.endswith(relative.split("/")[1]) for address in addresses)


# --- the real files ---


@real_files
@pytest.mark.parametrize(
    ("name", "kind", "sizes", "sha256"),
    [
        ("mnist", "grey", [50_000, 10_000, 10_000], "60130709e284feec18db9fc0a71abdd21cabc5994ded3561a706af06c90e91c9"),
        ("mnist-static", "binary", [50_000, 10_000, 10_000], "f53c8930b2d4d9d5c22e7c14483e832ccf9dd7374cd78709deb35a8060de15e0"),
        ("omniglot", "grey", [23_000, 1_345, 8_070], "aeb42e5f1b6e3d14f573a7d1fdc1b293928c61552fd40b4d82925b1ba8463d67"),
    ],
)
def test_real_sets(name: str, kind: str, sizes: list[int], sha256: str) -> None:
    data = load(name, Path(str(REAL)), seed=3)
    assert (data.kind, data.shape) == (kind, (1, 28, 28))
    assert [len(data.train), len(data.valid), len(data.test)] == sizes
    for split in ("train", "valid", "test"):
        x = getattr(data, split)
        assert (x.shape[1:].numel(), x.dtype, float(x.min()), float(x.max())) == (784, torch.float32, 0, 1)
        assert len(x.unique()) == (256 if kind == "grey" and split == "train" else 2)
    everything = torch.cat([data.train, data.valid, data.test]).mul_(255).round_()
    assert digest(everything.numpy().astype(np.uint8)) == sha256  # splits, order and binarisation, to the bit


@real_files
def test_real_mnist_and_its_fixed_binarisation() -> None:
    """The fixed binarisation is one draw from each grey picture, in another order: train and valid mixed, test apart."""
    grey, binary = load("mnist", Path(str(REAL)), kind="real").flat(), load("mnist-static", Path(str(REAL))).flat()
    ones = {split: int(getattr(binary, split).sum(dtype=torch.float64)) for split in ("train", "valid", "test")}
    assert ones == {"train": 5_118_041, "valid": 1_028_036, "test": 1_038_896}
    assert standard_errors(binary.test, grey.test) < 4.9
    drawn = binary.test[:50]
    log_p, log_q = grey.test.clamp_min(1e-9).log(), (1 - grey.test).clamp_min(1e-9).log()
    log_likelihood, origin = (drawn @ log_p.T + (1 - drawn) @ log_q.T).max(1)
    assert len(origin.unique()) == 50
    expected = (grey.test * log_p + (1 - grey.test) * log_q).sum(1)[origin]  # minus the entropy
    assert bool((log_likelihood - expected > -40).all())


@real_files
def test_real_static_files_as_text(tmp_path: Path) -> None:
    pixels = load("mnist-static", Path(str(REAL))).flat().test.numpy().astype(np.uint8)
    (tmp_path / "test.amat").write_bytes(amat(pixels))
    assert np.array_equal(read_amat(tmp_path / "test.amat", SHA256["mnist-static test"])["x"].reshape(-1, 784), pixels)


@real_files
def test_real_mnist_over_http(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for relative in (f"mnist/{stem}-images-idx3-ubyte.gz" for stem in ("train", "t10k")):
        server.bodies[relative] = (Path(str(REAL)) / relative).read_bytes()
        monkeypatch.setitem(MIRRORS, relative, server.addresses(relative, "truncated", "good"))
    downloaded, local = load("mnist"), load("mnist", Path(str(REAL)))
    assert torch.equal(downloaded.train, local.train)
    assert torch.equal(downloaded.test, local.test)
    assert files_in(cache) == ["mnist/t10k-images-idx3-ubyte.gz", "mnist/train-images-idx3-ubyte.gz"]


@real_files
def test_real_omniglot_as_chardata(tmp_path: Path) -> None:
    """The same pictures in Burda's layout give the same data set."""
    with np.load(Path(str(REAL)) / "omniglot/omniglot28.npz") as file:
        pictures = {split: file[split].reshape(-1, 28, 28) for split in ("train", "test")}
    columns = {split: x.transpose(0, 2, 1).reshape(len(x), 784).T / np.float32(255) for split, x in pictures.items()}
    (tmp_path / "omniglot").mkdir()
    scipy.io.savemat(tmp_path / "omniglot/chardata.mat", {"data": columns["train"], "testdata": columns["test"]})
    ours, burda = load("omniglot", Path(str(REAL))), load("omniglot", tmp_path)
    assert all(torch.equal(getattr(ours, split), getattr(burda, split)) for split in ("train", "valid", "test"))
