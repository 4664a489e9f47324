"""The notebook for Colab: its cells run in order, as there, but for the one that installs the package."""

from __future__ import annotations

import json

import pytest

from tests.examples.running import CACHE
from tests.running import ROOT, run_python

NOTEBOOK = ROOT / "examples" / "colab.ipynb"


def cells(kind: str) -> list[str]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def test_the_notebook_is_valid_and_has_no_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) >= (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")


@pytest.mark.slow
def test_the_cells_run_in_order():
    install, *others = cells("code")
    assert install.startswith("%pip install")
    # A process of its own: the cells choose their devices.
    changed = {"XLA_FLAGS": None, "JAX_PLATFORMS": None, "PYTHONWARNINGS": f"error,ignore:{CACHE}"}
    output = run_python("-c", "\n\n".join(others), **changed).stdout
    assert "4 stages on 4 ranks" in output
    loss = float(output.rpartition("loss ")[2].split()[0])
    assert loss < 0.05, "a constant guess has 0.17; this setting reached 0.014"
