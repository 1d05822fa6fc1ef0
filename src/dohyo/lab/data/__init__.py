"""Data to train on and to evaluate: a bundled set, public sets by name, and a user's own arrays.

`load("digits")` needs no network. `mnist`, `mnist-static` and `omniglot` come from a folder or from public mirrors, and are
verified by checksum. A name that ends in .npy or .npz is a user's file.
"""

from dohyo.lab.data.dataset import Dataset, Kind
from dohyo.lab.data.loading import NAMES, load

__all__ = ["NAMES", "Dataset", "Kind", "load"]
