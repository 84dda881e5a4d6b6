"""What sampling must know of each row, in tensors indexed by row, on the device that samples.

A row is written when a request takes it and is not read back: whether *any* live row needs a
processor is mirrored on the host, whether *this* row does is read by the kernels on the device.

Knows how parameters and counts are laid out; does not know what the processors do with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.request import SamplingParams
from paceline.worker.noise import seed_words

if TYPE_CHECKING:
    from paceline.worker.sampling_team import SamplingTeam

# Columns of `SamplerState.floats`. An inverse temperature of 0 means greedy.
INV_TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6)
# Columns of `SamplerState.ints`; the two words of the seed are neighbours.
SEED_LOW, SEED_HIGH, CHOICE, TOP_K, NUM_BIASES, HAS_PENALTIES = range(6)
NUM_FLOATS, NUM_INTS = 6, 6

_GREEDY_FLOATS = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
_GREEDY_INTS = (0, 0, 0, 0, 0, 0)

# (logit - max) is scaled in fp32: beyond this the product of a zero gap would be 0 * inf. A gap of
# one fp32 ulp at 1e-7 is already worth 1e23 then, so temperature 1e-40 is as greedy as 1e-30.
_MAX_INV_TEMPERATURE = 1e30
_TINY = 2.0**-126  # the least normal fp32: a factor above 0 must not become 0 on its way to the row
_ALWAYS = 2**62


class StateArrays(NamedTuple):
    """numpy views of a CPU state's tensors, in the order the kernels take them."""

    floats: NDArray[np.float32]
    ints: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    bias_until: NDArray[np.int64]
    counts: NDArray[np.int32]
    prompt_mask: NDArray[np.bool_]


