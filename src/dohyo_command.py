"""What the script `dohyo` calls: it is outside of the package, because importing that loads torch."""

import os


def main() -> int:
    """Let torch's idle threads sleep, not spin: where other programs use the cores, each of a step's hundreds of operations would
    wait for the scheduler. OpenMP reads this as it is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from dohyo.__main__ import main

    return main()
