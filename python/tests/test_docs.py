"""Python code that stands in the documentation runs."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def blocks(page: str, heading: str) -> list[str]:
    """The Python blocks of a section, up to the next heading."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    section = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE).group(1)
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_the_example_of_the_engine_runs(monkeypatch, tmp_path):
    (code,) = blocks("python/README.md", "The engine")
    (tmp_path / "build").mkdir()
    (tmp_path / "traces").symlink_to(REPOSITORY / "traces")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(code, "python/README.md", "exec"), names)
    assert len(names["comparison"].raw) == 32
    assert names["hae"].check("build/mine.h5") == []
    assert len(names["run"].log) > 0
