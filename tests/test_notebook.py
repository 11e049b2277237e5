"""docs/first_run.ipynb: every cell runs, in order, in a kernel of its own; what is committed has no outputs."""

import re
import tempfile

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

from tests.common import ROOT
from tests.test_docs import anchors

FILE = ROOT / "docs/first_run.ipynb"


def test_the_first_run_runs_from_top_to_bottom(tmp_path, monkeypatch):
    """A cell that raises ends it. `!commands` do not, but the cells after them read what they have written."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(FILE, as_version=4)
    here = {"metadata": {"path": str(FILE.parent)}}
    with tempfile.TemporaryDirectory() as sockets:  # pytest's own folder is too long for them
        no_port = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        NotebookClient(notebook, timeout=300, config=no_port, resources=here).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    right = int(re.search(r"^(\d+) of 256 answers became right$", text, flags=re.M)[1])
    assert right > 100  # 171; from 31 % to 98 % right
    [table] = [output["data"]["text/plain"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(table.splitlines()) == 1 + 8 and "advantage" in table  # a group
    assert re.search(r"grpo/page\.html: \d", text)
    assert re.search(r"^mine \{'val/toy/arithmetic/mean@1': 0\.\d+\}$", text, flags=re.M)


def test_it_is_kept_without_outputs_and_its_links_lead_somewhere():
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None, "clear all outputs, then save"
        for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]+)(#([^)]+))?\)", cell.source):
            assert (FILE.parent / target).exists(), target
            assert not anchor or anchor in anchors(FILE.parent / target), (target, anchor)
