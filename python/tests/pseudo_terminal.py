"""Programs on a terminal of a given size, as a user sees them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>]|\][^\x07]*\x07)")


class Terminal:
    """A process whose stdin, stdout and stderr are one terminal."""

    def __init__(self, command, columns=80, rows=40, **process):
        self.end, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, **process
        )
        os.close(theirs)
        self.seen = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.end)

    def type(self, text):
        os.write(self.end, text.encode())

    def read(self, until=None, timeout=60):
        """What was shown so far; waits for a pattern, or without one for the end."""
        limit = time.monotonic() + timeout
        while until is None or not re.search(until, self.seen):
            ready, _, _ = select.select([self.end], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"nothing came; so far {self.seen!r}"
            try:
                data = os.read(self.end, 65536)
            except OSError:  # Linux says so when the other end is closed
                data = b""
            if not data:
                assert until is None, f"ended without {until!r}: {self.seen!r}"
                break
            self.seen += data.decode(errors="replace")
        return self.seen.replace("\r\n", "\n")


def shown(command, columns=80, **process):
    """Exit code and everything that a terminal was sent."""
    with Terminal(command, columns, **process) as terminal:
        text = terminal.read()
        return terminal.process.wait(), text
