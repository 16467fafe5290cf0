"""What stops hae-record."""

from __future__ import annotations

ANSWER_IS_NO, USAGE, BAD_INPUT = 1, 2, 3


class RecordError(Exception):
    """What stops a recording: one line, and the exit code it ends with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


def reason(error: BaseException) -> str:
    """What an error says, or its kind when it says nothing."""
    return str(error) or type(error).__name__
