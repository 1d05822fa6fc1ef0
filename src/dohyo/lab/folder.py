"""A run's folder and a study's: the names of what is in them, the schema, and how they are read and written.

Training, experiments, studies and the report all use this module, and it imports none of them. A stranger may have written the
YAML and JSON that is read: neither can grow while it is read, nor be nested without end.
"""

import dataclasses
import json
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from dohyo.errors import DohyoError, in_one_line
from dohyo.files import plain, read_whole, remove_leftovers, replacing, resolved

SCHEMA_VERSION = 1

# A run's folder. The pictures are .png files, each with its numbers as .json of the same name.
CONFIG = "config.yaml"
CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"  # one record for each epoch
TENSORBOARD = "tensorboard"
RESULT = "result.json"  # written last: it says that the run is finished
TEST_VALUES, VALUES = "test.npz", "evaluation.npz"  # each datum's log p(x), by `dohyo train` and by `dohyo evaluate`
TEST_AVERAGE = "test_average.npz"  # the same as the first, of averaged parameters
DRAWS = "draws.npz"  # of reverse KL
EVALUATION, SANDWICH = "evaluation.json", "sandwich.json"  # what the commands of these names found last
ANNEALING = "annealing.json"  # constants of chains, with what they were tuned for
LOG_LIKELIHOOD = "log_likelihood.png"
LEARNING_CURVES, SAMPLES, RECONSTRUCTIONS = "learning_curves.png", "samples.png", "reconstructions.png"
DENSITY, MARGINALS, PAIRS = "density.png", "marginals.png", "pairs.png"
LOCK = ".dohyo.lock"  # held by the process that writes here, and names it; empty at other times

# A study's folder: cells/NAME.json for each finished cell, work/NAME for the run of a cell, and the pictures. The lock of a cell
# is cells/.NAME.lock; that of the study itself is held only while study.json and the pictures are written.
STUDY = "study.json"  # everything but the pictures
CELLS, WORK = "cells", "work"

Values = dict[str, Any]
_WRITTEN = (".yaml", ".pt", ".jsonl", ".json", ".npz", ".png", ".svg", ".lock")
_PICTURES = (LOG_LIKELIHOOD, LEARNING_CURVES, SAMPLES, RECONSTRUCTIONS, DENSITY, MARGINALS, PAIRS)
_FILES = {CONFIG, CHECKPOINT, METRICS, RESULT, TEST_VALUES, VALUES, TEST_AVERAGE, DRAWS, EVALUATION, SANDWICH, ANNEALING, STUDY,
          *_PICTURES, *(str(Path(name).with_suffix(".json")) for name in _PICTURES)}  # fmt: skip
_FOLDERS = re.compile(rf"{TENSORBOARD}|{CELLS}|{WORK}|replica_\d+")
_LONGEST = 2**28  # bytes of records, which is about a million of them
_LONGEST_YAML = 100_000  # characters of YAML: configs are short, and its reader is slow
_DEEPEST = 50
_LARGEST = 1e300
_DIGITS = 300  # of a whole number in JSON; others become floats, as those with a decimal point are
VERDICTS = {True: "holds", False: "does not hold", None: "cannot tell"}
_WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Conclusion:
    """One claim of a study, and what was found."""

    claim: str  # in one sentence
    paper: str  # what the paper says about it, in a few words; "" where the claim is ours
    found: str  # the numbers with their error bars, made from the cells
    holds: bool | None  # None where these runs cannot tell

    @property
    def verdict(self) -> str:
        return VERDICTS[self.holds]


