"""Tests press Ctrl-C in this process and in children. A shell that starts a command in the
background lets it ignore SIGINT, which children inherit: here it is as on a terminal.
"""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
