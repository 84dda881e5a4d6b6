"""Which tokens a row's grammar allows next, and where it ends.

A grammar is compiled once, in the background, by `GrammarCompiler`; a row holds a `Matcher`, a cheap
copy that it moves on by the tokens it settles. `GrammarRows` keeps the matchers of all rows and turns
them into masks for the sampler.

The rules where a grammar meets other parameters:
- EOS is allowed exactly where the grammar may end; `stop_token_ids` are too, beside the places where
  the grammar takes their text;
- where nothing can follow, the answer is complete: it ends there, with `ignore_eos` too, and before
  `min_tokens`. Where only tokens that `min_tokens` forbids could follow, `min_tokens` is lifted;
- a grammar that fails, by its limits or because no token of the vocabulary continues it, ends its own
  row with an error and nothing else.

Knows nothing of requests, schemas or HTTP.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.grammar import first_line, limits, spelled
from paceline.request import Grammar
from paceline.step import GrammarEnd, RowStart
from paceline.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.bool_]

_NO_TOKEN = "no token of the model's vocabulary continues the grammar"
_MAX_COMPILED = 256  # the most recently used are kept
_NUM_THREADS = 2  # so that one slow grammar does not keep the next one waiting


class GrammarFailure(Exception):
    """A grammar cannot go on; the message is one line. Ends its row, never the step."""


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, inner: LLMatcher, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._num_tokens = 0

    def fork(self) -> Matcher:
        """An independent copy: drafting goes on from it while the row's own stays where it is."""
        copy = Matcher(self._inner.deep_copy(), self._vocab_size)
        copy._num_tokens = self._num_tokens
        return copy

    @property
    def may_end(self) -> bool:
        """Whether the answer so far is complete, though more may follow."""
        return self._inner.is_accepting()

    @property
    def must_end(self) -> bool:
        """Whether the answer so far is complete and nothing can follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    def allowed(self) -> Mask:
        """Which tokens may follow: bool [V]. Of what ends an answer this says nothing: see `may_end`.

        Raises:
            GrammarFailure: a limit was hit.
        """
        packed = self._inner.compute_bitmask()
        self._check()
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def advance(self, token_ids: Sequence[int]) -> int:
        """Go on by as many of the tokens as the grammar takes; returns how many those are.

        Raises:
            GrammarFailure: a limit was hit.
        """
        num_taken: int = self._inner.try_consume_tokens(list(token_ids))
        self._check()
        self._num_tokens += num_taken
        return num_taken

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens`: drafts that were not accepted."""
        assert 0 <= num_tokens <= self._num_tokens, f"{num_tokens} of {self._num_tokens} tokens to take back"
        if num_tokens:
            self._inner.rollback(num_tokens)
            self._num_tokens -= num_tokens

    def _check(self) -> None:
        if self._inner.is_error():
            reason = first_line(self._inner.get_error())
            raise GrammarFailure(
                _NO_TOKEN if reason == "NoExtensionBias" else f"the grammar failed: {reason}"
            )


class _Vocabulary:
    """What llguidance asks of a tokenizer. Ids of the model that the tokenizer lacks spell nothing."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted({*tokenizer.special_token_ids, *eos_token_ids})

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class GrammarCompiler:
    """Compiles grammars in threads of its own, and keeps the most recent.

    Args:
        load_tokenizer: called once, in one of those threads, for the first grammar: most engines
            never see one.
    """

    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._compiled: OrderedDict[Grammar, Future[Matcher]] = OrderedDict()

    def prepare(self, grammar: Grammar) -> Future[Matcher]:
        """Compile in the background; one that was compiled before is there at once."""
        known = self._compiled.get(grammar)
        if known is not None:
            self._compiled.move_to_end(grammar)
            return known
        future = self._threads.submit(self._compile, grammar)
        self._compiled[grammar] = future
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return future

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of the grammar; waits, where `prepare` was not waited for.

        Raises:
            GrammarFailure: it does not compile.
        """
        return self.prepare(grammar).result().fork()

    def _compile(self, grammar: Grammar) -> Matcher:
        from llguidance import LLMatcher

        try:
            source = spelled(grammar)
        except ValueError as error:
            raise GrammarFailure(f"grammar cannot be used: {first_line(str(error))}") from None
        inner = LLMatcher(self._vocabulary(), source, log_level=0, limits=limits())
        matcher = Matcher(inner, self._vocab_size)
        matcher.allowed()  # the first mask is the dearest, and copies of the matcher share what it built
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._loading:
            if self._tokenizer is None:
                vocabulary = _Vocabulary(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(vocabulary),
                    n_vocab=self._vocab_size,
                    eos_token=list(self._eos_token_ids) or None,
                )
            return self._tokenizer