@dataclass(frozen=True)
class Table:
    """Numbers for a reader; rows are as long as `columns`."""

    title: str
    columns: list[str]
    rows: list[list[str | float | None]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A .png in the study's folder, with an .svg and its numbers as .json of the same stem beside it."""

    file: str
    title: str
    alt: str


def replica_folder(folder: Path, number: int) -> Path:
    """Where a replicated run keeps one of its replicas, counted from 0."""
    return folder / f"replica_{number}"


def check_places(folder: Path, of_folders: bool = False) -> None:
    """A DohyoError if what dohyo writes here would go to another place by a link, or cannot be written because something else
    has its name: a folder may come from a stranger. `of_folders`: it writes only folders here, of any name."""
    home = resolved(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        lock, inner = path.suffix == ".lock", of_folders or _FOLDERS.fullmatch(path.name) is not None
        ours = path.is_symlink() and (path.suffix in _WRITTEN or inner)
        if ours and (lock or not resolved(path).is_relative_to(home)):
            raise DohyoError(f"{path}: leads out of the folder by a symbolic link; put the file itself there, or remove it")
        if path.exists() and not (path.is_dir() if inner else path.is_file() or not (lock or path.name in _FILES)):
            kind = "folder" if inner else "regular file"
            raise DohyoError(f"{path}: is no {kind}, as dohyo needs it there; remove it, or choose another folder")


def check_values(values: Values, kinds: Mapping[str, Any], place: Path, remedy: str) -> Values:
    """The values of a file that a stranger may have written; a DohyoError unless they have the type, or one of the union, that
    `kinds` has for each key. A key that may be null may also be missing."""
    for key, kind in kinds.items():
        value, allowed = values.get(key), get_args(kind) or (kind,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            words = " or ".join(_WORDS.get(each, "null") for each in allowed if each is not int or float not in allowed)
            wrong = f"{key} is {value!r:.40}; it must be {words}" if key in values else f"{key} is missing"
            raise DohyoError(f"{place}: {wrong}; {remedy}")
    return values


def read_config(folder: Path) -> Values:
    """What config.yaml holds, as plain data."""
    path = folder / CONFIG
    if not path.is_file():
        raise DohyoError(f"{folder}: holds no run (there is no {CONFIG} in it)")
    try:
        values = load_yaml(read_whole(path).decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DohyoError(f"{path}: is damaged ({error}); restore it, or leave this folder out") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise DohyoError(f"{path}: is not the config of a run; restore it, or leave this folder out")
    return values


def write_config(folder: Path, config: Any) -> None:
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(yaml.safe_dump(as_values(config), sort_keys=False), encoding="utf-8")


def as_values(config: Any) -> Values:
    """A config's fields as plain data."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(config).items()}


def read_json(path: Path, remedy: str) -> Values:
    """The object in a JSON file; `remedy` is what the user can do about a damaged one."""
    try:
        found = load_json(read_whole(path).decode())
    except ValueError as error:  # of JSON, or of UTF-8
        raise DohyoError(f"{path}: is damaged ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise DohyoError(f"{path}: holds a {type(found).__name__} where an object should be; {remedy}")
    return found


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(plain(value), indent=1) + "\n", encoding="utf-8")


def read_result(folder: Path) -> Values | None:
    """The result of a run, if it has one."""
    path = folder / RESULT
    return read_json(path, "remove it, and --resume writes it again") if path.exists() else None


def write_result(folder: Path, result: Values) -> None:
    """Also deletes the temporary files of processes that were killed while writing."""
    remove_leftovers(folder)
    write_json(folder / RESULT, result)


def beyond_verdict(result: Values) -> list[str]:
    """The warnings of a result or an evaluation that its verdict's sentence does not hold."""
    reason = str((result.get("verdict") or {}).get("reason") or "")
    return [line for line in map(str, result.get("warnings") or ()) if line not in reason]


def read_records(folder: Path) -> list[Values]:
    """The records of a run so far; a last line that a kill cut short is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(read_whole(path, _LONGEST).split(b"\n")[:-1], start=1):
        try:
            record = load_json(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("epoch"), int):
            raise DohyoError(f"{path}: line {number} is not a record of an epoch; remove it")
        records.append(record)
    return records


def versions() -> dict[str, str]:
    import torch

    import dohyo

    return {"dohyo": dohyo.__version__, "torch": torch.__version__, "python": platform.python_version()}


def load_yaml(text: str, load: Callable[[str], Any] = yaml.safe_load) -> Any:
    """What the text holds; a YAMLError for anchors and aliases, by which a kilobyte can become gigabytes, for great depth, and
    for values that are not what they claim to be, such as the date 2001-99-99."""
    if len(text) > _LONGEST_YAML:
        raise yaml.YAMLError(f"holds {len(text)} characters, and {_LONGEST_YAML} is the most")
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
