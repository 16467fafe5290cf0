"""Reference pages made from the program and the package, so that they cannot go stale."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from headers import header_page, public_headers


def reference_pages(repository: Path) -> dict[str, str]:
    return {
        "api/cli.md": commands_page(repository),
        "api/policies.md": policies_page(repository),
        "api/python.md": python_page(repository),
        "api/cpp.md": cpp_page(repository),
    }


def program(repository: Path) -> list[str]:
    return [os.environ.get("HAE_PROGRAM", str(repository / "build" / "bin" / "hae"))]


def hae(repository: Path, *arguments: str) -> str:
    return output_of([*program(repository), *arguments], repository)


def output_of(command: list[str], repository: Path) -> str:
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": str(repository / "python")}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout


def commands(repository: Path) -> list[str]:
    listed = hae(repository, "--help").split("Subcommands:\n")[1].split("\n\n")[0]
    return re.findall(r"^ *(\S+) {2,}\S", listed, re.MULTILINE)


def commands_page(repository: Path) -> str:
    shown = hae(repository, "--help")
    page = ["# Commands", "What each command's `--help` prints.", block(shown)]
    for command in commands(repository):
        page += [f"## hae {command}", block(hae(repository, command, "--help"))]
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, target in project["scripts"].items():
        code = "from {0} import {1}; {1}()".format(*target.split(":"))
        shown = output_of([sys.executable, "-c", code, "--help"], repository)
        page += [f"## {name}", "Of the [Python package](../python/README.md).", block(shown)]
    return "\n\n".join(page) + "\n"


def policies_page(repository: Path) -> str:
    listed = hae(repository, "policies").split("\n\n")[0]
    rows = re.findall(r"^(\S+) +(\S.*)$", listed, re.MULTILINE)
    links = [f"| [`{name}`](#{name.replace('/', '')}) | {summary} |" for name, summary in rows]
    page = [
        "# Policies",
        "What `hae policies` and `hae policies NAME` print. A policy is written "
        "`name:key=value,key=value`. [Where the paper is ambiguous]"
        "(../reference/README.md#where-the-paper-is-ambiguous) its readings are options.",
        "\n".join(["| policy | |", "|---|---|", *links]),
    ]
    for name, _ in rows:
        page += [f"## {name}", policy_section(hae(repository, "policies", name))]
    return "\n\n".join(page) + "\n"


def policy_section(shown: str) -> str:
    """The lines about source and fidelity as they are, the options as a table."""
    summary, *rest = shown.strip().split("\n\n")
    section = [summary.split(": ", 1)[1]]
    for part in rest:
        if part.startswith("option "):
            section.append(options_table(part.splitlines()))
        else:
            section += re.sub(r"^(\w+) +", r"**\1:** ", part, flags=re.MULTILINE).splitlines()
    return "\n\n".join(section)


def options_table(lines: list[str]) -> str:
    heading, *options = lines
    starts = [found.start() for found in re.finditer(r"\S+", heading)]
    table = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for line in options:
        option, default, allowed, meaning = (column(line, starts, i) for i in range(4))
        table.append(f"| `{option}` | `{default}` | {allowed} | {meaning} |")
    return "\n".join(table)


def column(line: str, starts: list[int], number: int) -> str:
    end = starts[number + 1] if number + 1 < len(starts) else None
    return line[starts[number] : end].strip()


def python_page(repository: Path) -> str:
    """The public names of the package, in the order of its table, each from where it lives."""
    source = (repository / "python" / "hae" / "__init__.py").read_text(encoding="utf-8")
    home = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "_HOME"
    )
    whole = "::: hae.{}\n    options: {{ heading_level: 2, show_root_full_path: true }}"
    page = [
        "# Python",
        "The public names of the package `hae`. [The package at work](../python/README.md).",
        "## hae",
        *(f"::: hae.{module}.{name}" for name, module in home.items()),
        *(whole.format(module) for module in ("hf", "testing", "plots", "fates")),
    ]
    return "\n\n".join(page) + "\n"


def cpp_page(repository: Path) -> str:
    """Every public header, by library, with what it declares."""
    page = ["# C++", "The headers that `cmake --install` installs, under `include/hae`."]
    library = ""
    for path in sorted(public_headers(repository)):
        if library != (library := path.split("/")[0]):
            page.append(f"## {library}\n\n| header | declares |\n|---|---|")
        text = header_page(path, (repository / path).read_text(encoding="utf-8"))
        names = ", ".join(f"`{name}`" for name in re.findall(r"^## (.*)$", text, re.MULTILINE))
        page[-1] += f"\n| [{path}](../{path}) | {names} |"
    return "\n\n".join(page) + "\n"


def block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"
