"""YAML and JSON that a stranger may have written: neither can grow while it is read, nor be nested without end."""

import json
from collections.abc import Callable
from typing import Any

import yaml

from dohyo.errors import in_one_line

_LONGEST = 100_000  # characters of YAML: configs are short, and its reader is slow
_DEEPEST = 50
_LARGEST = 1e300
_DIGITS = 300  # of a whole number in JSON; others become floats, as those with a decimal point are


def load_yaml(text: str, load: Callable[[str], Any] = yaml.safe_load) -> Any:
    """What the text holds; a YAMLError for anchors and aliases, by which a kilobyte can become gigabytes, for great depth, and
    for values that are not what they claim to be, such as the date 2001-99-99."""
    if len(text) > _LONGEST:
        raise yaml.YAMLError(f"holds {len(text)} characters, and {_LONGEST} is the most")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.YAMLError("uses anchors or aliases (& and *), which are not read here: write the values out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.YAMLError(f"is nested more than {_DEEPEST} deep")
    try:
        found = load(text)
    except yaml.YAMLError:
        raise
    except Exception as error:  # its readers of numbers and dates raise almost anything
        raise yaml.YAMLError(f"holds a value that cannot be read ({in_one_line(error)})") from error
    if _beyond(found):
        raise yaml.YAMLError(f"holds a whole number beyond {_LARGEST:g}")
    return found


def _beyond(found: Any) -> bool:
    """Whether it holds a number that no float can hold; some are too long even for an error message."""
    if isinstance(found, dict | list):
        return any(map(_beyond, found.values() if isinstance(found, dict) else found))
    return isinstance(found, int) and abs(found) > _LARGEST


def load_json(text: str | bytes) -> Any:
    """What the text holds; a ValueError if it is not JSON, or is nested too deeply."""
    deep = f"is nested more than {_DEEPEST} deep"
    try:
        found = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < _DIGITS else float(digits))
    except RecursionError:
        raise ValueError(deep) from None
    level = [found]
    for _ in range(_DEEPEST):
        holders = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [part for holder in holders for part in holder]
    if level:
        raise ValueError(deep)
    return found
