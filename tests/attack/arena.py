"""How an input is tried, and what every refused input owes its user: one line, exit status 2, nothing left, in little time and
memory."""

import contextlib
import hashlib
import io
import os
import resource
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import real
from dohyo.lab.cli import main

SECONDS, MEGABYTES = 20, 1500  # of this program's own time, so that others on the machine do not count
LONGEST = 300  # seconds by the clock, for what waits without end
SMALL = shlex.split(
    "--hidden 4 --latent 2 --valid-terms 2 --test-terms 2 --estimator iwae --cost 2 --device cpu --batch-size 400"
)
Content = bytes | str | Callable[[Path], object]


@dataclass(frozen=True)
class Input:
    """A command line that must be refused.

    Attributes:
        name: What is wrong with it.
        line: What follows `dohyo`; {run} is a trained run, of which the folder has its own copy.
        says: A part of the message.
        files: What the folder holds: bytes or text, or a function that makes the file.
    """

    name: str
    line: str
    says: str
    files: Mapping[str, Content] = field(default_factory=dict)

    def prepare(self, folder: Path, run: Path) -> list[str]:
        """Make the files, and return the arguments."""
        if "{run}" in self.line or any(name.startswith("run/") for name in self.files):
            shutil.copytree(run, folder / "run")
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return shlex.split(self.line.replace("{run}", "run"))


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    error: str
    seconds: float


def answer_here(arguments: list[str]) -> Answer:
    """The command's own function in this process, with a limit on time and on further memory."""
    out, error, begun = io.StringIO(), io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), _limited():
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    return Answer(status, out.getvalue(), error.getvalue(), time.monotonic() - begun)


def answer_of_process(arguments: list[str], folder: Path) -> Answer:
    """A process of its own."""
    begun = time.monotonic()
    done = real.finished(real.command(*arguments), folder)
    return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)


def check_refused(answer: Answer, says: str, before: dict[str, str], folder: Path) -> None:
    assert "Traceback" not in answer.error, answer.error
    assert answer.status == 2, (answer.status, answer.out[-500:], answer.error[-500:])
    assert answer.error.startswith("dohyo: error: "), answer.error
    assert answer.error.count("\n") == 1, answer.error
    assert len(answer.error) < 1000, answer.error
    assert says in answer.error, answer.error
    assert answer.out.count("\n") <= 2, answer.out  # at most what the data are, and a progress bar
    assert contents(folder) == before, "something was left, changed or lost"


def contents(folder: Path) -> dict[str, str]:
    """Every file below, with a checksum or what else it is."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            kind = f"link to {os.readlink(path)}"
        elif path.is_file():
            kind = hashlib.sha256(path.read_bytes()).hexdigest() if path.stat().st_size < 10**8 else "a large file"
        else:
            kind = "folder" if path.is_dir() else "special"
        if "__pycache__" not in path.parts:
            found[str(path.relative_to(folder))] = kind
    return found


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, _: object) -> None:
        raise AssertionError(f"no answer after {SECONDS if number == signal.SIGPROF else LONGEST} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(LONGEST)
    try:
        if pages:
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEGABYTES * 2**20, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
