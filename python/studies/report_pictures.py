"""The pictures of docs/report.md: parts of a page of hae-report, as a browser shows them.

script/report-pictures
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).resolve().parents[2] / "docs"
COLOURS = 255  # of a palette, which keeps a picture of text and lines small


def save(page: Page, name: str, first: str, last: str) -> None:
    """The part of the page from one element to another."""
    top = page.locator(first).bounding_box()
    bottom = page.locator(last).bounding_box()
    height = bottom["y"] + bottom["height"] - top["y"]
    clip = {"x": top["x"] - 8, "y": top["y"] - 8, "width": top["width"] + 16, "height": height + 16}
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip)))
    small = shot.convert("RGB").quantize(
        COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
    )
    small.save(DOCS / name, optimize=True)
    print(f"{DOCS / name}: {(DOCS / name).stat().st_size / 1024:.0f} KiB")


def main(report: str) -> None:
    with sync_playwright() as playwright:
        path = os.environ.get("HAE_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": 1366, "height": 900},
                color_scheme=scheme,
                reduced_motion="reduce",
            )
            page.goto(Path(report).resolve().as_uri())
            page.wait_for_selector("html[data-ready]")
            page.add_style_tag(content=".runs, .top { display: none; }")
            if scheme == "light":
                save(page, "report.png", ".cards", "#memory")
            else:
                save(page, "report-pictures.png", "#sequence", "#plot-picture")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
