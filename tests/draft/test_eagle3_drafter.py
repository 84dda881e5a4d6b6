"""The EAGLE-3 drafter: chains of steps, rows of different depth, and being warm after any plain steps."""

from __future__ import annotations

import pytest
import torch
from draft_cases import PlainCache, config, head_of, random_draft
from paged_rows import PAGE_SIZE, Piece, Texts, paged_head, shuffled_tables

from paceline.draft.checkpoint import Draft
from paceline.draft.eagle3_drafter import Eagle3Drafter
from paceline.draft.protocol import NO_DRAFT, Round
from paceline.draft.torch_head import TorchHead

PLAIN = config(fc_norm=True, norm_output=True, qk_norm=True)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Greedy:
    """A `Choose` that takes the likeliest token and remembers what it saw; `stop` proposes nothing."""

    def __init__(self, stop: frozenset[tuple[int, int]] = frozenset()) -> None:
        self.logits: list[torch.Tensor] = []
        self._stop = stop  # of (step, place)

    def __call__(self, step: int, logits: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
        assert step == len(self.logits)
        assert vocabulary is not None
        self.logits.append(logits.clone())
        drafts = vocabulary[logits.argmax(-1)]
        for stopped_step, place in self._stop:
            if stopped_step == step:
                drafts[place] = NO_DRAFT
        return drafts


def drafter_of(draft: Draft, tables: torch.Tensor | None = None) -> tuple[Eagle3Drafter, TorchHead]:
    head = paged_head(draft, shuffled_tables() if tables is None else tables)
    return Eagle3Drafter(head), head


def round_of(texts: Texts, lengths: dict[int, int], depths: tuple[int, ...]) -> Round:
    """Rows, in this order, with n tokens each that have been through the target."""
    rows, n = torch.tensor(list(lengths)), torch.tensor(list(lengths.values()))
    return Round(rows, texts.token_ids[rows, n], n, depths, max(lengths.values()))


def settle_prompts(drafter: Eagle3Drafter, texts: Texts, lengths: dict[int, int]) -> None:
    drafter.settle(texts.settled([Piece(row, 0, n) for row, n in lengths.items()]))


def test_drafts_are_the_heads_own_chain() -> None:
    """Against a loop over one row at a time and a cache without pages."""
    draft, texts = random_draft(PLAIN), Texts(PLAIN)
    drafter, head = drafter_of(draft)
    settle_prompts(drafter, texts, {0: 9, 2: 4})
    drafts = drafter.propose(round_of(texts, {2: 4, 0: 9}, (4, 4)), Greedy())

    plain = head_of(draft)
    for place, (row, n) in enumerate({2: 4, 0: 9}.items()):
        known = torch.arange(n)
        features = plain.fuse(texts.features[row, :n])
        k, v = plain.settle(texts.token_ids[row, 1 : n + 1], features, known)
        cache = PlainCache(PLAIN, 1, n + 4)
        cache.write(known, k[None], v[None])
        token, h = texts.token_ids[row, n, None], features[-1:]
        for step in range(4):
            logits, h = plain.step(token, h, torch.tensor([n - 1 + step]), cache)
            token = head.vocabulary[logits.argmax(-1)]
            assert int(drafts[place, step]) == int(token)


def always_on(draft: Draft, texts: Texts, prompt_len: int, num_steps: int) -> tuple[Eagle3Drafter, TorchHead]:
    """Drafts before every step; two places of each step hold rejected drafts."""
    drafter, head = drafter_of(draft)
    settle_prompts(drafter, texts, {1: prompt_len})
    for n in range(prompt_len, prompt_len + num_steps):
        drafter.propose(round_of(texts, {1: n}, (2,)), Greedy())
        drafter.settle(texts.settled([Piece(1, n, 1, num_junk=2)]))
    return drafter, head


@pytest.mark.parametrize("num_steps", [1, 2, 12])
@pytest.mark.parametrize("skipped", [None, 0, "last"])
def test_back_on_is_warm(num_steps: int, skipped: int | str | None) -> None:
    """After plain steps a row's K/V and proposals are those of a row that never stopped drafting.

    With one of the steps not settled they are not, which is what makes this a test.
    """
    draft, texts, prompt_len = random_draft(PLAIN), Texts(PLAIN), 6
    warm, warm_head = always_on(draft, texts, prompt_len, num_steps)
    drafter, head = drafter_of(draft)
    settle_prompts(drafter, texts, {1: prompt_len})
    end = prompt_len + num_steps
    for n in range(prompt_len, end):
        if n != {None: None, 0: prompt_len, "last": end - 1}[skipped]:
            drafter.settle(texts.settled([Piece(1, n, 1)]))

    pairs = zip(head.cache.read(1, end), warm_head.cache.read(1, end), strict=True)
    same_kv = all(torch.allclose(*pair, **CLOSE) for pair in pairs)
    drafting = round_of(texts, {1: end}, (3,))
    saw, warm_saw = Greedy(), Greedy()
    drafts, warm_drafts = drafter.propose(drafting, saw), warm.propose(drafting, warm_saw)
    same_logits = torch.allclose(saw.logits[0], warm_saw.logits[0], **CLOSE)
    assert same_kv == same_logits == (skipped is None)
    if skipped is None:
        torch.testing.assert_close(saw.logits, warm_saw.logits, **CLOSE)
        assert drafts.tolist() == warm_drafts.tolist()


def test_rows_of_different_depth_draft_as_if_alone() -> None:
    draft, texts = random_draft(PLAIN), Texts(PLAIN)
    lengths, depths = {2: 7, 0: 12, 1: 3}, (4, 2, 1)
    drafter, _ = drafter_of(draft)
    settle_prompts(drafter, texts, lengths)
    choose = Greedy()
    together = drafter.propose(round_of(texts, lengths, depths), choose)
    assert together.shape == (3, 4)
    assert [len(logits) for logits in choose.logits] == [3, 2, 1, 1]
    for place, (row, n) in enumerate(lengths.items()):
        alone = drafter.propose(round_of(texts, {row: n}, depths[place : place + 1]), Greedy())
        assert together[place, : depths[place]].tolist() == alone[0].tolist()


def test_a_place_without_draft_leaves_the_other_rows_alone() -> None:
    """The head goes on all the same: its steps have fixed shapes."""
    draft, texts = random_draft(PLAIN), Texts(PLAIN)
    lengths = {0: 5, 1: 5, 2: 5}
    drafter, _ = drafter_of(draft)
    settle_prompts(drafter, texts, lengths)
    free = drafter.propose(round_of(texts, lengths, (3, 3, 3)), Greedy())
    drafts = drafter.propose(round_of(texts, lengths, (3, 3, 3)), Greedy(frozenset({(0, 0), (1, 2)})))
    assert int(drafts[0, 0]) == NO_DRAFT
    assert drafts[1].tolist() == free[1].tolist()
    assert drafts[2, :2].tolist() == [int(free[2, 0]), NO_DRAFT]


def test_rows_that_share_a_prefixs_pages_draft_alike() -> None:
    """A prefix-cache hit brings warm K/V: the second row settles one place of its own and drafts."""
    draft, texts = random_draft(PLAIN), Texts(PLAIN)
    tables, shared = shuffled_tables(), 2 * PAGE_SIZE
    tables[1, :2] = tables[0, :2]
    for row_of in (texts.token_ids, texts.features):
        row_of[1] = row_of[0]
    drafter, _ = drafter_of(draft, tables)
    settle_prompts(drafter, texts, {0: shared + 1})
    drafter.settle(texts.settled([Piece(1, shared, 1)]))
    drafts = drafter.propose(round_of(texts, {0: shared + 1, 1: shared + 1}, (3, 3)), Greedy())
    assert drafts[0].tolist() == drafts[1].tolist()


def test_what_it_captures_is_the_heads() -> None:
    assert drafter_of(random_draft(PLAIN))[0].capture == (1, 5, 8)
