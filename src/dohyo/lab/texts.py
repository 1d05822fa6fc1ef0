"""YAML and JSON that a stranger may have written: neither can grow while it is read, nor be nested without end."""

import json
from collections.abc import Callable
from typing import Any

import yaml

_LONGEST = 100_000  # characters of YAML: configs are short, and its reader is slow
_DEEPEST = 50


def load_yaml(text: str, load: Callable[[str], Any] = yaml.safe_load) -> Any:
    """What the text holds; a YAMLError for anchors and aliases, by which a kilobyte can become gigabytes, and for great depth."""
    if len(text) > _LONGEST:
        raise yaml.YAMLError(f"holds {len(text)} characters, and {_LONGEST} is the most")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.YAMLError("uses anchors or aliases (& and *), which are not read here: write the values out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.YAMLError(f"is nested more than {_DEEPEST} deep")
    return load(text)


def load_json(text: str | bytes) -> Any:
    """What the text holds; a ValueError if it is not JSON, or is nested too deeply."""
    deep = f"is nested more than {_DEEPEST} deep"
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(deep) from None
    level = [found]
    for _ in range(_DEEPEST):
        holders = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [part for holder in holders for part in holder]
    if level:
        raise ValueError(deep)
    return found
