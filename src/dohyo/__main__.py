"""`python -m dohyo`."""

import sys

from dohyo.cli import main

sys.exit(main())
