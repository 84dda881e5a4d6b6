"""`paceline serve MODEL --port 0 …` with the fake engine, in a process of its own."""

from __future__ import annotations

import argparse
import sys

from paceline.cli import report_address
from paceline.cli_flags import add_flags, from_flags
from paceline.config import EngineConfig, ServerConfig
from paceline.errors import PacelineError
from paceline.server.main import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)
    args = parser.parse_args()
    try:
        run(
            from_flags(EngineConfig, args),
            from_flags(ServerConfig, args),
            on_ready=report_address,
            engine_factory="fake_engine:build",
        )
    except PacelineError as error:
        sys.exit(f"paceline: error: {error}")
