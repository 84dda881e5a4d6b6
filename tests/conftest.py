from __future__ import annotations

import signal

# A shell that starts the tests in the background has Ctrl-C ignored, which would go on to every server here.
signal.signal(signal.SIGINT, signal.default_int_handler)
