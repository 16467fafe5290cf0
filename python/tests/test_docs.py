"""What stands in the documentation runs, and the program prints what stands there.

Every ```sh and ```python block of every page of the site is run, unless the line above it says
`<!-- not run: REASON -->`. Blocks of a page run in order, in a folder with the repository's own
folders, a trace `mine.h5`, a `prompts.jsonl` and a `MODEL`; Python blocks share their names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "docs" / "site"), str(Path(__file__).parent)]

import pages as site  # noqa: E402
import test_validate  # noqa: E402

import hae  # noqa: E402

PROGRAM = Path(os.environ.get("HAE_PROGRAM", REPOSITORY / "build" / "bin" / "hae"))
PAGES = {path: (REPOSITORY / path).read_text(encoding="utf-8") for path in site.pages()}
BLOCK = re.compile(r"(?:<!-- not run: (.*) -->\n)?^```(\S*)(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
NOT_RUN = "<!-- not run"


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, code) of what is to be run."""
    found = [(language, code) for why, language, _, code in BLOCK.findall(PAGES[page]) if not why]
    return [(language, code) for language, code in found if language in ("sh", "python")]


def test_a_page_that_does_not_run_something_says_why_above_the_block():
    marks = {page: text.count(NOT_RUN) for page, text in PAGES.items()}
    said = {page: sum(bool(why) for why, *_ in BLOCK.findall(text)) for page, text in PAGES.items()}
    assert marks == said


def test_blocks_are_named_by_a_language_that_is_known():
    """```bash or ```py would be neither run nor marked."""
    known = {"", "sh", "python", "text", "cpp", "c", "cmake", "yaml", "json", "math", "coq"}
    for page, text in PAGES.items():
        assert {language for _, language, _, _ in BLOCK.findall(text)} <= known, page
        assert not any(rest for _, _, rest, _ in BLOCK.findall(text)), page
        assert len(BLOCK.findall(text)) * 2 == len(
            re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)
        )


# ----------------------------------------------------------------------------- a reader's folder


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """What the pages take for granted: the repository, the programs, a model, prompts, a trace."""
    folder = tmp_path_factory.mktemp("desk")
    for entry in REPOSITORY.iterdir():
        if entry.name not in ("build", "README.md") and not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    (folder / "build" / "bin").mkdir(parents=True)
    (folder / "build" / "bin" / "hae").symlink_to(PROGRAM)
    (folder / "MODEL").symlink_to(REPOSITORY / "python" / "models" / "board-reader")
    shell(
        folder,
        "python python/models/make_prompts.py --split test --boards 1 --out . >/dev/null\n"
        "hae synth --kind image-sparse --prompt 120 --tokens 150 --sequences 2 --out mine.h5\n"
        "hae compare traces/data/boards-test.h5 --policy hae:r=0.007,alpha=0.008 --policy greedy"
        " --match mean --json released.json",
    )
    return folder


@pytest.fixture
def folder(desk, tmp_path) -> Path:
    """A page's own copy: what one page writes is not there for another."""
    for entry in desk.iterdir():
        if entry.name != "build":
            (tmp_path / entry.name).symlink_to(entry.resolve())
    (tmp_path / "mine.h5").unlink()
    (tmp_path / "mine.h5").write_bytes((desk / "mine.h5").read_bytes())
    (tmp_path / "build" / "bin").mkdir(parents=True)
    (tmp_path / "build" / "bin" / "hae").symlink_to(PROGRAM)
    return tmp_path


