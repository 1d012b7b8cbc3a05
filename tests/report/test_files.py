"""A file is whole or not there."""

import pytest

from fullbatch.report.files import json_lines, replacing, write_json


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
    path = tmp_path / "log.jsonl"
    with json_lines(path) as log:
        log.write({"a": 1})
        assert path.read_text() == '{"a": 1}\n'
