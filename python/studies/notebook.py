"""Executes docs/notebook.ipynb and keeps what it shows: text as it is, figures as small pictures.

script/notebook
"""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"
FIGURE = "application/vnd.plotly.v1+json"
WIDTH, COLOURS = 820, 64


def executed() -> nbformat.NotebookNode:
    """The notebook with the outputs of now; figures as plotly's JSON."""
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=300, resources=resources, record_timing=False).execute()
    return notebook


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell prints, figures left out."""
    return [
        "".join(map(_text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"
    ]


def _text(output: Any) -> str:
    data = output.get("data", {})
    is_figure = FIGURE in data or "image/png" in data
    return "" if is_figure else output.get("text", "") + data.get("text/plain", "")


def with_pictures(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Figures as PNG, which every viewer of notebooks shows."""
    with sync_playwright() as playwright:
        path = os.environ.get("HAE_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.set_content("<div id='figure'></div>")
        page.add_script_tag(content=get_plotlyjs())
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                if FIGURE in output.get("data", {}):
                    output["data"] = {"image/png": _png(page, output["data"][FIGURE])}
                    output["metadata"] = {}
        browser.close()
    return notebook


def _png(page: Any, figure: dict[str, Any]) -> str:
    layout = figure["layout"] | {"width": WIDTH, "paper_bgcolor": "#FFFFFF"}
    layout["height"] = min(layout.get("height", 450), 560)
    if layout.pop("sliders", None):  # a picture: as wide as it is high
        layout["width"] = layout["height"]
    page.evaluate(
        "([data, layout]) => Plotly.newPlot('figure', data, layout, {staticPlot: true})",
        [figure["data"], layout],
    )
    drawn = page.locator("#figure .svg-container").screenshot()
    shot = Image.open(io.BytesIO(drawn)).convert("RGB")
    file = io.BytesIO()
    small = shot.quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    notebook = with_pictures(executed())
    notebook.metadata.pop("language_info", None)
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")
    print(f"{NOTEBOOK}: {NOTEBOOK.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
