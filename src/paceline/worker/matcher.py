"""Grammars compiled, and where one answer stands in its own: which tokens may follow.

A grammar is compiled once, in the background, by `GrammarCompiler`; who needs a `Matcher` gets a cheap
copy. Knows nothing of rows, requests, schemas or HTTP.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.grammar import first_line, limits, spelled
from paceline.request import Grammar
from paceline.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.bool_]

NO_TOKEN = "no token of the model's vocabulary continues the grammar"
_MAX_COMPILED = 256  # the most recently used are kept
_NUM_THREADS = 2  # so that one slow grammar does not keep the next one waiting


class GrammarFailure(Exception):
    """A grammar cannot go on; the message is one line. Ends its row, never the step."""


class LimitReached(GrammarFailure):
    """A limit was hit, perhaps by another matcher: see `Matcher`."""


class Matcher:
    """Where one answer stands in its grammar.

    Forks share what the lexer has built, whoever built it. When one of them hits a limit there, all have:
    each fails at its next token or mask.
    """

    def __init__(self, inner: LLMatcher, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size

    def fork(self) -> Matcher:
        """An independent copy, about as cheap as a token: drafting goes on from it."""
        return Matcher(self._inner.deep_copy(), self._vocab_size)

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
            GrammarFailure: a limit was hit, or no token of the vocabulary continues.
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
        return num_taken

    def take(self, token_id: int) -> None:
        """Go on by a token that `allowed` allows.

        Raises:
            GrammarFailure: a limit was hit.
        """
        if not self.advance((token_id,)):
            raise LimitReached("the grammar refuses a token that it had allowed")

    def _check(self) -> None:
        if self._inner.is_error():
            reason = first_line(self._inner.get_error())
            if reason == "NoExtensionBias":
                raise GrammarFailure(NO_TOKEN)
            raise LimitReached(f"the grammar failed: {reason}")


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

    def forget(self, grammar: Grammar) -> None:
        """Compile it anew for whoever asks next: what had been compiled is spoilt."""
        self._compiled.pop(grammar, None)

    def alone(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of the grammar that shares nothing; compiles while the caller waits.

        Raises:
            GrammarFailure: it does not compile.
        """
        return self._compile(grammar)

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
