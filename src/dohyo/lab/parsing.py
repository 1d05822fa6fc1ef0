"""Options and config files: a parser whose errors are one line and name the nearest choice."""

import re
import textwrap
from argparse import SUPPRESS
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, get_loader, set_loader

from dohyo.errors import DohyoError
from dohyo.files import read_whole
from dohyo.lab.choices import CHOICES
from dohyo.lab.folder import load_yaml
from dohyo.names import choices, nearest

_WRONG = re.compile(r'key "(?:\w+\.)*(\w+)": .*?(?:Got|Given) value: (.*)$')
_OPTION = re.compile(r"`\w+`")
_METAVARS = {"Path": "PATH", "float": "NUMBER", "int": "N"}
_YAML = "dohyo-yaml"  # its name among jsonargparse's readers
_TYPES = {"float": "a number", "int": "a whole number", "str": "text", "NoneType": "null", "tuple": "a list, such as [5, 15]"}


class Formatter(DefaultHelpFormatter):
    """Options in words: with hyphens, without types, the choices with a line each. It keeps the examples' line breaks."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text

    def _format_action_invocation(self, action: Any) -> str:
        return super()._format_action_invocation(action).replace("_", "-")

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        """Without the options, which are listed below."""
        if prefix == "":  # it is asked for the name of the command
            return str(super()._format_usage(usage, actions, groups, prefix))
        places = [super(Formatter, self)._format_args(one, one.metavar or one.dest) for one in actions if not one.option_strings]
        return f"usage: {' '.join([self._prog.replace(' [options]', ''), '[options]', *places])}\n\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        first, *listed = text.split("\n")
        lines = textwrap.wrap(" ".join(first.split()), width, break_on_hyphens=False)
        for choice in listed:
            indent = " " * (2 + len(choice) - len(choice.partition("  ")[2].lstrip()))  # the text's own, behind the name
            lines += textwrap.wrap(choice, width, initial_indent="  ", subsequent_indent=indent, break_on_hyphens=False)
        return lines

    def _get_default_metavar_for_optional(self, action: Any) -> str:
        kind = str(getattr(action, "_typehint", None) or action.type)
        return next((word for part, word in _METAVARS.items() if part in kind), "NAME")

    def _get_help_string(self, action: Any) -> str:
        text = (action.help or "").rstrip(".")
        if action.option_strings and not any(action.default is nothing for nothing in (None, False, SUPPRESS)):
            text += f" (default: {str(action.default).lower() if action.default is True else action.default})"
        return "\n".join([text, *getattr(action, "choice_lines", ())])

    def _get_type_str(self, action: Any) -> None:
        return None


class Parser(ArgumentParser):
    """Says in one line what is wrong, without the usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        set_loader(_YAML, partial(load_yaml, load=get_loader("yaml")), exceptions=(yaml.YAMLError,))
        super().__init__(*args, parser_mode=_YAML, **kwargs)

    def parse_object(self, cfg_obj: Any, *args: Any, **kwargs: Any) -> Any:
        return self.without_nulls(super().parse_object(cfg_obj, *args, **kwargs))

    def without_nulls(self, values: Any) -> Any:
        """The same values; a DohyoError for a null in place of a value that is needed, which jsonargparse accepts from files."""
        for action in self._actions:
            if action.default not in (None, SUPPRESS) and values.get(action.dest, action) is None:
                raise DohyoError(f"{action.dest} is null; give it a value, or leave it out")
        return values

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        read_whole(Path(cfg_path))  # refuses what may never end
        return super().parse_path(cfg_path, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        text = re.sub(r"(are required:.*?)\b\w+\.", r"\1", " ".join(message.split()))  # without the command's name
        wrong = _WRONG.search(text)
        expected = re.split("Given value type|Got value", text)[0]
        types = [words for kind, words in _TYPES.items() if f"<class '{kind}'>" in expected]
        if wrong and types and "Literal[" not in text and "Path" not in expected:
            text = f"{wrong[1].replace('_', '-')} is {wrong[2]!r}; give {' or '.join(types)}"
        elif wrong and "Literal[" in text:
            names = re.findall(r"'(\w[^'\]]*)'(?=[,\]])", "".join(re.findall(r"Literal\[.*?\]", text)))
            text = f"unknown {wrong[1]} {wrong[2]!r}: {nearest(wrong[2], dict.fromkeys([*names, *types]))}"
        raise DohyoError(text)

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        action = super().add_argument(*args, **kwargs)
        _list_choices(action)
        return action

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """With the help that `dohyo.lab.training.config.option` gave to the fields of the class and its bases."""
        added = super().add_class_arguments(*args, **kwargs)
        for group in self._action_groups:
            if str(group.title).startswith("<class"):
                group.title = "settings"
        for base in filter(is_dataclass, reversed(args[0].__mro__)):
            for field in fields(base):
                if text := field.metadata.get("text"):
                    self._option_string_actions[f"--{field.name}"].help = text.replace("%", "%%")
        for action in self._actions:
            action.help = _OPTION.sub(lambda found: self._as_option(found[0]), action.help or "")
            _list_choices(action)
        return added

    def _as_option(self, quoted: str) -> str:
        """`lr_patience` -> --lr-patience, as it is written on the command line."""
        return f"--{quoted[1:-1].replace('_', '-')}" if f"--{quoted[1:-1]}" in self._option_string_actions else quoted

    def list_no_choices(self, key: str) -> None:
        self._option_string_actions[f"--{key}"].choice_lines = []  # type: ignore[attr-defined]

    def add_json(self) -> None:
        self.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def add_config(self) -> None:
        self.add_argument("--config", action="config", help="a YAML file with these options")
        if printing := self._option_string_actions.get("--print_config"):
            printing.help = "print the options as such a file, and exit"


@cache
def config_parser(config_type: type) -> Parser:
    """For files that hold the fields of a config; it takes a while to make."""
    made = Parser()
    made.add_class_arguments(config_type)
    return made


def _list_choices(action: Any) -> None:
    """The lines of the help for what this option may be; of a `Literal` only those that it has."""
    known = CHOICES.get(action.dest, {})
    allowed = choices(getattr(action, "_typehint", None)) or tuple(known)
    if len(allowed) > 1 and known:
        longest = max(map(len, allowed))
        action.choice_lines = [f"{name:<{longest}}  {known[name]}" for name in allowed if name in known]
