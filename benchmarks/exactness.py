"""What each arithmetic of the CPU path costs in exactness, against float32 throughout.

    python benchmarks/exactness.py

Reads real prompts through the default model, compares the logits at every position, and writes
results/exactness.json with a table beside it. Nothing is timed: other work may run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from common import PromptCutter, Results, read_prompts
from paceline.config import DEFAULT_MODEL, available_cores
from paceline.kernels.parallel import Team
from paceline.models.batch import Attention, Batch
from paceline.models.checkpoint import Checkpoint, open_checkpoint
from paceline.models.decoder import Decoder
from paceline.models.hub import resolve_model
from paceline.models.program import PackedDecoder
from paceline.models.rope import rope_tables
from paceline.models.weights import Loss, Weights, load_weights
from paceline.tokenizer import load_tokenizer
from paceline.worker.attention.cpu import CpuAttention
from paceline.worker.attention.torch_paged import TorchAttention

NUM_PROMPTS, PROMPT_LEN, PAGE_SIZE = 8, 256, 16
REFERENCE = "float32 weights, float32 K/V"
CPU = torch.device("cpu")


class LogitsModel(Protocol):
    """Hidden states of a batch, and logits of hidden states."""

    def forward(self, batch: Batch) -> torch.Tensor: ...

    def logits(self, h: torch.Tensor) -> torch.Tensor: ...


class Eager:
    """A `Decoder` with its attention."""

    def __init__(self, decoder: Decoder, attention: Attention) -> None:
        self._decoder, self._attention = decoder, attention

    def forward(self, batch: Batch) -> torch.Tensor:
        return self._decoder.forward(batch, self._attention)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(h)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One way to compute, and how many tokens a step of it takes here."""

    name: str
    model: LogitsModel
    step_len: int


def logits(arithmetic: Arithmetic, prompt: list[int]) -> torch.Tensor:
    """fp32 [prompt, vocab], with the prompt computed in steps; K/V of an earlier prompt is overwritten."""
    rows = []
    for start in range(0, len(prompt), arithmetic.step_len):
        ids = torch.tensor(prompt[start : start + arithmetic.step_len])
        segments = np.array([[0, len(ids), start, 0]], np.int64)
        batch = Batch(ids, torch.arange(start, start + len(ids)), segments)
        hidden = arithmetic.model.forward(batch).clone()
        rows += [arithmetic.model.logits(h).clone() for h in hidden.split(16)]
    return torch.cat(rows)


def arithmetics(checkpoint: Checkpoint, team: Team) -> Iterator[tuple[Arithmetic, tuple[Loss, ...]]]:
    """The reference first; each with what its weights lost."""
    config = checkpoint.config
    tables = torch.arange(1, PROMPT_LEN // PAGE_SIZE + 1, dtype=torch.int32)[None]
    cos, sin = rope_tables(config, PROMPT_LEN)

    def load(dtype: torch.dtype, *, packed: bool) -> Weights:
        return load_weights(checkpoint, dtype=dtype, device="cpu", packed=packed)

    def shared(weights: Weights) -> tuple[object, ...]:
        norms = [(layer.q_norm, layer.k_norm) for layer in weights.layers]
        return (config, tables.shape[1] + 1, PAGE_SIZE, tables, (cos, sin), norms)

    exact = load(torch.float32, packed=False)
    reference = Eager(Decoder(config, exact), TorchAttention(*shared(exact), torch.float32))
    yield Arithmetic(REFERENCE, reference, PROMPT_LEN), exact.losses
    model = Eager(Decoder(config, exact), CpuAttention(*shared(exact), team))
    yield Arithmetic("float32 weights, bfloat16 K/V", model, PROMPT_LEN), exact.losses

    both = load(torch.bfloat16, packed=True)
    packed = PackedDecoder(config, both, CpuAttention(*shared(both), team), team, None)
    yield Arithmetic("packed weights (steps of few tokens)", packed, 16), ()
    dense = PackedDecoder(config, both, CpuAttention(*shared(both), team), team, 0)
    yield Arithmetic("bfloat16 copies (steps of many tokens)", dense, PROMPT_LEN), both.losses

    rounded = load(torch.bfloat16, packed=False)
    model = Eager(Decoder(config, rounded), CpuAttention(*shared(rounded), team))
    yield Arithmetic("--precision bf16", model, PROMPT_LEN), rounded.losses


@dataclass(slots=True)
class Errors:
    """Sums over positions, since logits of all of them at once would fill the memory."""

    square: float = 0.0
    largest: float = 0.0
    kl: float = 0.0
    num_same: int = 0
    num_positions: int = 0
    vocab_size: int = 0

    def add(self, found: torch.Tensor, exact: torch.Tensor) -> None:
        """Count in the logits [positions, vocab] of one prompt."""
        error = (found - exact).double()
        log_p, log_q = exact.double().log_softmax(-1), found.double().log_softmax(-1)
        self.square += float(error.square().sum())
        self.largest = max(self.largest, float(error.abs().max()))
        self.kl += float((log_p.exp() * (log_p - log_q)).sum())
        self.num_same += int((found.argmax(-1) == exact.argmax(-1)).sum())
        self.num_positions += len(exact)
        self.vocab_size = exact.shape[-1]

    def row(self, losses: tuple[Loss, ...]) -> dict[str, Any]:
        """As it is written down."""
        return {
            "rms_error": (self.square / self.num_positions / self.vocab_size) ** 0.5,
            "max_error": self.largest,
            "kl": self.kl / self.num_positions,
            "same_argmax": self.num_same / self.num_positions,
            "losses": [asdict(loss) for loss in losses],
        }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """For people."""
    lines = [
        f"Logits of {DEFAULT_MODEL} at {NUM_PROMPTS * PROMPT_LEN} positions of real prompts, against "
        f"{REFERENCE}. KL is that of the reference from the other, in nats a token.",
        "",
        "| arithmetic | rms error | largest error | KL | same argmax | weights rounded |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lost = "; ".join(
            f"{x['num_tensors']} {x['kind']} to {x['held_as']}, relative rms error {x['rms_error']:.1e}"
            for x in row["losses"]
        )
        lines.append(
            f"| {name} | {row['rms_error']:.1e} | {row['max_error']:.1e} | {row['kl']:.1e} "
            f"| {row['same_argmax']:.2%} | {lost or 'none'} |"
        )
    return "\n".join(lines) + "\n"


@torch.inference_mode()
def main() -> None:
    path = resolve_model(DEFAULT_MODEL)
    token_ids = load_tokenizer(path).encode("\n\n".join(read_prompts()))
    prompts = PromptCutter(token_ids).batch(NUM_PROMPTS, PROMPT_LEN)
    results = Results("exactness", ["torch", "numba"])
    rows: dict[str, dict[str, Any]] = {}
    team = Team(available_cores())
    with open_checkpoint(path) as checkpoint:
        ways = arithmetics(checkpoint, team)
        reference, _ = next(ways)
        exact = [logits(reference, prompt) for prompt in prompts]
        for way, losses in ways:
            errors = Errors()
            for prompt, expected in zip(prompts, exact, strict=True):
                errors.add(logits(way, prompt), expected)
            rows[way.name] = errors.row(losses)
            results.put(way.name, rows[way.name])
            print(table({way.name: rows[way.name]}).splitlines()[-1], flush=True)
    results.write(list(rows), [], table(rows))
    team.close()


if __name__ == "__main__":
    main()
