"""`paceline serve MODEL --port 0 …` with the fake engine, in a process of its own."""

from __future__ import annotations

import argparse
import gc
import os
import sys

from fake_engine import journal

from paceline.cli import report_address
from paceline.cli_flags import add_flags
from paceline.cli_settings import load
from paceline.config import EngineConfig, ServerConfig
from paceline.errors import PacelineError
from paceline.server.main import Address, run


def on_ready(address: Address) -> None:
    journal("front", "frozen", gc.get_freeze_count())
    report_address(address)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)
    args = parser.parse_args()
    try:
        settings = load(args, os.environ)
        run(
            settings.engine,
            settings.server,
            on_ready=on_ready,
            engine_factory=os.environ.get("FAKE_FACTORY", "fake_engine:build"),
        )
    except PacelineError as error:
        sys.exit(f"paceline: error: {error}")
