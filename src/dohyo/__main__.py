"""The command `dohyo`, which is also `python -m dohyo`."""

import io
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

# What `dohyo[cli]` brings. All of it is looked for at once: commands import parts of it late, half-way through their work.
_NEEDED = ("jinja2", "jsonargparse", "lightning_fabric", "markupsafe", "matplotlib", "PIL", "filelock", "rich", "yaml")


def main() -> int:
    """Run the command line; without `dohyo[cli]` say in one line what to install."""
    _open_streams()
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        print(f"dohyo: error: the command needs {', '.join(missing)}; install with: pip install 'dohyo[cli]'", file=sys.stderr)
        return 2
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a user's own module, and what it imports later, is found as under `python -m`
    try:
        from dohyo.lab.cli import main as command
    except KeyboardInterrupt:  # while the laboratory is imported; before that, while torch is, Python answers for itself
        print("dohyo: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return command()


def _open_streams() -> None:
    """Standard streams that were closed lead nowhere: else the next file that is opened would take the place of one. What a
    terminal cannot show becomes a question mark."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        if getattr(sys, name) is None:
            # Not the descriptor: since Python began without it, something else may have taken it for a while.
            setattr(sys, name, open(os.devnull, "r" if descriptor == 0 else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
