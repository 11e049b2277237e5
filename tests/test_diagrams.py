"""The diagrams of docs/dev/diagrams.py: the files are those that it draws, and what they name exists."""

import re

import pytest

from docs.dev import diagrams
from lib.columns import TABLE
from tests.common import ROOT
from tests.test_layout import ORDER, WINGS


@pytest.mark.parametrize("name", diagrams.DRAWINGS)
def test_files_are_those_of_the_program(name):
    file = ROOT / f"docs/{name}.svg"
    assert file.read_text() == diagrams.drawn(name), "run python -m docs.dev.diagrams"
    assert file.stat().st_size < 20_000


def test_columns_and_packages_exist():
    known = {column.name for columns in TABLE.values() for column in columns}
    named = re.findall(r'class="code column"[^>]*>(\w+)<', diagrams.drawn("step"))
    assert len(named) > 10 and set(named) <= known
    packages = [*diagrams.PACKAGES.split(), *diagrams.BASE.split()]
    assert ["setup", *packages] == [room for room in ORDER if room in ("setup", *packages)]  # downwards, left to right
    assert {*diagrams.WINGS} == {*WINGS}
