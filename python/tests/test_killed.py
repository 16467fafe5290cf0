"""Whatever is killed, wherever: what looks finished is finished, and nothing finished is lost.

Recorders are forked from one process in which torch is loaded (`recorder_forks.py`). One that
sends itself the signal after a number of function calls dies at a place of the program, also in
places where it spends no time; one that is killed after a while dies also in the middle of a call.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from recording import contents
from test_replay_agrees import REPOSITORY, program

KILL, INTERRUPT, TERMINATE = signal.SIGKILL, signal.SIGINT, signal.SIGTERM
PYTHON = REPOSITORY / "python"


def checks(trace_file):
    """Whether `hae check` takes the file for a sound trace."""
    done = subprocess.run([program(), "check", str(trace_file)], capture_output=True, timeout=60)
    return done.returncode == 0


def environment():
    """In which Python finds this repository's `hae`."""
    paths = [str(PYTHON), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


# -------------------------------------------------------------------------------- recorders


ENTRIES = [{"text": "a b c d"}, {"text": "e f"}, {"text": "g h i"}]
NAMES = [f"{index:06d}" for index in range(len(ENTRIES))]
# Where the counting of calls begins, and how many of the trials begin there: loading the model,
# recording, and what is done with the parts.
STAGES = {
    "hae.session:record": 8,
    "hae.session:_record_parts": 14,
    "hae.trace:join_traces": 8,
    "hae.session:_remove_parts": 5,
}
TIMED_TRIALS = 15
INTERRUPTED = "hae-record: interrupted; --resume continues after the finished sequences\n"


class Forks:
    """The process that forks recorders, one at a time."""

    def __init__(self, arguments):
        """arguments  of a first recorder, which loads what all of them need"""
        self.process = subprocess.Popen(
            [sys.executable, str(PYTHON / "tests" / "recorder_forks.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        printed = iter(self.process.stdout.readline, "")
        assert "0\n" in printed  # after what the recorder says

    def start(self, job):
        """returns the number of the process"""
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def exit_code(self):
        """Waits. A signal that nobody handled is its number, negative."""
        return int(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def arguments(model, out):
    """Of a recorder of all prompts, which lie beside the model."""
    prompts = model.parent / "prompts.jsonl"
    named = {"--out": out, "--prompts": prompts, "--max-new-tokens": 3}
    return [str(model), *(str(part) for pair in named.items() for part in pair)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.write_prompts(folder, ENTRIES)
    return tiny_models.save(tiny_models.llama(), tiny_models.tokenizer(), folder / "tiny-llama")


@pytest.fixture(scope="module")
def forks(model, tmp_path_factory):
    forks = Forks(arguments(model, tmp_path_factory.mktemp("first") / "out.h5"))
    yield forks
    forks.close()


@dataclass
class Recording:
    """The files of one recording, and the recorders that work on it."""

    folder: Path
    model: Path
    forks: Forks
    options: tuple[str, ...] = ()

    def __post_init__(self):
        self.folder.mkdir()

    def another(self, folder):
        return Recording(folder, self.model, self.forks, self.options)

    @property
    def out(self):
        return self.folder / "out.h5"

    @property
    def parts(self):
        return self.folder / "out.h5.parts"

    def start(self, *options, kill=None):
        job = {
            "arguments": [*arguments(self.model, self.out), *self.options, *options],
            "stdout": str(self.folder / "stdout"),
            "stderr": str(self.folder / "stderr"),
        }
        return self.forks.start(job | ({"kill": kill} if kill else {}))

    def run(self, *options, kill=None):
        self.start(*options, kill=kill)
        return self.forks.exit_code()

    def printed(self):
        return (self.folder / "stdout").read_text()

    def error(self):
        return (self.folder / "stderr").read_text()

    def recorded(self):
        """The names of the sequences that the last recorder generated."""
        lines = self.printed().splitlines()
        return [line.partition(":")[0] for line in lines if line.endswith(" generated")]

    def left(self):
        """The names of everything that lies where the recorder writes."""
        return {
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if path.is_file() and path.name not in ("stdout", "stderr")
        }


@dataclass
class Undisturbed:
    """A recording that nobody killed.

    earlier  the bytes of a trace of other options, which is there when some of the others begin
    calls    of functions, by stage
    seconds  that it took
    """

    recording: Recording
    earlier: bytes
    calls: dict
    seconds: float


def recorded_undisturbed(folder, model, forks, stages, options=()):
    recording = Recording(folder / "whole", model, forks, options)
    assert recording.run("--unrotated") == 0
    earlier = recording.out.read_bytes()
    calls = {}
    for stage in stages:
        report = folder / "calls"
        assert recording.run(kill={"stage": stage, "report": str(report)}) == 0
        calls[stage] = int(report.read_text())
    begin = time.monotonic()
    assert recording.run() == 0
    seconds = time.monotonic() - begin
    assert recording.left() == {"out.h5"} and checks(recording.out)
    return Undisturbed(recording, earlier, calls, seconds)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model, forks):
    return recorded_undisturbed(tmp_path_factory.mktemp("undisturbed"), model, forks, STAGES)


def finished_names(recording):
    """What is finished after a kill, each of which is a whole trace; nothing else looks so."""
    finished = []
    for path in sorted(recording.parts.glob("*")):
        if path.suffix == ".h5":
            assert checks(path), path
            finished.append(path.stem)
        else:
            assert path.suffix in (".partial", ".spool"), path
    return finished


def examine(recording, undisturbed, earlier):
    """After a kill: what is finished is whole, and a resumed run records the rest and only that.

    earlier  bytes of the file with which the killed recorder began, or None
    returns  how far it had come
    """
    whole = contents(undisturbed.recording.out)
    finished = finished_names(recording)
    found = recording.out.read_bytes() if recording.out.exists() else None
    joined = found != earlier
    if joined:
        assert checks(recording.out) and contents(recording.out) == whole
    assert recording.run("--resume") == 0, recording.error()
    assert recording.recorded() == ([] if joined else sorted(set(NAMES) - set(finished)))
    assert recording.left() == {"out.h5"} and not recording.parts.exists()
    assert checks(recording.out) and contents(recording.out) == whole
    return "joined" if joined else f"{len(finished)} finished"


def stopped_cleanly(recording, exit_code, sent):
    """What an interrupted recorder says and leaves: one line, and nothing under another name."""
    return (
        exit_code == 128 + sent
        and recording.error() == INTERRUPTED
        and not [name for name in recording.left() if ".partial" in name or ".spool" in name]
    )


def test_a_recorder_killed_at_any_call_loses_nothing_finished(tmp_path, undisturbed):
    random = np.random.default_rng(0)
    happened = Counter()
    stages = [stage for stage, trials in STAGES.items() for _ in range(trials)]
    for number, stage in enumerate(stages):
        sent = (KILL, KILL, INTERRUPT, KILL, TERMINATE)[number % 5]
        calls = int(random.integers(1, undisturbed.calls[stage]))
        print(f"trial {number}: {sent.name} at call {calls} from {stage}")
        recording = undisturbed.recording.another(tmp_path / str(number))
        earlier = undisturbed.earlier if number % 2 else None
        if earlier is not None:
            recording.out.write_bytes(earlier)
        exit_code = recording.run(kill={"stage": stage, "calls": calls, "signal": sent})
        if exit_code == 0:
            happened["ended before"] += 1  # one run calls a little less than another
        elif sent == KILL:
            assert exit_code == -KILL
        else:
            assert stopped_cleanly(recording, exit_code, sent), recording.error()
        happened[examine(recording, undisturbed, earlier)] += 1
    print(happened)
    assert happened["ended before"] <= 2
    assert {"joined", *(f"{count} finished" for count in range(4))} <= happened.keys(), happened


def test_a_recorder_of_batches_that_is_killed_records_the_same_batches_again(
    tmp_path, model, forks
):
    # Three sequences in batches of two; parts of one batch are written one after the other.
    stage = "hae.recorder:Recorder._write"
    options = ("--batch", "2", "--beams", "2")
    undisturbed = recorded_undisturbed(tmp_path, model, forks, [stage], options)
    random = np.random.default_rng(4)
    happened = Counter()
    for number in range(10):
        recording = undisturbed.recording.another(tmp_path / str(number))
        # Most of the calls come after the first batch.
        calls = 1 + int(undisturbed.calls[stage] * random.uniform() ** 3)
        print(f"trial {number}: at call {calls} from {stage}")
        kill = {"stage": stage, "calls": calls, "signal": KILL}
        assert recording.run(kill=kill) in (-KILL, 0)
        happened[examine(recording, undisturbed, earlier=None)] += 1
    print(happened)
    assert {"1 finished", "2 finished"} <= happened.keys(), happened


def test_a_recorder_killed_at_any_moment_loses_nothing_finished(tmp_path, undisturbed):
    random = np.random.default_rng(1)
    for number, delay in enumerate(random.uniform(0, undisturbed.seconds, TIMED_TRIALS)):
        print(f"trial {number}: after {delay:.3f} s")
        recording = undisturbed.recording.another(tmp_path / str(number))
        process = recording.start()
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):  # it ended before
            os.kill(process, KILL)
        assert recording.forks.exit_code() in (-KILL, 0)
        examine(recording, undisturbed, earlier=None)


@pytest.mark.parametrize("sent", [INTERRUPT, TERMINATE], ids=lambda sent: sent.name)
def test_a_recorder_stops_in_one_line_while_its_libraries_load(tmp_path, model, sent):
    command = [sys.executable, "-m", "hae.record", *arguments(model, tmp_path / "out.h5")]
    recorder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    loaded = Path(f"/proc/{recorder.pid}/maps")
    while "libtorch" not in loaded.read_text():  # there are seconds of loading left
        assert recorder.poll() is None
        time.sleep(0.001)
    recorder.send_signal(sent)
    _, error = recorder.communicate(timeout=60)
    assert (recorder.returncode, error) == (128 + sent, INTERRUPTED)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_comes_while_an_object_is_finalised_is_not_lost():
    program = """if True:
        import os, signal
        from hae import record

        class Finalised:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)

        def main(arguments):
            Finalised()
            return 0

        record.main = main
        record.program([])
        """
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert (done.returncode, done.stderr) == (130, INTERRUPTED)


# ------------------------------------------------------------------------------ the program


RECORDING = REPOSITORY / "traces" / "data" / "boards-test.h5"
POLICIES = ["--policy", "greedy:budget=64", "--policy", "window:budget=64"]
ONE = [RECORDING, "--sequence", 0]
# Arguments, what they write, and how often each is killed. Files are named from within the folder
# in which the program runs, so that the same command writes the same bytes.
COMMANDS = {
    "compare": (
        ["compare", *ONE, *POLICIES, "--json", "result.json", "--csv", "result.csv"],
        ["result.json", "result.csv"],
        50,
    ),
    "compare --out": (["compare", *ONE, *POLICIES, "--out", "result"], ["result"], 30),
    "replay": (
        ["replay", *ONE, "--policy", "greedy:budget=64", "--out", "run.h5"],
        ["run.h5"],
        15,
    ),
    "import": (["import", "trace.npz", "--from", "npz", "--out", "trace.h5"], ["trace.h5"], 15),
    "synth": (
        ["synth", "--kind", "sinks", "--prompt", "1000", "--out", "synth.h5"],
        ["synth.h5"],
        15,
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with the files that the commands read."""
    folder = tmp_path_factory.mktemp("inputs")
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((4, 4, 1000, 64), np.float32) for name in "qkv"}
    np.savez(folder / "trace.npz", prompt=np.array(900), **arrays)
    return folder


class Killed:
    """One command in a folder of its own, again and again."""

    def __init__(self, name, folder, inputs):
        arguments, self.targets, self.trials = COMMANDS[name]
        self.command = [program(), *map(str, arguments)]
        self.folder = folder
        self.inputs = {path.name for path in inputs.iterdir()}
        for path in inputs.iterdir():
            (folder / path.name).symlink_to(path)
        begin = time.monotonic()
        assert self.start().wait(timeout=120) == 0
        self.seconds = time.monotonic() - begin
        self.whole = self.written()

    def start(self):
        return subprocess.Popen(self.command, cwd=self.folder, stdout=subprocess.DEVNULL)

    def written(self):
        """What lies in the folder but the inputs: names and bytes. A folder is its files."""
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        names = {str(path.relative_to(self.folder)) for path in paths} - self.inputs
        return {name: (self.folder / name).read_bytes() for name in names}

    def begin_with(self, files):
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in self.inputs:
                path.unlink()
        for name, content in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)

    def stop(self, sent, delay, at_writing):
        """Runs the command and sends it a signal; returns how it ended.

        delay       seconds
        at_writing  count them from when a temporary file is there
        """
        process = self.start()
        while at_writing and process.poll() is None and not self.is_writing():
            pass
        time.sleep(delay)
        process.send_signal(sent)
        return process.wait(timeout=10)  # it takes a moment, whatever the command would take

    def is_writing(self):
        names = [*self.targets, *self.whole]
        return any(os.path.exists(self.folder / f"{name}.partial") for name in names)

    def moments(self, random, trials):
        """Delays from the start, and short ones from when writing begins, in turn."""
        for trial in range(trials):
            at_writing = trial % 2 == 1
            delay = random.uniform(0, self.seconds) * (random.choice([0, 0.1]) if at_writing else 1)
            since = "writing began" if at_writing else "start"
            print(f"trial {trial}: {delay:.4f} s after {since}")
            yield delay, at_writing

    def result_of(self, target, files):
        """What of `files` a target is: a file, or all files of a folder that has a result.json,
        which comes last and goes first. Empty when there is no target.
        """
        found = {
            name: content
            for name, content in files.items()
            if Path(target) in (Path(name), *Path(name).parents) and not is_temporary(name)
        }
        return found if target in found or f"{target}/result.json" in found else {}


def is_temporary(name):
    return any(part.endswith(".partial") for part in Path(name).parts)


@pytest.fixture(params=COMMANDS)
def killed(request, tmp_path, inputs):
    return Killed(request.param, tmp_path, inputs)


def test_a_killed_program_leaves_whole_files_or_none(killed):
    random = np.random.default_rng(2)
    earlier = {name: b"of an earlier run" for name in killed.whole}
    happened = Counter()
    for trial, (delay, at_writing) in enumerate(killed.moments(random, killed.trials)):
        before = earlier if trial % 4 < 2 else {}
        killed.begin_with(before)
        exit_code = killed.stop(KILL, delay, at_writing)
        assert exit_code in (-KILL, 0)
        written = killed.written()
        for target in killed.targets:
            found = killed.result_of(target, written)
            is_new = found == killed.result_of(target, killed.whole)
            untouched = found == killed.result_of(target, before)
            removed = found == {} and target not in killed.whole  # an old folder goes first
            assert is_new or untouched or removed, target
            happened["new" if is_new else "untouched" if untouched else "removed"] += 1
        left = written.keys() - killed.whole.keys()
        assert all(is_temporary(name) for name in left)
        happened["cut short"] += bool(left)
        if left:  # it is in nobody's way
            assert killed.start().wait(timeout=120) == 0 and killed.written() == killed.whole
    print(happened)
    assert happened["untouched"]


@pytest.mark.parametrize("sent", [INTERRUPT, TERMINATE], ids=lambda sent: sent.name)
def test_an_interrupted_program_leaves_no_temporary_file(killed, sent):
    random = np.random.default_rng(3)
    for delay, at_writing in killed.moments(random, 8):
        killed.begin_with({})
        assert killed.stop(sent, delay, at_writing) in (-sent, 0)
        assert killed.written().items() <= killed.whole.items()
