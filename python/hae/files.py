"""Files that are read or written whole."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from hae.cleanup import finally_do


def sha256(path: Path) -> str:
    """Of what the file holds, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Under a temporary name, then renamed: what is at `path` is whole at any time. What a link
    leads to is replaced, not the link; a device or a pipe is written to.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    partial = path.with_name(path.name + ".partial")

    def remove() -> None:
        with suppress(OSError):
            partial.unlink(missing_ok=True)

    with finally_do(remove):
        partial.write_bytes(data)
        os.replace(partial, path)
