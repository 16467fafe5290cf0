"""Tab on a command line of real shells (tests/cli/completion_test.cpp tests what is offered)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from pseudo_terminal import SEQUENCE, Terminal
from test_replay_agrees import program

SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source <(hae completion bash)"),
    "zsh": (
        ["zsh", "-f", "-i"],
        "autoload -Uz compinit; compinit -D -u; source <(hae completion zsh)",
    ),
}


@pytest.fixture(params=SHELLS)
def completed(request, tmp_path):
    """What a shell makes of a line when Tab is pressed behind it."""
    command, setup = SHELLS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    (tmp_path / "recorded-trace.h5").touch()
    tool = tmp_path / "hae-greet"
    tool.write_text("#!/bin/sh\n", encoding="utf-8")
    tool.chmod(0o755)
    path = f"{Path(program()).parent}:{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "TERM": "dumb", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    with Terminal(command, 200, cwd=tmp_path, env=environment) as shell:

        def press_tab(line):
            """The words, each in angle brackets."""
            shell.seen = ""
            # Ctrl-A and Ctrl-E, the line's beginning and end: its words become those of printf.
            shell.type(f"{line}\t\x01printf '<%s>' \x05; echo done-\"\"$?\n")
            text = SEQUENCE.sub("", shell.read(r"done-0"))
            return text[text.rindex("<hae>") :].split("done-0")[0]

        shell.type(f"{setup}; echo ready-$((40 + 2))\n")
        shell.read("ready-42")
        yield press_tab


def test_tab_completes_commands_options_policies_and_files(completed):
    for line, words in {
        "hae compa": "<hae><compare>",
        "hae gre": "<hae><greet>",
        "hae compare --no-opt": "<hae><compare><--no-optimal>",
        "hae compare --match=pe": "<hae><compare><--match=peak>",
        "hae policies h2o/lay": "<hae><policies><h2o/layerwise>",
        "hae compare --policy h2o/lay": "<hae><compare><--policy><h2o/layerwise>",
        "hae compare --policy h2o/layerwise:bud": "<hae><compare><--policy><h2o/layerwise:budget=>",
        "hae compare --policy hae:bin=4,alph": "<hae><compare><--policy><hae:bin=4,alpha=>",
        "hae compare --policy=hae:bin=4,alph": "<hae><compare><--policy=hae:bin=4,alpha=>",
        "hae info recor": "<hae><info><recorded-trace.h5>",
        "hae compare --json recor": "<hae><compare><--json><recorded-trace.h5>",
        "hae replay --policy log:path=recor": "<hae><replay><--policy><log:path=recorded-trace.h5>",
    }.items():
        assert completed(line) == words, line
