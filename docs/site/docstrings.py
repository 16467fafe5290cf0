"""Docstrings of this repository as Markdown: what is aligned or indented keeps its columns."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe


def docstring_markdown(text: str) -> str:
    return "\n\n".join(map(paragraph, re.split(r"\n\s*\n", text.strip("\n"))))


def paragraph(text: str) -> str:
    """A table of names and meanings, a formula or code: as it stands. Anything else is prose."""
    columns = re.search(r"^ *\S.*? {2,}\S", text, re.MULTILINE)
    if columns or text.startswith("  "):
        return f"```text\n{textwrap.dedent(text)}\n```"
    # Outside of `code` nothing is meant as Markdown.
    spans = re.split(r"(`[^`]*`)", text)
    return "".join(span if span.startswith("`") else escaped(span) for span in spans)


def escaped(text: str) -> str:
    return re.sub(r"([\[\]*_<])", r"\\\1", text)


class KeepColumns(griffe.Extension):
    """The docstrings that mkdocstrings shows."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = docstring_markdown(obj.docstring.value)
