"""Fixtures of all tests."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def schema():
    """A function from a schema's name to the JSON Schema that the docs show."""

    def read(name):
        return json.loads((Path(__file__).parent.parent / "docs" / "schemas" / f"{name}.json").read_text())

    return read
