"""Every input of the table is refused as it should be: in this process, and, which takes longer, in processes of their own."""

from pathlib import Path

import pytest

from attack.arena import Answer, Input, answer_here, answer_of_process, check_refused, contents
from attack.table import INPUTS, NOISE, REAL, claims, npz


@pytest.mark.parametrize("case", INPUTS, ids=lambda case: case.name)
def test_it_is_refused(case: Input, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = case.prepare(tmp_path, run)
    before = contents(tmp_path)
    monkeypatch.chdir(tmp_path)
    check_refused(answer_here(arguments), case.says, before, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in REAL else pytest.mark.slow)
        for case in INPUTS
        if not case.name.startswith("memory that ends")  # which the limit in this process makes it do
    ],
)
def test_it_is_refused_by_a_process(case: Input, run: Path, tmp_path: Path) -> None:
    arguments = case.prepare(tmp_path, run)
    before = contents(tmp_path)
    check_refused(answer_of_process(arguments, tmp_path), case.says, before, tmp_path)


def test_an_array_that_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    """However large it claims to be."""
    (tmp_path / "x.npz").write_bytes(npz({"a": NOISE, "b": claims("(9200000000000,)")}))
    answer = answer_here(["estimate", str(tmp_path / "x.npz"), "--key", "a", "--estimator", "iwae", "--cost", "3", "--json"])
    assert (answer.status, answer.error) == (0, "")


def test_the_check_itself(tmp_path: Path) -> None:
    """A traceback, a second line, another status, or something left behind does not pass."""
    good = Answer(2, "", "dohyo: error: because\n", 0.0)
    check_refused(good, "because", {}, tmp_path)
    bad = [Answer(1, "", good.error, 0.0), Answer(2, "x\ny\nz\n", good.error, 0.0), Answer(2, "", "Traceback\n", 0.0),
           Answer(2, "", good.error + "more\n", 0.0)]  # fmt: skip
    for answer in bad:
        with pytest.raises(AssertionError):
            check_refused(answer, "because", {}, tmp_path)
    (tmp_path / "left").touch()
    with pytest.raises(AssertionError, match="left"):
        check_refused(good, "because", {}, tmp_path)
