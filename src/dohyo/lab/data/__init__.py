"""Data to train on and to evaluate: a bundled set, public sets by name, and a user's own files.

`load("digits")` needs no network. `mnist`, `mnist-static` and `omniglot` come from a folder or from public mirrors, and are
verified by checksum. Any other name is a user's file of arrays or a table, or a folder of images.
"""

from dohyo.lab.data.dataset import AnyKind, Dataset, Kind
from dohyo.lab.data.loading import NAMES, load

__all__ = ["NAMES", "AnyKind", "Dataset", "Kind", "load"]
