"""A file is whole or not there."""

import os

import pytest

from fullbatch import OutputError
from fullbatch.files import JsonLines, replacing, write_json


def test_an_error_while_writing_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "figures.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(TypeError), replacing(path) as beside:
        beside.write_text(3)
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]


def test_folders_are_made(tmp_path):
    write_json(tmp_path / "a" / "b" / "c.json", {})
    assert (tmp_path / "a" / "b" / "c.json").exists()


def test_every_line_of_a_log_is_on_disk_before_the_next(tmp_path):
    path, old = tmp_path / "log.jsonl", tmp_path / "summary.json"
    path.write_text("the last run's\n")
    old.write_text("{}")
    with JsonLines(path, replaces=[old]) as log:
        assert path.read_text() == "the last run's\n"  # nothing is lost before there is something new
        log.write({"a": 1})
        assert path.read_text() == '{"a": 1}\n'
        assert not old.exists()


def test_a_link_is_followed_and_a_pipe_is_written_itself(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_json(tmp_path / "link.json", {})
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "{}\n"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_json(tmp_path / "pipe", {})
    assert os.read(reader, 100) == b"{}\n"
    os.close(reader)


def test_what_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_json(tmp_path / "file" / "x.json", {})
    with pytest.raises(OutputError, match="cannot be written"):
        write_json(tmp_path, {})
