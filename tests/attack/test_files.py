"""What is written, and what is removed: whole files, behind links, and nothing of the user's."""

import os
from pathlib import Path

import pytest

from dohyo import DohyoError
from dohyo.files import output_file, remove_leftovers, replacing, replacing_folder
from dohyo.lab.folder import write_result


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.txt").symlink_to("there/file.txt")
    for text in ("new", "again"):
        with replacing(tmp_path / "link.txt") as temporary:
            temporary.write_text(text)
        assert (tmp_path / "link.txt").is_symlink()
        assert (tmp_path / "there/file.txt").read_text() == text
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file.txt"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path) as temporary:
        temporary.rename(tmp_path / "missing/x")
    with pytest.raises(FileNotFoundError), replacing_folder(tmp_path / "folder") as temporary:
        temporary.rename(tmp_path / "missing/x")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for name, says in (("pipe", "is no regular file"), ("circle", "leads to itself"), (".", "is a folder")):
        with pytest.raises(DohyoError, match=says), replacing(tmp_path / name):
            pass
    with pytest.raises(DohyoError, match="is no regular file"):
        output_file(Path("/dev/null"))
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "circle").is_symlink()


def test_the_users_umask_holds(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "file"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_file_that_is_being_written_is_no_leftover(tmp_path: Path) -> None:
    with replacing(tmp_path / "file") as temporary:
        temporary.write_text("whole")
        remove_leftovers(tmp_path)
    assert (tmp_path / "file").read_text() == "whole"


def test_only_leftovers_of_ours_are_removed(tmp_path: Path) -> None:
    mine = [
        ".my-notes123.txt",
        ".checkpoint-abcdefgh.pt",
        ".dohyo-notes",
        ".dohyo-0123456789abcdeg-x",
        "dohyo-0123456789abcdef-x",
    ]
    for name in mine:
        (tmp_path / name).touch()
    (tmp_path / ".dohyo-0123456789abcdef-result.json").touch()
    (tmp_path / ".dohyo-0123456789abcdef-cells").mkdir()
    (tmp_path / ".dohyo-0123456789abcdef-cells/x").touch()
    (tmp_path / ".dohyo-0123456789abcdef-link").symlink_to(tmp_path / mine[0])
    remove_leftovers(tmp_path, "other")
    write_result(tmp_path, {})
    assert {path.name for path in tmp_path.iterdir()} == {*mine, "result.json", ".dohyo-0123456789abcdef-link"}
