"""The command `dohyo`, which is also `python -m dohyo`."""

import sys
from importlib.util import find_spec
from pathlib import Path

# What `dohyo[cli]` brings. All of it is looked for at once: commands import parts of it late, half-way through their work.
_NEEDED = ("jinja2", "jsonargparse", "lightning_fabric", "markupsafe", "matplotlib", "PIL", "rich", "yaml")


def main() -> int:
    """Run the command line; without `dohyo[cli]` say in one line what to install."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        print(f"dohyo: error: the command needs {', '.join(missing)}; install with: pip install 'dohyo[cli]'", file=sys.stderr)
        return 2
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a user's own module, and what it imports later, is found as under `python -m`
    from dohyo.lab.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