def shell(folder: Path, code: str) -> None:
    programs = [str(folder / "build" / "bin"), str(Path(sys.executable).parent)]
    environment = os.environ | {
        "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
        "PYTHONPATH": f"{REPOSITORY / 'python'}{os.pathsep}{REPOSITORY / 'python' / 'tests'}",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


class MyPolicy(hae.Policy):
    """A policy of the reader's: it evicts nothing."""

    options = {"budget": 1}

    def begin(self, info):
        return MyPolicyRun()


class MyPolicyRun(hae.PolicyRun):
    def fit(self, layer, cache):
        return hae.Decision()

    def step(self, rows, cache):
        return hae.Decision()


def running_model(folder: Path) -> dict:
    """What a page calls model, inputs, P and image: the small model, about to read a board."""
    from hae.prompts import load_prompts, prepare
    from hae.session import load_model

    model, processor = load_model(folder / "MODEL", "float32", "cpu", "eager")
    prompt = load_prompts(folder / "prompts.jsonl")[0]
    inputs = prepare(model, processor, prompt)
    fed = {"input_ids": inputs.input_ids, "pixel_values": inputs.pixel_values}
    return {"model": model, "inputs": fed, "P": inputs.input_ids.shape[1], "image": inputs.image}


def full_cache(sequence: hae.Sequence) -> DynamicCache:
    """A transformers cache of a sequence's prompt."""
    cache = DynamicCache()
    for layer in range(sequence.info.layers):
        keys = torch.tensor(np.array(sequence.keys(layer)))[None, :, : sequence.info.prompt]
        cache.update(keys, keys, layer)
    return cache


def given(page: str, folder: Path) -> dict:
    """Names that a page's Python takes for granted."""
    names: dict = {"__name__": "mine", "hae": hae}
    if page in ("README.md", "python/README.md"):
        names |= {"MyPolicy": MyPolicy, "my_attention": test_validate.attend}
        names |= running_model(folder)
    if page == "docs/export.md":
        names["cache"] = full_cache(hae.open(folder / "traces" / "data" / "boards-test.h5")[0])
    return names


def run_page(page: str, folder: Path) -> dict:
    """Runs the blocks of a page; returns the names that its Python left."""
    names, tests = given(page, folder), []
    if page == "docs/validate.md":
        (folder / "mine.py").write_text("from test_validate import attend as my_attention\n")
    with contextlib.chdir(folder):
        for language, code in blocks(page):
            if language == "sh":
                shell(folder, code)
            elif "\ndef test_" in f"\n{code}":
                tests.append(code)
            else:
                exec(compile(code, page, "exec"), names)
                with Path("mine.py").open("a") as file:
                    file.write(code)
    if tests:
        (folder / "test_mine.py").write_text("\n".join(tests))
        shell(
            folder, f"{shlex.quote(sys.executable)} -m pytest -q -p no:cacheprovider test_mine.py"
        )
    return names


LOOKED_AT_CLOSELY = ("python/README.md", "docs/python-policies.md")
PAGES_THAT_RUN = [page for page in PAGES if blocks(page) and page not in LOOKED_AT_CLOSELY]


@pytest.mark.parametrize("page", PAGES_THAT_RUN)
def test_the_blocks_of_a_page_run(page, folder):
    run_page(page, folder)


def test_the_page_about_the_package_runs_and_does_what_it_says(folder):
    names = run_page("python/README.md", folder)
    assert len(names["comparison"].raw) == 32
    assert hae.check(folder / "build" / "mine.h5") == []
    assert len(names["run"].log) > 0
    assert len(hae.open(folder / "build" / "boards.h5")) == 4


def test_the_page_about_python_policies_runs_and_does_what_it_says(folder, capsys):
    names = run_page("docs/python-policies.md", folder)
    runs = names["comparison"].raw
    assert len(runs) == 32
    assert all(run.attention_tokens.max() <= 81 for run in runs)
    assert "RecentAttention:budget=80,memory=8" in capsys.readouterr().out
    for name in hae.testing.PROPERTIES:
        assert f"| `{name}` |" in PAGES["docs/python-policies.md"]


def test_the_policy_in_python_is_short():
    (_, code), *_ = blocks("docs/python-policies.md")
    of_policy = code[code.index("class ") : code.index("comparison =")]
    assert len([line for line in of_policy.splitlines() if line.strip()]) < 25


# -------------------------------------------------------------------------------------- sessions


def sessions(page: str) -> list[tuple[str, str]]:
    """What a page shows of the program: (arguments, output)."""
    return re.findall(r"^```\n\$ hae (.*?)\n(.*?)```$", PAGES[page], re.DOTALL | re.MULTILINE)


SESSIONS = {page: sessions(page) for page in PAGES if sessions(page)}


@functools.cache
def printed(arguments: str) -> str:
    done = subprocess.run(
        [str(PROGRAM), *shlex.split(arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sessions_are_found_on_the_pages_that_have_them():
    found = {page: len(shown) for page, shown in SESSIONS.items()}
    expected = {"docs/memory.md": 3, "docs/choosing.md": 13, "docs/theory.md": 6}
    assert found == expected | {"docs/certify.md": 2}
    assert sum(found.values()) == sum(text.count("```\n$ ") for text in PAGES.values())


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        pytest.param(*session, id=f"{page}-{number}")
        for page, shown_sessions in SESSIONS.items()
        for number, session in enumerate(shown_sessions)
    ],
)
def test_the_program_prints_what_a_page_shows(arguments, shown):
    assert shown in printed(arguments)


def test_the_readme_shows_what_the_demo_prints(tmp_path):
    script = (REPOSITORY / "script" / "demo").read_text(encoding="utf-8")
    (command,) = re.findall(r"^build/bin/hae (compare .*?) --out", script, re.DOTALL | re.MULTILINE)
    command = command.replace("\\\n", " ").replace(
        "traces/data/*.h5", " ".join(map(str, (REPOSITORY / "traces" / "data").glob("*.h5")))
    )
    (shown,) = re.findall(
        r"^```\n(16 sequences.*?)```$", PAGES["README.md"], re.DOTALL | re.MULTILINE
    )
    assert shown in printed(command)


# ------------------------------------------------------------------------------------- the rest


def test_the_policy_in_cpp_compiles_and_keeps_the_contract(tmp_path):
    page = PAGES["docs/cpp-policies.md"]
    policy, replay = re.findall(r"^```cpp\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "newest_row.cpp").write_text(policy)
    headers = ("newest_row.cpp", "sim/replay.hpp", "traces/trace_file.hpp")
    included = "".join(f'#include "{header}"\n' for header in headers)
    (tmp_path / "replay.cpp").write_text(f"{included}void replayed() {{\n{replay}}}\n")
    build = REPOSITORY / "build"
    shell(
        tmp_path,
        f"compile='c++ -std=c++20 -Wall -Werror -Wno-unused-variable -I{REPOSITORY}'\n"
        "$compile -fsyntax-only replay.cpp\n"
        "$compile -ffp-contract=off newest_row.cpp"
        f" {build}/testing/libhae_testing.a {build}/sim/libhae_sim.a"
        " -lrapidcheck -lgtest -lpthread -o newest_row\n./newest_row",
    )


def test_the_page_about_choosing_quotes_the_closed_loop_word_for_word():
    measured = PAGES["docs/closed-loop.md"].splitlines()
    quoted = re.findall(r"^\|.* ± .*\|$", PAGES["docs/choosing.md"], re.MULTILINE)
    assert len(quoted) == 8
    assert set(quoted) <= set(measured)
