"""`--help`: every option in words, every choice with a line, and nothing of Python's."""

import re
from typing import Any, get_args

import pytest

from dohyo.estimators import ESTIMATORS
from dohyo.lab.choices import CHOICES
from dohyo.lab.cli import _COMMANDS, _module, main
from dohyo.lab.data.loading import NAMES
from dohyo.lab.studies import STUDIES
from dohyo.lab.targets import TARGETS


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [*_COMMANDS, *(f"reproduce {study}" for study in STUDIES)])
def test_every_option_is_said_in_words(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(command.split(), capsys)
    for python in ("<class", "Literal", "type:", "Union", "NoneType", "usage: usage", "SUPPRESS"):
        assert python not in text
    assert text.startswith(f"usage: dohyo {command.split()[0]} [options]")
    name, *rest = command.split()
    parser = _module(name).parser(*([rest] if name == "reproduce" else []))
    for action in parser._actions:
        assert action.help, action.dest
        choices = [one for one in _literals(getattr(action, "_typehint", None)) if one != "auto" or action.dest == "device"]
        if len(choices) > 1 and action.dest in CHOICES:
            for choice in choices:
                what = re.escape(CHOICES[action.dest][choice].split()[0])
                assert re.search(rf"\n {{20,}}{choice} +{what}", text), (action.dest, choice)


def _literals(hint: Any) -> list[str]:
    return [one for part in (hint, *get_args(hint)) for one in get_args(part) if isinstance(one, str)]


def test_every_choice_is_known() -> None:
    """A new estimator, target, data set or choice needs its line."""
    assert set(CHOICES["estimator"]) == set(ESTIMATORS)
    assert set(CHOICES["target"]) == set(TARGETS)
    assert set(CHOICES["data"]) == set(NAMES)
    for command in ("train", "evaluate", "reverse-kl", "qpbo"):
        for action in _module(command).parser()._actions:
            choices = _literals(getattr(action, "_typehint", None))
            if len(choices) > 1:
                assert set(choices) <= set(CHOICES[action.dest]), action.dest


def test_options_are_named_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(["train"], capsys)
    assert "after --lr-patience epochs" in " ".join(text.split())
    assert "(default: 0)" in text
    assert "`" not in text


def test_help_without_a_study_lists_them_whatever_else_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(["reproduce", "--scale", "smoke"], capsys) == shown(["reproduce"], capsys)


@pytest.mark.parametrize("study", STUDIES)
def test_what_can_be_picked_is_what_the_cells_have(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(["reproduce", study], capsys).split())
    for key in STUDIES[study].picks:
        (known,) = re.findall(rf"do only the cells with this {key}, or with one of these \(([^)]*)\)", text)
        cells = [cell for config in STUDIES[study].SCALES.values() for cell in STUDIES[study](config).cells().values()]
        assert set(known.split(", ")) == {str(cell[key]) for cell in cells if key in cell}
    assert "multilevel-ss" not in text
