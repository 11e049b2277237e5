"""The notebooks of docs/: every cell runs, in order, in a kernel of its own; the outputs are committed.

`jupyter execute --inplace docs/NAME.ipynb` makes them again."""

import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from tests.common import ROOT, SMALL, fork, ran

FIRST, READING = ROOT / "docs/first_run.ipynb", ROOT / "docs/reading_a_run.ipynb"


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs a notebook; its outputs. A cell that raises ends it. `!commands` do not, but the cells after them read what
    they have written."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")

    def run(notebook) -> list:
        here = {"metadata": {"path": str(ROOT / "docs")}}
        with tempfile.TemporaryDirectory() as sockets:  # pytest's own folder is too long for them
            no_port = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
            NotebookClient(notebook, timeout=300, config=no_port, resources=here).execute()
        return [output for cell in notebook.cells for output in cell.get("outputs", ())]

    return run


def text_of(outputs: list) -> str:
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
def test_the_first_run_runs_from_top_to_bottom(execute):
    outputs = execute(nbformat.read(FIRST, as_version=4))
    text = text_of(outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    right = int(re.search(r"^(\d+) of 256 answers became right$", text, flags=re.M)[1])
    assert right > 100  # 171; from 31 % to 98 % right
    [table] = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert table.count("<tr") == 1 + 8 and "advantage" in table  # a group
    assert re.search(r"grpo/page\.html: \d", text)
    assert re.search(r"^mine \{'val/toy/arithmetic/mean@1': 0\.\d+\}$", text, flags=re.M)


def test_a_run_is_read_from_top_to_bottom(execute, tmp_path):
    flags = [*SMALL, "--val-every", "2", "--val-before-train", "--num-mini-batches", "2", "--total-steps", "2"]
    ran(fork("grpo", tmp_path, *flags, "--run-name", "mine"))
    notebook = nbformat.read(READING, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.source.count("run = None  #") == 1
    first.source = first.source.replace("run = None  #", f"run = {str(tmp_path / 'mine')!r}  #")
    outputs = execute(notebook)
    text = text_of(outputs)
    tables = [output["data"]["text/plain"] for output in outputs if "text/html" in output.get("data", {})]
    assert "grpo.py at commit " in text and "group_size = 4, default 8" in text
    assert re.search(r"^\d+ alerts$", text, flags=re.M)
    validation, rows, agreement, times, samples, numbers = tables
    assert "val/toy/arithmetic/mean@1/ci_low" in validation and len(validation.splitlines()) >= 4
    assert "reward/zero_variance" in rows and "rollout/logp_diff_mean" in agreement
    assert "timing_s/update" in times and "ground_truth" in samples and "ratio" in numbers
    kept, probability = re.search(r"(\d+) tokens, sampled with a mean probability of ([\d.]+)", text).groups()
    assert int(kept) > 0 and 0.2 < float(probability) <= 1  # of a model that is right at 31 %


@pytest.mark.parametrize("file", [FIRST, READING], ids=lambda file: file.stem)
def test_its_outputs_are_committed(file: Path):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert {output.output_type for output in outputs} == {"stream", "display_data", "execute_result"}  # no error
    assert file.stat().st_size < 120_000 and str(Path.home()) not in text_of(outputs)
