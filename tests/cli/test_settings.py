"""Where settings come from, which source wins, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli_flags import Parser, add_flags
from paceline.cli_settings import load, show
from paceline.config import MAX_LOGPROBS, EngineConfig, ServerConfig, Settings
from paceline.errors import ConfigError
from paceline.request import MAX_LOGPROBS as REQUEST_MAX_LOGPROBS


def flags(*argv: str, **more: Any) -> argparse.Namespace:
    parser = Parser()
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)
    given = parser.parse_args(argv)
    vars(given).update(more)
    return given


def write(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


def test_flags_beat_variables_beat_the_file_beat_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 1\nmax_queue: 1\nmax-num-seqs: 7\n")
    settings = load(
        flags("--port", "3", config=path), {"PACELINE_PORT": "2", "PACELINE_MAX_QUEUE": "2", "HOME": "/"}
    )
    assert (settings.server.port, settings.engine.max_queue, settings.engine.max_num_seqs) == (3, 2, 7)
    assert settings.engine.page_size == EngineConfig().page_size
    assert settings.origins == {"port": "--port", "max_queue": "PACELINE_MAX_QUEUE", "max_num_seqs": path}


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    path = write(tmp_path, "debug: true\ndrain_seconds: 2\nrevision: null\n")
    settings = load(flags(), {"PACELINE_CONFIG": path, "PACELINE_CACHE": "/x"})
    assert settings.engine.debug
    assert settings.server.drain_seconds == 2.0
    assert isinstance(settings.server.drain_seconds, float)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PACELINE_PROT": "1"}, "unknown variable PACELINE_PROT (did you mean PACELINE_PORT?)"),
        ({"PACELINE_PORT": "x"}, "PACELINE_PORT must be a whole number, got 'x'"),
        ({"PACELINE_PORT": "tcp://10.0.0.1:80"}, "enableServiceLinks"),
        ({"PACELINE_PORT": "70000"}, "port must be in [0, 65535], got 70000 (PACELINE_PORT)"),
        ({"PACELINE_DEBUG": "maybe"}, "PACELINE_DEBUG must be true or false, got 'maybe'"),
        ({"PACELINE_DRAIN_SECONDS": "nan"}, "drain_seconds must be at least 0, got nan"),
        ({"PACELINE_API_KEY": ""}, "PACELINE_API_KEY is empty"),
        ({"PACELINE_API_KEY": "a,,b"}, "api_key must not be empty"),
        ({"PACELINE_API_KEY": "ключ"}, "printable ASCII"),
        ({"PACELINE_DEVICE": "tpu"}, "device must be one of cpu, cuda, got 'tpu' (PACELINE_DEVICE)"),
        ({"PACELINE_MAX_LOGPROBS": "21"}, "max_logprobs must be at most 20, got 21"),
        (
            {"PACELINE_DEPTH": "\N{FULLWIDTH DIGIT ONE}"},
            "depth must be auto or a whole number, got '\N{FULLWIDTH DIGIT ONE}' (PACELINE_DEPTH)",
        ),
        ({"PACELINE_DEPTH": "-1"}, "depth must be auto or a whole number, got '-1' (PACELINE_DEPTH)"),
        ({"PACELINE_DEPTH": "9"}, "depth must be at most max_depth (8), got 9 (PACELINE_DEPTH)"),
        ({"PACELINE_DEPTH": "2", "PACELINE_MAX_DEPTH": "1"}, "depth must be at most max_depth (1), got 2"),
        ({"PACELINE_MAX_DEPTH": "17"}, "max_depth must be at most 16, got 17 (PACELINE_MAX_DEPTH)"),
        ({"PACELINE_NGRAM_MIN": "0"}, "ngram_min must be at least 1, got 0 (PACELINE_NGRAM_MIN)"),
        ({"PACELINE_NGRAM_MIN": "5"}, "ngram_min must be at most ngram_max (4), got 5 (PACELINE_NGRAM_MIN)"),
        ({"PACELINE_CONFIG": "/no/such.yaml"}, "cannot read /no/such.yaml: No such file"),
    ],
)
def test_wrong_variables(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags(), variables)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_queu: 1", "unknown key 'max_queu' (did you mean max_queue?)"),
        ("7: 1", "unknown key 7"),
        ("port: '80'", "port must be a whole number, got '80'"),
        ("port: true", "port must be a whole number, got True"),
        ("port: null", "port must be a whole number, got None"),
        ("debug: 1", "debug must be true or false, got 1"),
        ("served_model_name: 7", "served_model_name must be text, got 7"),
        ("draft: ''", "draft must not be empty"),
        ("draft: 3", "draft must be text, got 3"),
        ("drain_seconds: soon", "drain_seconds must be a number, got 'soon'"),
        ("page_size: 3", "page_size must be a power of two, got 3"),
        ("port: 1\nport: 2", "port is there twice"),
        ("max-queue: 1\nmax_queue: 2", "max_queue is there twice"),
        ("- port", "expected settings as 'name: value' lines, got list"),
        ("port: [1", ":1: not valid YAML"),
        ("!!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(flags(config=path), {})
    assert words in str(caught.value)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load(flags(config=write(tmp_path, "# nothing yet\n")), {}).origins == {}


@given(
    st.builds(
        EngineConfig,
        model=st.text(min_size=1),
        revision=st.none() | st.text(min_size=1),
        max_queue=st.integers(0, 10**6),
        debug=st.booleans(),
        draft=st.none() | st.text(min_size=1),
        depth=st.integers(0, 8),
    ),
    st.builds(
        ServerConfig, drain_seconds=st.floats(0, 1e6), served_model_name=st.none() | st.text(min_size=1)
    ),
)
def test_what_is_printed_is_a_file_that_gives_the_same(engine: EngineConfig, server: ServerConfig) -> None:
    text = show(Settings(engine=engine, server=server, origins={}))
    values = yaml.safe_load(text)
    assert values == {
        **dataclasses.asdict(engine),
        **{k: v for k, v in dataclasses.asdict(server).items()},
    }
    assert text.count("\n") == len(values)


def test_a_key_is_shown_nowhere() -> None:
    settings = load(flags(), {"PACELINE_API_KEY": "s3cret, other"})
    assert settings.server.api_keys == ("s3cret", "other")
    assert "s3cret" not in show(settings) + repr(settings)
    assert "# api_key: not shown" in show(settings)
    assert "PACELINE_API_KEY" in show(settings)


def test_the_limit_is_the_samplers() -> None:
    assert MAX_LOGPROBS == REQUEST_MAX_LOGPROBS