@dataclass(slots=True)
class _Row:
    matcher: Matcher
    ends: NDArray[np.int64]  # what ends the answer: EOS, unless ignored, and the request's stop tokens
    ignored: NDArray[np.int64]  # EOS, if ignored
    num_to_come: int  # tokens until `min_tokens`


class GrammarRows:
    """The grammars of the rows that have one."""

    def __init__(self, compiler: GrammarCompiler, eos_token_ids: Sequence[int]) -> None:
        self._compiler = compiler
        self._eos = np.array(eos_token_ids, np.int64)
        self._rows: dict[int, _Row] = {}
        self._failed: dict[int, str] = {}  # rows whose grammar failed, with the reason

    def __contains__(self, row: int) -> bool:
        return row in self._rows or row in self._failed

    def prepare(self, grammar: Grammar) -> Future[Matcher]:
        """Compile in the background what a row will start with."""
        return self._compiler.prepare(grammar)

    def start(self, start: RowStart) -> None:
        """A request takes a row; after a preemption its grammar is where its tokens left it."""
        self.end(start.row)
        params = start.params
        if params.grammar is None:
            return
        generated = start.token_ids[start.prompt_len :]
        stop_ids = np.array(params.stop_token_ids, np.int64)
        try:
            matcher = self._compiler.matcher(params.grammar)
            if matcher.advance(generated) < len(generated):
                raise GrammarFailure("the grammar refuses a token that it had allowed")
        except GrammarFailure as failure:
            self._failed[start.row] = str(failure)
            return
        self._rows[start.row] = _Row(
            matcher,
            ends=stop_ids if params.ignore_eos else np.concatenate((self._eos, stop_ids)),
            ignored=self._eos if params.ignore_eos else self._eos[:0],
            num_to_come=params.min_tokens - len(generated),
        )

    def end(self, row: int) -> None:
        """A row is given back, however its request ended."""
        self._rows.pop(row, None)
        self._failed.pop(row, None)

    def allowed(self, row: int) -> tuple[Mask, bool]:
        """The tokens that may come next, bool [V], at least one; and whether `min_tokens` must give way.

        Raises:
            GrammarFailure: the grammar cannot go on.
            GrammarComplete: the answer ends here.
        """
        if row in self._failed:
            raise GrammarFailure(self._failed[row])
        state = self._rows[row]
        if state.matcher.must_end:
            raise GrammarComplete
        mask = state.matcher.allowed()
        mask[state.ends] = mask[state.ends] | state.matcher.may_end
        mask[state.ignored] = False
        if not mask.any():
            if state.matcher.may_end:
                raise GrammarComplete
            raise GrammarFailure(_NO_TOKEN)
        return mask, state.num_to_come > 0 and not np.delete(mask, state.ends).any()

    def settle(self, row: int, token_id: int) -> GrammarEnd | None:
        """Go on by the token that was chosen. A stop token, whatever the grammar, moves nothing."""
        state = self._rows[row]
        state.num_to_come -= 1
        if token_id in state.ends:
            return None  # the scheduler ends the request there
        try:
            if not state.matcher.advance((token_id,)):
                raise GrammarFailure("the grammar refuses a token that it had allowed")
        except GrammarFailure as failure:
            self._failed[row] = str(failure)
            return GrammarEnd(1, str(failure))
        return GrammarEnd(1) if state.matcher.must_end else None


class GrammarComplete(Exception):
    """Nothing can follow, and nothing needs to."""


def masked(logits: torch.Tensor, masks: dict[int, Mask]) -> torch.Tensor:
    """A copy of `logits` fp32 [P, V] with -inf where the mask of a position, bool [V], forbids a token."""
    places = torch.tensor(list(masks), device=logits.device)
    forbidden = torch.from_numpy(~np.stack(list(masks.values()))).to(logits.device)
    result = logits.clone()
    result[places] = logits[places].masked_fill(forbidden, -torch.inf)
    return result