class SamplerState:
    """Sampling parameters and token counts of `num_rows` rows. R rows, V token ids, B biases.

    Attributes:
        floats: fp32 [R, 6], ints: int64 [R, 6]; columns are named by this module's constants.
        bias_ids, bias_values, bias_until: [R, B]; entry j of a row adds `bias_values` to the logit
            of `bias_ids` at positions below `bias_until`. `logit_bias` holds at every position;
            `min_tokens` is a bias of -inf on the stop tokens until position prompt + min_tokens.
            Unused entries add 0 to token 0.
        counts: int32 [R, V], generated tokens; prompt_mask: bool [R, V]. Both are empty until a row
            has penalties; only the rows that do are kept up to date.
        team: threads that sample together; None: the calling thread samples, or the device.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
        team: SamplingTeam | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.team = team
        self._eos_token_ids = frozenset(eos_token_ids)
        self._biased: set[int] = set()
        self._penalized: set[int] = set()
        self._truncated: set[int] = set()
        self.floats = torch.tensor(_GREEDY_FLOATS, device=device).repeat(num_rows, 1)
        self.ints = torch.zeros(num_rows, len(_GREEDY_INTS), dtype=torch.int64, device=device)
        self.bias_ids = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(num_rows, 0, device=device)
        self.bias_until = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.prompt_mask = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._arrays: StateArrays | None = None

    @property
    def any_biased(self) -> bool:
        """Whether a live row has biases (`logit_bias`, `min_tokens`)."""
        return bool(self._biased)

    @property
    def any_penalized(self) -> bool:
        """Whether a live row has penalties, and so needs `accept`."""
        return bool(self._penalized)

    @property
    def any_truncated(self) -> bool:
        """Whether a live row has `top_k`, `top_p` or `min_p`."""
        return bool(self._truncated)

    def changes_logits(self, row: int) -> bool:
        """Whether the row has biases or penalties."""
        return row in self._biased or row in self._penalized

    def start(
        self, row: int, params: SamplingParams, choice: int, token_ids: Sequence[int], prompt_len: int
    ) -> None:
        """A request takes a row.

        `token_ids` are its known tokens, `prompt_len` of them the prompt's and the rest generated
        before a preemption. `params` has a seed and has passed `check_token_ids`.
        """
        assert params.seed is not None, "the front draws a seed for a request without one"
        self.end(row)
        temperature = params.temperature
        has_penalties = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
        biases = self._biases(params, prompt_len)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        floats = (
            min(1.0 / temperature, _MAX_INV_TEMPERATURE) if temperature > 0.0 else 0.0,
            max(params.top_p, _TINY),
            params.min_p,
            max(params.repetition_penalty, _TINY),
            params.frequency_penalty,
            params.presence_penalty,
        )
        self._write(row, floats, (*seed_words(params.seed), choice, top_k, len(biases), int(has_penalties)))
        if temperature > 0.0 and (top_k or params.top_p < 1.0 or params.min_p > 0.0):
            self._truncated.add(row)
        if biases:
            self._biased.add(row)
            self._write_biases(row, biases)
        if has_penalties:
            self._penalized.add(row)
            self._write_counts(row, token_ids, prompt_len)

    def end(self, row: int) -> None:
        """A row is given back: it is greedy and unprocessed until it starts again."""
        for live in (self._biased, self._penalized, self._truncated):
            live.discard(row)
        self._write(row, _GREEDY_FLOATS, _GREEDY_INTS)
        self.bias_ids[row] = 0
        self.bias_values[row] = 0.0

    def lift_min_tokens(self, row: int) -> None:
        """Let the row's stop tokens be sampled from now on: its grammar allows nothing else."""
        self.bias_until[row].masked_fill_(self.bias_values[row] == -torch.inf, 0)

    def accept(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count settled tokens: pairs (row, token id), int64 [N] each, a row as often as it likes."""
        if self._penalized:
            wanted = self.ints[rows, HAS_PENALTIES].to(torch.int32)
            self.counts.index_put_((rows, token_ids), wanted, accumulate=True)

    def arrays(self) -> StateArrays:
        """numpy views of the tensors of a CPU state, sharing their memory."""
        if self._arrays is None:
            self._arrays = StateArrays(*(getattr(self, name).numpy() for name in StateArrays._fields))
        return self._arrays

    def _biases(self, params: SamplingParams, prompt_len: int) -> list[tuple[int, float, int]]:
        biases = [(token_id, value, _ALWAYS) for token_id, value in (params.logit_bias or {}).items()]
        if params.min_tokens:
            stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos_token_ids)
            until = prompt_len + params.min_tokens
            biases += [(token_id, -torch.inf, until) for token_id in sorted(stops)]
        return biases

    def _write(self, row: int, floats: Sequence[float], ints: Sequence[int]) -> None:
        self.floats[row] = torch.tensor(floats)
        self.ints[row] = torch.tensor(ints)

    def _write_biases(self, row: int, biases: list[tuple[int, float, int]]) -> None:
        width = self.bias_ids.shape[1]
        if len(biases) > width:
            grow = (0, max(len(biases), 2 * width) - width)
            self.bias_ids = torch.nn.functional.pad(self.bias_ids, grow)
            self.bias_values = torch.nn.functional.pad(self.bias_values, grow)
            self.bias_until = torch.nn.functional.pad(self.bias_until, grow)
            self._arrays = None
        token_ids, values, until = zip(*biases, strict=True)
        self.bias_ids[row, : len(biases)] = torch.tensor(token_ids)
        self.bias_values[row, : len(biases)] = torch.tensor(values)
        self.bias_until[row, : len(biases)] = torch.tensor(until)

    def _write_counts(self, row: int, token_ids: Sequence[int], prompt_len: int) -> None:
        if not len(self.counts):
            # Zeroed memory of this size comes untouched from the system: a row costs when it is used.
            shape = (self.num_rows, self.vocab_size)
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self._arrays = None
        known = torch.tensor(token_ids, dtype=torch.int64)
        generated = torch.bincount(known[prompt_len:], minlength=self.vocab_size)
        self.counts[row] = generated.to(torch.int32)
        self.prompt_mask[row] = False
        self.prompt_mask[row, known[:prompt_len].to(self.device)] = True
