"""hae-record without its start: torch loads once, and each line of stdin forks a recorder.

Its own arguments are those of a recorder that runs first and here, so that all that a model needs
is loaded too. A line is JSON: `arguments` of hae-record, `stdout` and `stderr` (paths), and
optionally `kill`:

    stage   module:function; calls of functions are counted from its call on, until
            hae.session.record returns
    calls   at this one the process sends itself the signal
    signal  its number
    report  where a process that is not killed writes how many calls there were

Two lines answer: the number of the process when it runs, its exit code when it ended.
"""

import json
import os
import pkgutil
import sys
from pathlib import Path

import torch

from hae import record, session


class CountedCalls:
    """Sends this process a signal at a place of the program, not at a moment of the clock."""

    def __init__(self, stage, calls=None, signal=None, report=None):
        self.stage = pkgutil.resolve_name(stage).__code__
        self.calls, self.signal, self.report = calls, signal, report
        self.seen = None

    def __call__(self, frame, event, _):
        """A profile function: called at calls and returns of functions, those in C too."""
        if self.seen is None and event == "call" and frame.f_code is self.stage:
            self.seen = 0
        if self.seen is None:
            return
        self.seen += 1
        if self.seen == self.calls:
            sys.setprofile(None)
            os.kill(os.getpid(), self.signal)
        if event == "return" and frame.f_code is session.record.__code__:
            sys.setprofile(None)
            if self.report is not None:
                Path(self.report).write_text(str(self.seen))


def run(job):
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    if "kill" in job:
        sys.setprofile(CountedCalls(**job["kill"]))
    try:
        record.program(job["arguments"])
    except SystemExit as end:
        sys.stderr.flush()
        os._exit(end.code)  # to take down all that torch made would take ten times as long


def serve():
    torch.set_num_threads(1)  # the threads of a pool do not survive a fork
    print(record.main(sys.argv[1:]), flush=True)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            run(json.loads(line))
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
