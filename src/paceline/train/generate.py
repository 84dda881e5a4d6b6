"""The target makes conversations: many rows in lockstep, every row at the same position.

One step feeds position t of every row and decides position t + 1: the script's next forced token, or one
that the target samples. All of it is tensor arithmetic on the device, so that a step is one CUDA graph and
the host only counts. Plain decoding, with K/V of fixed size; the serving engine is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.layers import rms_norm, rotate
from paceline.models.rope import rope_tables
from paceline.models.weights import Weights
from paceline.train.scripts import Script, Turn
from paceline.worker.noise import gumbel, seed_words

_END = -1  # of a script; a turn to generate is -1 - turn
_ASK_TEMPERATURE = 0.9  # a greedy target would ask the same question in every row
_LENGTH_STEP = 128  # graphs are captured for K/V of whole multiples of this


@dataclass(frozen=True, slots=True)
class Conversations:
    """Rows of tokens that the target made.

    Attributes:
        token_ids: int32 [N, T]; 0 behind a row's end.
        turns: int8 [N, T]: what made the token (0: forced, or behind the end; else a `Turn`).
        lengths: int32 [N].
        kinds: the kind of each row's script.
    """

    token_ids: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    turns: np.ndarray[tuple[int, int], np.dtype[np.int8]]
    lengths: np.ndarray[tuple[int], np.dtype[np.int32]]
    kinds: tuple[str, ...]

    @property
    def num_answer_tokens(self) -> int:
        """Tokens a head can learn from."""
        return int((self.turns == Turn.ANSWER).sum())


def join(parts: Sequence[Conversations]) -> Conversations:
    """Rows of all parts, padded to the longest."""
    width = max(p.token_ids.shape[1] for p in parts)

    def padded(rows: np.ndarray) -> np.ndarray:
        return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))

    return Conversations(
        np.concatenate([padded(p.token_ids) for p in parts]),
        np.concatenate([padded(p.turns) for p in parts]),
        np.concatenate([p.lengths for p in parts]),
        tuple(kind for p in parts for kind in p.kinds),
    )


class _LockstepAttention:
    """K/V of [layers, rows, kv_heads, length, D] at one position for all rows."""

    def __init__(
        self, config: ModelConfig, num_rows: int, length: int, device: str, dtype: torch.dtype
    ) -> None:
        self._config = config
        shape = (config.num_layers, num_rows, config.num_kv_heads, length, config.head_dim)
        self._k = torch.zeros(shape, device=device, dtype=dtype)
        self._v = torch.zeros_like(self._k)
        self._norms: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self._cos, self._sin = (table.to(device) for table in rope_tables(config, length))
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.window = length  # positions that this step may look at

    def use_norms(self, weights: Weights) -> None:
        self._norms = [(layer.q_norm, layer.k_norm) for layer in weights.layers]

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        c, (q_norm, k_norm) = self._config, self._norms[layer]
        heads = qkv.view(len(qkv), -1, c.head_dim)
        q, k, v = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = (rms_norm(x.float(), w, c.rms_norm_eps) for x, w in ((q, q_norm), (k, k_norm)))
        cos, sin = self._cos[self.position], self._sin[self.position]
        keys, values = self._k[layer], self._v[layer]
        keys.index_copy_(2, self.position, rotate(k, cos, sin).to(keys.dtype)[:, :, None])
        values.index_copy_(2, self.position, v.to(values.dtype)[:, :, None])
        # The query heads of a K/V head stand in for queries, so that K/V is read once.
        grouped = rotate(q, cos, sin).to(keys.dtype).view(len(q), c.num_kv_heads, -1, c.head_dim)
        visible = torch.arange(self.window, device=qkv.device) <= self.position
        mixed = torch.nn.functional.scaled_dot_product_attention(
            grouped, keys[:, :, : self.window], values[:, :, : self.window],
            attn_mask=visible.expand(1, 1, grouped.shape[2], -1),
        )  # fmt: skip
        return mixed.reshape(len(q), -1).to(qkv.dtype)


class Lockstep:
    """Generates for `num_rows` scripts at a time, up to `length` tokens each.

    Buffers and graphs are made once and reused for every batch. With `coupled` the noise is serving's own,
    keyed by (seed + row, choice 0, position, token id), so that a drafter can draw with the same.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        end_ids: Sequence[int],
        num_rows: int,
        length: int,
        device: str,
        coupled: bool = False,
    ) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.num_rows, self.length, self._device = num_rows, length, device
        self._decoder, self._config = Decoder(config, weights), config
        self._attention = _LockstepAttention(config, num_rows, length, device, dtype)
        self._attention.use_norms(weights)
        self._end_ids = torch.tensor(list(end_ids), device=device)
        ints = {"dtype": torch.int64, "device": device}
        self._script = torch.zeros(num_rows, 1, **ints)  # type: ignore[call-overload]
        self._cursor = torch.zeros(num_rows, **ints)  # type: ignore[call-overload]
        self._token_ids = torch.zeros(num_rows, length + 1, **ints)  # type: ignore[call-overload]
        self._turns = torch.zeros(num_rows, length + 1, dtype=torch.int8, device=device)
        self._temperature = torch.ones(num_rows, 1, device=device)
        self._spent = torch.zeros(num_rows, **ints)  # type: ignore[call-overload]
        self._max_turn = torch.zeros(1, **ints)  # type: ignore[call-overload]
        self._seeds = torch.zeros(num_rows, 2, **ints) if coupled else None  # type: ignore[call-overload]
        self._all_ids = torch.arange(config.vocab_size, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def run(
        self,
        scripts: Sequence[Script],
        temperatures: Sequence[float],
        seed: int,
        max_turn_tokens: int,
        on_step: Callable[[], None] = lambda: None,
    ) -> Conversations:
        """Make the conversations of up to `num_rows` scripts.

        Args:
            temperatures: of each script's answers, 0 for greedy. Questions have `_ASK_TEMPERATURE`.
            max_turn_tokens: a turn that gets this long is ended for it, by a token nobody learns from.
        """
        self._load(scripts, temperatures)
        self._max_turn.fill_(max_turn_tokens)
        torch.manual_seed(seed)
        if self._seeds is not None:
            self._seeds.copy_(torch.tensor([seed_words(seed + row) for row in range(self.num_rows)]))
        for position in range(self.length - 1):
            window = min(self.length, -(-(position + 1) // _LENGTH_STEP) * _LENGTH_STEP)
            self._replay(window)
            self._attention.position += 1
            on_step()
            if position % 64 == 63 and not bool(self._running().any()):
                break
        return self._collect(scripts)

    def _load(self, scripts: Sequence[Script], temperatures: Sequence[float]) -> None:
        rows = [_flatten(s, self.length) for s in scripts] + [[_END]] * (self.num_rows - len(scripts))
        width = max(map(len, rows)) + 1
        table = np.full((self.num_rows, width), _END, np.int64)
        for i, row in enumerate(rows):
            table[i, : len(row)] = row
        if self._script.shape[1] < width:  # graphs hold the buffer's address, so it only ever grows
            self._script = torch.full((self.num_rows, self.length + 64), _END, device=self._device)
            self._graphs.clear()
        self._script.fill_(_END)
        self._script[:, :width] = torch.from_numpy(table).to(self._device)
        heat = [*temperatures, *[1.0] * (self.num_rows - len(scripts))]
        self._temperature.copy_(torch.tensor(heat, device=self._device)[:, None])
        self._token_ids.zero_()
        self._turns.zero_()
        self._token_ids[:, 0] = self._script[:, 0].clamp(min=0)
        self._cursor.fill_(1)
        self._spent.zero_()
        self._attention.position.zero_()

    def _running(self) -> torch.Tensor:
        """Rows whose script is not at its end: bool [rows]."""
        running: torch.Tensor = self._script.gather(1, self._cursor[:, None])[:, 0] != _END
        return running

    def _replay(self, window: int) -> None:
        self._attention.window = window
        if self._device != "cuda":
            self._step()
            return
        if window not in self._graphs:
            state = (self._cursor, self._token_ids, self._turns, self._spent)
            saved = [t.clone() for t in state]
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()  # warm-up outside the graph
            torch.cuda.current_stream().wait_stream(stream)
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self._graphs[window] = graph
        self._graphs[window].replay()

    def _step(self) -> None:
        """Feed the current position, decide the next token of every row."""
        position = self._attention.position
        fed = self._token_ids.index_select(1, position)[:, 0]
        h = self._decoder.layers(self._decoder.embed(fed), self._attention)
        planned = self._script.gather(1, self._cursor[:, None])[:, 0]
        sampled = self._sample(self._decoder.logits(h), planned == _END - Turn.ASK)
        forced, over = planned >= 0, planned == _END
        free = ~forced & ~over
        cut = free & (self._spent >= self._max_turn)
        made = torch.where(cut, self._end_ids[0], sampled)
        token = torch.where(forced, planned, torch.where(over, torch.zeros_like(made), made))
        turn = torch.where(free & ~cut, _END - planned, torch.zeros_like(planned))
        ended = cut | (free & torch.isin(sampled, self._end_ids))
        self._cursor += (forced | ended).long()
        self._spent.copy_(torch.where(free & ~ended, self._spent + 1, torch.zeros_like(self._spent)))
        self._token_ids.index_copy_(1, position + 1, token[:, None])
        self._turns.index_copy_(1, position + 1, turn[:, None].to(torch.int8))

    def _sample(self, logits: torch.Tensor, asks: torch.Tensor) -> torch.Tensor:
        heat = torch.where(
            asks[:, None], torch.full_like(self._temperature, _ASK_TEMPERATURE), self._temperature
        )
        hot = heat > 0
        scores = logits / torch.where(hot, heat, torch.ones_like(heat)) + self._noise(logits) * hot
        return scores.argmax(dim=-1)

    def _noise(self, logits: torch.Tensor) -> torch.Tensor:
        """Gumbel noise of the position that is being decided."""
        if self._seeds is None:
            return -torch.empty_like(logits).exponential_().log_()
        positions = (self._attention.position + 1).expand(len(logits))
        return gumbel(positions, torch.zeros_like(positions), self._seeds, self._all_ids).float()

    def _collect(self, scripts: Sequence[Script]) -> Conversations:
        count = len(scripts)
        turns = self._turns[:count, : self.length]
        token_ids = self._token_ids[:count, : self.length]
        alive = (token_ids != 0) | (turns != 0)
        places = torch.arange(1, self.length + 1, device=self._device)
        lengths = (alive * places).amax(dim=1)
        return Conversations(
            token_ids.to(torch.int32).cpu().numpy(),
            turns.cpu().numpy(),
            lengths.to(torch.int32).cpu().numpy(),
            tuple(s.kind for s in scripts),
        )


def _flatten(script: Script, length: int) -> list[int]:
    """A script as one row of numbers: tokens, and -1 - turn where the target speaks; cut to `length`."""
    row: list[int] = []
    for segment in script.segments:
        row += [*segment.token_ids, _END - segment.turn]
    return [*row[: length - 1], _END]
