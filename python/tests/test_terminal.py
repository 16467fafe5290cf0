"""What the program looks like on terminals: tables that fit, colours, bars, progress; and that a
pipe gets plain text.
"""

from __future__ import annotations

import os
import re
import subprocess
import unicodedata

import pytest
from pseudo_terminal import SEQUENCE, Terminal, shown
from test_replay_agrees import REPOSITORY, program

TRACE = REPOSITORY / "traces" / "data" / "boards-test.h5"
LONG = "hae:r=0.007,alpha=0.008,max_evicted=140,bin=15%,sinks=4,score=mean"
COMPARE = [
    *(program(), "compare", str(TRACE), "--match", "mean", "--no-optimal", "--sequence", "0"),
    *("--policy", "hae:r=0.007,alpha=0.008", "--policy", "greedy", "--policy", LONG),
]


def environment(**changes):
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    return plain | {"TERM": "xterm-256color"} | changes


def columns_of(line):
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in line)
    return len(line) + wide


def cells(text, policy):
    """Every number of a policy's line, over all parts of the table."""
    lines = (re.split(r" {2,}", line.strip()) for line in text.splitlines())
    return [cell for name, *rest in lines if name == policy for cell in rest]


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 250])
def test_a_table_fits_the_terminal_and_leaves_nothing_out(columns):
    code, text = shown(COMPARE, columns, env=environment())
    assert code == 0
    plain = SEQUENCE.sub("", text)
    assert max(map(columns_of, plain.splitlines())) <= columns
    whole = subprocess.run(COMPARE, capture_output=True, text=True, check=True).stdout
    numbers = cells(whole, "greedy")
    assert len(numbers) == 11
    assert cells(plain, "greedy")[:11] == numbers  # The bars come behind.


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats", str(TRACE)],
        ["memory", str(TRACE), "--policy", LONG, "--model", "llava-1.5-7b", "--published", "99999"],
        ["memory"],
        ["certify", str(TRACE), "--policy", "greedy:budget=60", "--epsilon", "0.9"],
    ],
    ids=lambda arguments: " ".join(arguments[::2]),
)
def test_whatever_is_printed_fits(arguments):
    code, text = shown([program(), *arguments], 72, env=environment())
    assert code == 0
    plain = SEQUENCE.sub("", re.sub(r"(?m)^.*\r\x1b\[K", "", text))  # without what was wiped
    assert max(map(columns_of, plain.splitlines())) <= 72
    whole = subprocess.run([program(), *arguments], capture_output=True, text=True, check=True)
    words, expected = (set(re.findall(r"[\w.]+", of)) for of in (plain, whole.stdout))
    assert words == expected


def test_a_long_name_is_broken_and_whole():
    _, text = shown(COMPARE, 60, env=environment())
    assert LONG not in text
    assert LONG in re.sub(r"\s+(?:\d[\d. ±]*)?|\x1b\[[0-9;]*m", "", text)


def test_bars_are_as_long_as_what_is_lost():
    _, text = shown(COMPARE, 120, env=environment())
    bars = dict(
        re.findall(r"^(greedy|hae:r=0.007,alpha=0.008) +[\d.]+  ([█▏▎▍▌▋▊▉]+)$", text, re.M)
    )
    values = dict(re.findall(r"^(greedy|hae:r=0.007,alpha=0.008) +([\d.]+)  █", text, re.M))
    assert len(bars["greedy"]) == 24  # the longest
    share = float(values["hae:r=0.007,alpha=0.008"]) / float(values["greedy"])
    assert abs(len(bars["hae:r=0.007,alpha=0.008"]) - 24 * share) <= 1


def test_a_pipe_gets_plain_text():
    done = subprocess.run(COMPARE, capture_output=True, text=True, env=environment(), check=True)
    assert "\x1b" not in done.stdout + done.stderr
    assert "█" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) > 120  # A line a policy, however long.


@pytest.mark.parametrize(
    ("changes", "coloured"),
    [
        ({}, True),
        ({"NO_COLOR": ""}, True),
        ({"NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colours_can_be_switched_off(changes, coloured):
    _, text = shown(COMPARE, 200, env=environment(**changes))
    assert ("\x1b[1m" in text) == coloured
    if not coloured:
        assert "\x1b" not in text


def test_a_failed_rule_is_red():
    rules = ["--fail-if", "missed_mass.mean>0", "--fail-if", "missed_mass.mean>2"]
    code, text = shown([*COMPARE, *rules], 200, env=environment())
    assert code == 1
    assert "\x1b[31mFAILED\x1b[0m" in text
    assert "\x1b[32mok\x1b[0m" in text


def test_names_in_any_script_align(tmp_path):
    trace, synth = tmp_path / "猫.h5", [program(), "synth", "--kind", "heavy-hitters", "--out"]
    shape = ["--layers", "1", "--prompt", "40", "--tokens", "48"]
    subprocess.run([*synth, str(trace), *shape], check=True, capture_output=True)
    run = tmp_path / "犬😀.h5"
    replay = [program(), "replay", str(trace), "--policy", "greedy:budget=20", "--out", str(run)]
    subprocess.run(replay, check=True, capture_output=True)
    compare = [program(), "compare", str(trace), "--policy", "greedy:budget=20", "--policy"]
    done = subprocess.run(
        [*compare, f"log:path={run}", "--no-optimal"], capture_output=True, text=True, check=True
    )
    heading, *lines = [line for line in done.stdout.splitlines() if "  " in line]
    assert "犬😀" in lines[1]
    assert {columns_of(line) for line in lines} == {columns_of(heading)}


@pytest.mark.parametrize("arguments", [["policies"], ["policies", "hae"], ["policies", "full"]])
def test_texts_wrap_at_words(arguments):
    command = [program(), *arguments]
    code, text = shown(command, 60, env=environment())
    whole = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert code == 0
    assert max(map(columns_of, text.splitlines())) <= 60
    words, expected = (re.findall(r"[\w.]+", of) for of in (text, whole))
    assert set(expected) - set(words) <= {"option", "allowed", "meaning"}  # a table's heading


def test_progress_tells_the_time_left_on_a_terminal_only(tmp_path):
    trace = tmp_path / "t.h5"
    shape = "--layers 8 --query-heads 8 --kv-heads 4 --prompt 1200 --tokens 1300 --sequences 4"
    synth = [program(), "synth", "--kind", "heavy-hitters", "--out", str(trace), *shape.split()]
    subprocess.run(synth, check=True, capture_output=True)
    command = [program(), "replay", str(trace), "--policy", "greedy:budget=200", "--threads", "1"]
    with Terminal(command, 40, env=environment()) as terminal:
        text = terminal.read()
    drawn = [part for part in text.split("\r") if part.startswith("replaying [")]
    assert drawn
    assert all(re.search(r"\d+ % \d+ (s|min \d\d s|h \d\d min) left", part) for part in drawn)
    assert all(len(SEQUENCE.sub("", part)) < 40 for part in drawn if "\n" not in part)
    assert "\r\x1b[K" in text  # It is wiped when the work is done.
    piped = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    assert piped.stderr == ""
