"""What the commands share: a parser whose errors are one line, the screen, and estimators by name."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter

import dohyo
from dohyo.errors import DohyoError

if TYPE_CHECKING:
    from rich.console import Console


class Formatter(DefaultHelpFormatter):
    """Keeps the examples' line breaks and writes options with hyphens."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text

    def _format_action_invocation(self, action: Any) -> str:
        return super()._format_action_invocation(action).replace("_", "-")


class Parser(ArgumentParser):
    """One line for an error, instead of the usage and a hint around it."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        raise DohyoError(" ".join(message.split()))

    def add_json(self) -> None:
        self.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def add_config(self) -> None:
        self.add_argument("--config", action="config", help="a YAML file with these options")


def console() -> "Console":
    """The screen; as wide as tables need where it is not a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def estimator_from(name: str, cost: float, max_terms: int | None = None) -> dohyo.Estimator:
    """An estimator from its name and a cost, or from a file that `to_dict` was written to."""
    from dohyo.estimators import ESTIMATORS
    from dohyo.names import named

    if not name.endswith((".json", ".yaml", ".yml")):
        return named(ESTIMATORS, name, "estimator").at_cost(cost, max_terms)
    import yaml

    try:
        return dohyo.from_dict(yaml.safe_load(Path(name).read_text(encoding="utf-8")))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise DohyoError(f"{name}: {error}") from error
