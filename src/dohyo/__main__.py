"""The command `dohyo`, which is also `python -m dohyo`."""

import sys
from pathlib import Path


def main() -> int:
    """Run the command line; without `dohyo[cli]` say in one line what to install."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a user's own module, and what it imports later, is found as under `python -m`
    try:
        from dohyo.lab.cli import main as command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("dohyo"):
            raise
        print(f"dohyo: error: the command needs {error.name}; install it with: pip install 'dohyo[cli]'", file=sys.stderr)
        return 2
    return command()


if __name__ == "__main__":
    sys.exit(main())
