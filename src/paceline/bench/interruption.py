"""Ctrl-C and SIGTERM end the measuring, not the program: what was measured until then is still written."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """Around the block that may be cut short; to be used by the main thread.

    `signal` is the one that cut it, None if nothing did. Once the block is over, SIGTERM is ignored until
    `restore`: a report is written whole.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: Any = signal.SIG_DFL

    def __enter__(self) -> Interruption:
        self._before = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """KeyboardInterrupt ends here; anything else goes on, with SIGTERM as it was."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, KeyboardInterrupt):
            self.signal = self.signal or signal.SIGINT
            return True
        if error is not None:
            self.restore()
        return False

    def restore(self) -> None:
        """SIGTERM does again what it did before the block."""
        signal.signal(signal.SIGTERM, self._before)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt
