"""The process from which the tests fork others: most runs here are shorter than the start of an interpreter with torch.

All of pytest's workers share one, and so do the processes that are forked. Nothing heavier than Python is loaded here, so that
pytest's main process need not load what only its workers use.
"""

import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

ADDRESS = "DOHYO_TESTS_SERVER"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["pytest", "torch._dynamo", "torch.utils.tensorboard", "matplotlib.figure", "rich.table", "dohyo.lab.cli"]
    + [f"dohyo.lab.experiments.{name}" for name in ("density", "qpbo", "reverse_kl")]
    + [f"dohyo.lab.plots.{name}" for name in ("densities", "rewards", "runs", "tables")]
)
_own: Any = forkserver._forkserver  # type: ignore[attr-defined]


def ensure_running() -> None:
    """Use the server that the environment names; if there is none, start one."""
    if ADDRESS in os.environ:
        use(os.environ[ADDRESS])
    _own.ensure_running()
    os.environ[ADDRESS] = _own._forkserver_address


def use(address: str) -> None:
    """Fork from another process's server, which outlives this one."""
    if _own._forkserver_address != address:
        _own._forkserver_address, _own._forkserver_alive_fd = address, os.pipe()[1]
    _own.ensure_running = resource_tracker.ensure_running  # a forked process knows the address, and would start another
