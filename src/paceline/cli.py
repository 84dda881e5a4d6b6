"""The command line: `paceline serve | chat | generate | draft | train | sweep | replay | calibrate | models`.

Parses, prints, and turns every PacelineError into one line and exit code 1. What the commands do is
elsewhere, and is imported only by the command that needs it.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from paceline import logs
from paceline._version import __version__
from paceline.cli_calibrate import add_calibrate_command
from paceline.cli_draft import add_draft_command
from paceline.cli_flags import Parser, add_flags, help_of
from paceline.cli_replay import add_replay_command
from paceline.cli_settings import load, show
from paceline.cli_sweep import add_sweep_command
from paceline.cli_train import add_train_command
from paceline.config import EngineConfig, ServerConfig
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.request import SamplingParams
    from paceline.server.main import Address

SERVE_EXAMPLES = """\
examples:
  paceline serve
  paceline serve Qwen/Qwen2.5-0.5B-Instruct --port 9000
  paceline serve ./model.gguf --served-model-name mine --host 0.0.0.0
  PACELINE_PORT=9000 paceline serve --config paceline.yaml --print-config
"""
CHAT_EXAMPLES = """\
examples:
  paceline chat
  paceline chat --system "Answer in one sentence." --temperature 0
  echo "What is a paceline?" | paceline chat
"""
GENERATE_EXAMPLES = """\
examples:
  paceline generate --prompt "The capital of France is" --max-tokens 16 --temperature 0
  cat prompt.txt | paceline generate --json --logprobs 3
"""
MODELS_EXAMPLES = """\
examples:
  paceline models
  paceline models pull smollm2-135m-instruct
