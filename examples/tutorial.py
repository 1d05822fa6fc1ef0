"""From zero to a believable number: train, look, evaluate, compare, report. The text to it is docs/tutorial.md.

    python examples/tutorial.py            # about ten minutes on two cores; everything goes to tutorial/
    python examples/tutorial.py --quick    # the same in a minute, with models that are hardly trained

Each command is printed before it runs.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

OUT = Path("tutorial")
QUICK = "--quick" in sys.argv[1:]
EPOCHS, TERMS, REPLICATES = (3, 50, 2) if QUICK else (200, 1000, 10)

COMMANDS = f"""
train --data digits --estimator iwae --cost 15 --latent 8 --epochs {EPOCHS} --test-terms {TERMS} --out {OUT}/small
train --data digits --estimator iwae --cost 15 --latent 50 --epochs {EPOCHS} --test-terms {TERMS} --out {OUT}/large
sample {OUT}/large --count 64 --out {OUT}/samples.png
sample {OUT}/large --count 16 --reconstruct --out {OUT}/reconstructions.png
evaluate {OUT}/small --anneal 0 --estimator elbo --cost 1 --out {OUT}/elbo.npz
evaluate {OUT}/small --anneal 0 --estimator iwae --cost 15 --out {OUT}/iwae.npz
evaluate {OUT}/small --anneal 0 --estimator multilevel-rr --cost 50 --replicates {REPLICATES}
evaluate {OUT}/large --anneal 0 --estimator multilevel-rr --cost 50 --replicates {REPLICATES}
compare {OUT}/small {OUT}/large
report {OUT}/small {OUT}/large --out {OUT}/report.html
"""


def main() -> None:
    if OUT.exists():
        sys.exit(f"{OUT} is there already; remove it to start anew")
    started = time.monotonic()
    for line in COMMANDS.split("\n")[1:-1]:
        print(f"\n$ dohyo {line}", flush=True)
        subprocess.run([sys.executable, "-m", "dohyo", *shlex.split(line)], check=True)
    print(f"\n{time.monotonic() - started:.0f} s; open {OUT / 'report.html'} in a browser")


if __name__ == "__main__":
    main()
