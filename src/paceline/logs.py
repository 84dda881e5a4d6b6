"""One log format for both processes."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure(level: str) -> None:
    """Log to standard error from `level` on. Libraries speak up from warnings on, or all at debug."""
    logging.basicConfig(
        stream=sys.stderr, format=FORMAT, datefmt="%H:%M:%S", level=logging.WARNING, force=True
    )
    logging.getLogger("paceline").setLevel(level.upper())
    if level == "debug":
        logging.getLogger("uvicorn").setLevel(logging.DEBUG)