"""


# What no code of ours can help, and no traceback would explain.
THE_MACHINES_FAULT = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a PacelineError (2, a usage error, is raised)."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    # Torch's threads spin while they wait, which makes prompts slow beside other processes and gains nothing
    # where there are none. Read when torch is loaded, here or in a process of ours.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        args.run(args)
        sys.stdout.flush()  # here, where a full disk is told in one line
    except PacelineError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough of it; the interpreter must not try to flush the rest.
        _drop_output()
        return 141
    except OSError as error:
        if error.errno not in THE_MACHINES_FAULT:
            raise
        _drop_output()
        where = f": {error.filename}" if error.filename else ""
        print(f"paceline: error: {os.strerror(error.errno)}{where}", file=sys.stderr)
        return 1
    return 0


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> Parser:
    parser = Parser(
        prog="paceline", description="An LLM inference server that drafts only when drafting pays."
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = _command(commands, "serve", _serve, "answer OpenAI's API over HTTP", SERVE_EXAMPLES)
    serve.add_argument(
        "--print-config",
        action="store_true",
        help="show all settings and where each comes from, as a file for --config, and end",
    )
    add_flags(serve, ServerConfig)
    _add_engine_flags(serve)

    chat = _command(commands, "chat", _chat, "talk with a model in the terminal", CHAT_EXAMPLES)
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    _add_sampling_flags(chat, temperature=0.7)
    _add_engine_flags(chat)

    generate = _command(commands, "generate", _generate, "complete a text", GENERATE_EXAMPLES)
    generate.add_argument(
        "--prompt", "-p", metavar="TEXT", help="the text to complete; default: standard input"
    )
    generate.add_argument("--json", action="store_true", help="print the whole result as one JSON object")
    generate.add_argument("--n", type=int, default=1, metavar="N", help="answers to the prompt")
    generate.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: also the N likeliest tokens"
    )
    _add_sampling_flags(generate, temperature=1.0)
    _add_engine_flags(generate)

    add_draft_command(commands)
    add_train_command(commands)
    add_sweep_command(commands)
    add_replay_command(commands)
    add_calibrate_command(commands)
    models = commands.add_parser(
        "models",
        usage="paceline models [-h] [ACTION ...]",
        help="list or fetch the built-in models",
        epilog=MODELS_EXAMPLES,
    )
    models.set_defaults(run=_list_models, parser=models)
    actions = models.add_subparsers(metavar="ACTION", prog="paceline models")
    listing = actions.add_parser("list", help="show the built-in models (the default)")
    listing.set_defaults(parser=listing)
    pull = actions.add_parser("pull", help="fetch a built-in model")
    pull.add_argument("name", metavar="NAME", help="a name that the list shows")
    pull.set_defaults(run=_pull_model, parser=pull)
    return parser


def _command(
    commands: argparse._SubParsersAction[Parser], name: str, run: Any, help: str, examples: str
) -> Parser:
    """A command on a model."""
    parser = commands.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + ".", epilog=examples
    )
    parser.set_defaults(run=run, parser=parser)
    model = EngineConfig.__dataclass_fields__["model"]
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=help_of(model))
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of settings, named as the flags are; flags and PACELINE_* variables come before it",
    )
    return parser


def _add_engine_flags(parser: Parser) -> None:
    add_flags(parser, EngineConfig, but={"model"})


def _add_sampling_flags(parser: Parser, *, temperature: float) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=temperature, metavar="X", help="0 is greedy")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="likeliest tokens of this total probability"
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="likeliest tokens of this number; 0 is off"
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="X",
        help="tokens at least this likely, relative to the best",
    )
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 is off")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of an answer; default: the context"
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="the same seed gives the same words; default: a fresh one"
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be repeated"
    )


def _sampling_params(args: argparse.Namespace, **more: Any) -> SamplingParams:
    from paceline.request import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        max_tokens=args.max_tokens,
        seed=args.seed,
        stop=tuple(args.stop),
        **more,
    )


def _serve(args: argparse.Namespace) -> None:
    from paceline.server.main import run

    settings = load(args, os.environ)
    if args.print_config:
        print(show(settings), end="")
        return
    run(settings.engine, settings.server, on_ready=report_address)


def report_address(address: Address) -> None:
    # A small model at the default temperature says anything, and may go on up to its context's end.
    body = {
        "model": address.model_name,
        "messages": [{"role": "user", "content": "Say hello."}],
        "temperature": 0,
        "max_tokens": 64,
    }
    print(
        f"Paceline {__version__} serves {address.model_name} at {address.url} "
        f"(context: {address.max_model_len} tokens)"
    )
    print(
        f"Try it:\n  curl {address.url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}",
        flush=True,
    )


def _chat(args: argparse.Namespace) -> None:
    from paceline.cli_chat import Chat

    params = _sampling_params(args)
    with _loaded(args) as llm:
        Chat(llm, params, args.system).run()


def _generate(args: argparse.Namespace) -> None:
    from paceline.server.speculation import Speculation

    if args.logprobs is not None and not args.json:
        raise ConfigError("--logprobs needs --json: plain text has no place for them")
    params = _sampling_params(args, n=args.n, logprobs=args.logprobs, speculation_summary=args.json)
    if args.prompt is None and sys.stdin.isatty():
        print("type the prompt, then Ctrl-D at the beginning of a line", file=sys.stderr)
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    with _loaded(args) as llm:
        [completion] = llm.generate(prompt, params, progress=False)
    if args.json:
        result = msgspec.to_builtins(completion)
        for choice, shown in zip(completion.choices, result["choices"], strict=True):
            # On the wire a position is an array; people get names.
            shown["logprobs"] = choice.logprobs and [msgspec.structs.asdict(p) for p in choice.logprobs]
            if choice.speculation is not None:
                shown["speculation"] = msgspec.to_builtins(Speculation.of(choice.speculation))
        print(json.dumps(result, ensure_ascii=False))
    else:
        print("\n".join(choice.text for choice in completion.choices))


def _loaded(args: argparse.Namespace) -> LLM:
    from paceline.llm import LLM

    logs.configure("warning")
    config = load(args, os.environ).engine
    if sys.stderr.isatty():
        print(f"loading {config.model} …", file=sys.stderr)
    return LLM.from_config(config)


def _list_models(args: argparse.Namespace) -> None:
    from paceline.models.builtin import list_builtin

    for status in list_builtin():
        model, state = status.builtin, "not cached" if status.path is None else "cached"
        print(
            f"{model.name}  {model.num_bytes / 1e6:.0f} MB  {model.licence}  {state}\n    {model.description}"
        )


def _pull_model(args: argparse.Namespace) -> None:
    from paceline.models.builtin import pull

    print(pull(args.name))


if __name__ == "__main__":
    sys.exit(main())
