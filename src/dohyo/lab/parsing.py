"""Options and config files: a parser whose errors are one line and name the nearest choice."""

import inspect
import re
from functools import partial
from typing import Any

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, get_loader, set_loader

from dohyo.errors import DohyoError
from dohyo.lab.texts import load_yaml
from dohyo.names import nearest

_WRONG = re.compile(r'key "(?:\w+\.)*(\w+)": .*?(?:Got|Given) value: (.*)$')
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
_YAML = "dohyo-yaml"  # its name among jsonargparse's readers
_TYPES = {"float": "a number", "int": "a whole number", "NoneType": "null"}


class Formatter(DefaultHelpFormatter):
    """Keeps the examples' line breaks and writes options with hyphens."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text

    def _format_action_invocation(self, action: Any) -> str:
        return super()._format_action_invocation(action).replace("_", "-")


class Parser(ArgumentParser):
    """Says in one line what is wrong, without the usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        set_loader(_YAML, partial(load_yaml, load=get_loader("yaml")), exceptions=(yaml.YAMLError,))
        super().__init__(*args, parser_mode=_YAML, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        text = " ".join(message.split())
        wrong = _WRONG.search(text)
        if wrong and "Literal[" in text:
            choices = re.findall(r"'(\w[^'\]]*)'(?=[,\]])", "".join(re.findall(r"Literal\[.*?\]", text)))
            types = [words for kind, words in _TYPES.items() if f"<class '{kind}'>" in text]
            text = f"unknown {wrong[1]} {wrong[2]!r}: {nearest(wrong[2], dict.fromkeys([*choices, *types]))}"
        raise DohyoError(text)

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """With the help that the docstrings of the class and its bases give under "Attributes:"."""
        added = super().add_class_arguments(*args, **kwargs)
        for base in reversed(args[0].__mro__):
            _, _, listed = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
            for name, text in _ATTRIBUTE.findall(listed):
                if action := self._option_string_actions.get(f"--{name}"):
                    action.help = " ".join(text.split()).replace("%", "%%")
        return added

    def add_json(self) -> None:
        self.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def add_config(self) -> None:
        self.add_argument("--config", action="config", help="a YAML file with these options")
