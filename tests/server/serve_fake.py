"""`paceline serve MODEL --port 0 …` with the fake engine, in a process of its own."""

from __future__ import annotations

import argparse
import os
import sys

from paceline.cli import report_address
from paceline.cli_flags import add_flags
from paceline.cli_settings import load
from paceline.config import EngineConfig, ServerConfig
from paceline.errors import PacelineError
from paceline.server.main import run

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
            on_ready=report_address,
            engine_factory=os.environ.get("FAKE_FACTORY", "fake_engine:build"),
        )
    except PacelineError as error:
        sys.exit(f"paceline: error: {error}")
