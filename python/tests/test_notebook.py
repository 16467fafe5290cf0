"""docs/notebook.ipynb shows what its cells do now."""

import sys

import nbformat
import small_comparison as small

sys.path.insert(0, str(small.REPOSITORY / "python" / "studies"))

import notebook  # noqa: E402


def outputs(of):
    return [output for cell in of.cells for output in cell.get("outputs", [])]


def test_the_notebook_prints_what_stands_in_it():
    stored = nbformat.read(notebook.NOTEBOOK, as_version=4)
    fresh = notebook.executed()
    assert notebook.texts(fresh) == notebook.texts(stored), "run script/notebook"
    assert sum("0.3687" in text for text in notebook.texts(stored)) == 1
    figures = [output for output in outputs(fresh) if notebook.FIGURE in output.get("data", {})]
    pictures = [output for output in outputs(stored) if "image/png" in output.get("data", {})]
    assert len(figures) == len(pictures) == 5
    assert notebook.NOTEBOOK.stat().st_size < 400_000
