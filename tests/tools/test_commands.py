"""tools/: the commands that are not the run page, and the names that commands had before."""

import re
import runpy

import pytest
import tyro

from tests.common import ROOT
from tools import memory

SHAPES = ROOT / "benchmarks/shapes"


def test_the_figures_of_the_document_are_those_of_the_command(capsys):
    """docs/performance.md, the rows of the smallest model, which take seconds."""
    rows = (ROOT / "docs/performance.md").read_text().split("| `qwen2.5-0.5b.json` |")[1].split("| `qwen2.5-7b")[0]
    cells = [
        [cell.strip(" `") for cell in row.split("|")] for row in f"|{rows}".replace("| | ", "|").splitlines() if row
    ]
    assert len(cells) == 4
    for _, options, worst, *_ in cells:
        words = ["--model", str(SHAPES / "qwen2.5-0.5b.json"), *(options.split() if options != "none" else [])]
        tyro.cli(memory.main, args=words)
        said = re.search(r": ([\d.]+) of \d+ GiB in stage (\w+)", capsys.readouterr().out)
        assert f"{said[1]} ({said[2]})" == worst


def test_a_model_that_is_none_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["memory.py", "--model", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(memory.__file__, run_name="__main__")
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(f"error: --model {tmp_path}: no model by its config")
