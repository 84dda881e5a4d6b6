"""Drafters made for tests: those that know the answers and what they make of that, and some that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from paceline.draft.protocol import NO_DRAFT, Choose, Drafter, Round, Settled

KEY = 2  # the first tokens of a prompt tell it from the others
Spoil = Callable[[list[int], int], list[int]]  # right drafts and the number of known tokens to drafts


class Stateless:
    """What has nothing to settle."""

    capture = ()

    def settle(self, settled: Settled) -> None:
        """See `Drafter`."""

    def wait(self) -> None:
        """See `Drafter`."""


class Knowing(Stateless):
    """Knows how texts go on, and proposes what `spoil` makes of it.

    Args:
        histories: int64 [rows, max_len + 1], the worker's.
        texts: prompts with their answers.
    """

    def __init__(self, histories: torch.Tensor, texts: Iterable[Sequence[int]], spoil: Spoil) -> None:
        self._histories, self._spoil = histories, spoil
        self._texts: dict[tuple[int, ...], list[list[int]]] = {}
        for text in texts:
            self._texts.setdefault(tuple(text[:KEY]), []).append(list(text))

    def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
        """See `Drafter`."""
        depth = drafting.depths[0]
        drafts = torch.full((len(drafting.depths), depth), NO_DRAFT)
        for i, (row, length) in enumerate(
            zip(drafting.rows.tolist(), drafting.lengths.tolist(), strict=True)
        ):
            known = self._histories[row, : length + 1].tolist()
            follows = self._following(known)[:depth]
            drafts[i] = torch.tensor(self._spoil(follows + [0] * (depth - len(follows)), len(known)))
        return drafts

    def _following(self, known: list[int]) -> list[int]:
        for text in self._texts.get(tuple(known[:KEY]), ()):
            if text[: len(known)] == known:
                return text[len(known) :]
        return []


def right(drafts: list[int], num_known: int) -> list[int]:
    """As they are."""
    return drafts


def wrong_from(place: int) -> Spoil:
    """Right before `place`, and nowhere behind it."""
    return lambda drafts, num_known: drafts[:place] + [_other(token) for token in drafts[place:]]


def wrong_at(place: int) -> Spoil:
    """Right everywhere else: who looks only at what follows is tempted."""
    return lambda drafts, num_known: [_other(t) if j == place else t for j, t in enumerate(drafts)]


def none_at(place: int) -> Spoil:
    """Nothing there, and behind it what would have been right."""
    return lambda drafts, num_known: [NO_DRAFT if j == place else t for j, t in enumerate(drafts)]


def by_turns(*spoils: Spoil) -> Spoil:
    """Another of these for every length and word."""
    return lambda drafts, num_known: spoils[(num_known + drafts[0]) % len(spoils)](drafts, num_known)


ADVERSARIAL = by_turns(
    right, wrong_at(0), none_at(1), wrong_from(1), wrong_at(2), none_at(0), wrong_at(3), right
)


def _other(token: int) -> int:
    return token - 1 if token else 1


class Random(Stateless):
    """Any token, and now and then none."""

    def __init__(self, vocab_size: int) -> None:
        self._generator, self._vocab_size = torch.Generator().manual_seed(1), vocab_size

    def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
        """See `Drafter`."""
        shape = (len(drafting.depths), drafting.depths[0])
        drafts = torch.randint(self._vocab_size, shape, generator=self._generator)
        return drafts.masked_fill(torch.rand(shape, generator=self._generator) < 0.1, NO_DRAFT)


class Coupled(Stateless):
    """The same logits wherever it is asked, fp32 [C] of the tokens int64 [C], drawn from with the noise."""

    def __init__(self, logits: torch.Tensor, vocabulary: torch.Tensor | None = None) -> None:
        self._logits, self._vocabulary = logits, vocabulary

    def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
        """See `Drafter`."""
        depth = drafting.depths[0]
        drafts = torch.full((len(drafting.depths), depth), NO_DRAFT)
        for step in range(depth):
            count = drafting.num_at(step)
            drafts[:count, step] = choose(step, self._logits.repeat(count, 1), self._vocabulary)
        return drafts.masked_fill((drafts == NO_DRAFT).cumsum(1) > 0, NO_DRAFT)


class Failing:
    """Another drafter, until it has been called so many times.

    Args:
        method: the one that fails then: propose, settle or wait.
    """

    def __init__(self, inner: Drafter, method: str, num_calls: int, message: str) -> None:
        self._inner, self._method, self._left, self._message = inner, method, num_calls, message
        self.num_calls_after = 0
        self.capture = inner.capture

    def settle(self, settled: Settled) -> None:
        """See `Drafter`."""
        self._count("settle")
        self._inner.settle(settled)

    def wait(self) -> None:
        """See `Drafter`."""
        self._count("wait")
        self._inner.wait()

    def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
        """See `Drafter`."""
        self._count("propose")
        return self._inner.propose(drafting, choose)

    def _count(self, method: str) -> None:
        if self._left < 0:
            self.num_calls_after += 1
        if method == self._method:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError(self._message)
