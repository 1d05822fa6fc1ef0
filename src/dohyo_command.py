"""What the script `dohyo` calls: it is outside of the package, because importing that loads torch."""

import os


def main() -> int:
    """Let torch's threads spin for a short time only, and then sleep, while they wait for each other: where other programs use
    the cores, each of a step's hundreds of operations would else wait for the scheduler. OpenMP reads this as it is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from dohyo.__main__ import main

    return main()
