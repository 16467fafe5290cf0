"""Python code that stands in the documentation runs, and the program prints what stands there."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

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


def shown_sessions(page: str) -> list[tuple[str, str]]:
    """What a page shows of the program: (arguments, output)."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return re.findall(r"```\n\$ hae (.*?)\n(.*?)```", text, re.DOTALL)


PAGES = {"docs/memory.md": 3, "docs/choosing.md": 13, "docs/theory.md": 6, "docs/certify.md": 2}
SESSIONS = {page: shown_sessions(page) for page in PAGES}


@pytest.mark.parametrize(("page", "count"), PAGES.items())
def test_a_page_shows_sessions(page, count):
    assert len(SESSIONS[page]) == count


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        pytest.param(*session, id=f"{page}-{number}")
        for page, sessions in SESSIONS.items()
        for number, session in enumerate(sessions)
    ],
)
def test_the_program_prints_what_a_page_shows(arguments, shown):
    program = os.environ.get("HAE_PROGRAM", REPOSITORY / "build" / "bin" / "hae")
    done = subprocess.run(
        [str(program), *shlex.split(arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_the_page_about_choosing_quotes_the_closed_loop_word_for_word():
    page = (REPOSITORY / "docs" / "choosing.md").read_text(encoding="utf-8")
    measured = (REPOSITORY / "docs" / "closed-loop.md").read_text(encoding="utf-8").splitlines()
    quoted = re.findall(r"^\|.* ± .*\|$", page, re.MULTILINE)
    assert len(quoted) == 8
    assert set(quoted) <= set(measured)
