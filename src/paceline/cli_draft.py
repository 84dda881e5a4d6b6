"""`paceline draft export`: a draft head from one engine's format to another's."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli_flags import Parser
from paceline.errors import ConfigError

_FORMATS = ("sglang", "speculators")  # checked against the draft package by a test; that one imports torch
_HF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EXAMPLES = """\
examples:
  paceline draft export ./head ./head-vllm --format speculators --target Qwen/Qwen2.5-0.5B-Instruct
  paceline draft export owner/speculator ./head --format sglang --target ./model --layer-id-offset 0
"""


def add_draft_command(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `draft` and its actions to the command line."""
    draft = commands.add_parser("draft", help="convert draft heads between formats", epilog=EXAMPLES)
    draft.set_defaults(parser=draft)
    actions = draft.add_subparsers(metavar="ACTION", required=True)
    export = actions.add_parser(
        "export",
        help="write a head for SGLang, or for vLLM (speculators)",
        description="Write a head for SGLang, or for vLLM (speculators). Options that it lacks are refused.",
        epilog=EXAMPLES,
    )
    export.set_defaults(run=_export, parser=export)
    export.add_argument(
        "source", metavar="SRC", help="the head: a folder or a Hugging Face id, in either format"
    )
    export.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    export.add_argument("--format", choices=_FORMATS, required=True, help="the format to write")
    export.add_argument("--target", metavar="MODEL", required=True, help="the model that the head drafts for")
    export.add_argument(
        "--layer-id-offset",
        type=int,
        choices=(-1, 0),
        help="what to add to SRC's layer ids to mean 'after layer i', counted from 0; "
        "default: as its format counts (sglang 0, speculators -1), which converted heads may not",
    )
    export.add_argument(
        "--norm-output",
        action=argparse.BooleanOptionalAction,
        help="whether SRC was trained on its normed output; default: what its configuration says",
    )


def _export(args: argparse.Namespace) -> None:
    from paceline.draft.checkpoint import export_draft, open_draft, share_embedding
    from paceline.draft.fields import Overrides
    from paceline.draft.format_speculators import Verifier
    from paceline.models.checkpoint import open_checkpoint
    from paceline.models.hub import resolve_model

    if args.out.is_file():
        raise ConfigError(f"OUT must be a folder, {args.out} is a file")
    overrides = Overrides(layer_id_offset=args.layer_id_offset, norm_output=args.norm_output)
    with open_checkpoint(resolve_model(args.target)) as target:
        draft = open_draft(args.source, target.config, overrides=overrides)
        if args.format == "sglang" and draft.config.embedding == "own":
            draft = share_embedding(draft, target.tensors["embed_tokens.weight"].dequantize())
        verifier = Verifier(args.target, (_HF_ARCHITECTURES[target.config.architecture],))
    export_draft(draft, args.out, args.format, verifier=verifier)
    layers = ", ".join(map(str, draft.config.capture_layer_ids))
    print(
        f"{args.out}: {args.format} format, features after layers {layers} (from 0), "
        f"{draft.config.draft_vocab_size} draft tokens"
    )
