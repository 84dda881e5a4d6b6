"""The head over pages against its plain forward over whole sequences."""

from __future__ import annotations

import torch
from draft_cases import config, configs, head_of, random_draft
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_rows import MAX_LEN, NUM_ROWS, PAGE_SIZE, Piece, Texts, paged_head, shuffled_tables

from paceline.draft.config import Eagle3Config
from paceline.draft.eagle3 import Eagle3Head
from paceline.draft.torch_head import TorchHead

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[Piece]], list[int]]:
    """Steps over rows of different length, in chunks, some with rejected drafts; and the lengths settled."""
    lengths = [0] * NUM_ROWS
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        pieces = []
        for row in draw(st.permutations(range(NUM_ROWS))):
            count = draw(st.integers(0, min(6, MAX_LEN - lengths[row])))
            if count:
                pieces.append(Piece(row, lengths[row], count, draw(st.sampled_from([0, 0, 2, 9]))))
                lengths[row] += count
        if pieces:
            steps.append(pieces)
    return steps, lengths


def settle(head: TorchHead, texts: Texts, steps: list[list[Piece]]) -> None:
    """All steps."""
    for pieces in steps:
        head.settle(texts.settled(pieces))


def expect_exact(head: TorchHead, plain: Eagle3Head, texts: Texts, lengths: list[int]) -> None:
    """One draft step of every row that has settled, and all K/V before it, are those of whole sequences."""
    rows = torch.tensor([row for row, n in enumerate(lengths) if n])
    n = torch.tensor(lengths)[rows]
    logits = head.step(rows, texts.token_ids[rows, n], n - 1, int(n.max()) - 1, False)
    for i, row in enumerate(rows.tolist()):
        known = slice(0, lengths[row])
        token_ids, true_features = texts.token_ids[row], texts.features[row, known]
        all_logits, all_h = plain.forward_full(token_ids[None, : lengths[row] + 1], true_features[None])
        torch.testing.assert_close(logits[i], all_logits[0, -1], **CLOSE)
        torch.testing.assert_close(head._h_next[row], all_h[0, -1], **CLOSE)
        k, v = plain.settle(
            token_ids[1 : lengths[row] + 1], plain.fuse(true_features), torch.arange(lengths[row])
        )
        cached_k, cached_v = head.cache.read(row, lengths[row])
        torch.testing.assert_close(cached_k, k, **CLOSE)
        torch.testing.assert_close(cached_v, v, **CLOSE)


@settings(max_examples=40, deadline=None)
@given(config=configs(), history=histories())
def test_chunks_in_pages_equal_whole_sequences(
    config: Eagle3Config, history: tuple[list[list[Piece]], list[int]]
) -> None:
    """Rejected drafts lie behind chunks, some of them beyond all pages; nobody sees them."""
    steps, lengths = history
    draft, texts = random_draft(config), Texts(config)
    head = paged_head(draft, shuffled_tables())
    settle(head, texts, steps)
    if any(lengths):
        expect_exact(head, head_of(draft), texts, lengths)


def test_drafting_leaves_nothing_that_settling_does_not_overwrite() -> None:
    draft, texts = random_draft(config()), Texts(config())
    head, plain = paged_head(draft, shuffled_tables()), head_of(draft)
    lengths = [5, 3, 9]
    settle(head, texts, [[Piece(row, 0, n) for row, n in enumerate(lengths)]])
    rows, token_ids = torch.arange(NUM_ROWS), texts.token_ids[range(NUM_ROWS), lengths]
    for step in range(4):
        logits = head.step(
            rows, token_ids, torch.tensor(lengths) - 1 + step, max(lengths) - 1 + step, step > 0
        )
        token_ids = head.vocabulary[logits.argmax(-1)]
    expect_exact(head, plain, texts, lengths)
    settle(head, texts, [[Piece(row, n, 2, num_junk=2) for row, n in enumerate(lengths)]])
    expect_exact(head, plain, texts, [n + 2 for n in lengths])


def test_drafting_beyond_all_pages_touches_no_row() -> None:
    draft, texts = random_draft(config()), Texts(config())
    head, plain = paged_head(draft, shuffled_tables()), head_of(draft)
    lengths = [MAX_LEN, 3, MAX_LEN - 1]
    settle(head, texts, [[Piece(row, 0, n) for row, n in enumerate(lengths)]])
    for step in range(PAGE_SIZE + 2):
        full = torch.tensor([0, 2])
        positions = torch.tensor([MAX_LEN, MAX_LEN - 1]) + step
        assert head.step(full, torch.tensor([1, 2]), positions, MAX_LEN + step, step > 0).isfinite().all()
    expect_exact(head, plain, texts, lengths)


def test_a_row_without_its_own_page_writes_to_the_trash() -> None:
    draft, texts = random_draft(config()), Texts(config())
    tables = shuffled_tables()
    tables[0, 1:] = 0
    head = paged_head(draft, tables)
    lengths = [PAGE_SIZE, 3, 9]
    pieces = [Piece(row, 0, n, num_junk=5) for row, n in enumerate(lengths)]
    settle(head, texts, [pieces])
    expect_exact(head, head_of(draft), texts, lengths)


def test_what_lies_in_the_trash_page_reaches_no_row() -> None:
    """Not even NaN, which a mask alone lets through."""
    draft, texts = random_draft(config()), Texts(config())
    tables = shuffled_tables()
    tables[1, 1:] = 0
    head = paged_head(draft, tables)
    lengths = [MAX_LEN, 3, 9]
    settled = texts.settled(
        [Piece(row, 0, n, num_junk=PAGE_SIZE * (row == 0)) for row, n in enumerate(lengths)]
    )
    assert settled.features is not None
    settled.features[MAX_LEN : MAX_LEN + PAGE_SIZE] = torch.nan
    head.settle(settled)
    assert head.cache.read(0, MAX_LEN + 1)[0][-1].isnan().all()
    expect_exact(head, head_of(draft), texts, lengths)


def test_a_shared_prefix_is_warm_in_every_row() -> None:
    """A row that begins with another's pages drafts as if it had settled them itself."""
    draft, texts = random_draft(config()), Texts(config())
    tables, shared = shuffled_tables(), 2 * PAGE_SIZE
    tables[1, :2] = tables[0, :2]
    texts.token_ids[1, : shared + 1] = texts.token_ids[0, : shared + 1]
    texts.features[1, :shared] = texts.features[0, :shared]
    head = paged_head(draft, tables)
    settle(head, texts, [[Piece(0, 0, shared + 3)], [Piece(1, shared, 2)]])
    expect_exact(head, head_of(draft), texts, [shared + 3, shared + 2, 0])


def test_bfloat16_pages_stay_near_exact_ones() -> None:
    draft, texts = random_draft(config()), Texts(config())
    tables = shuffled_tables()
    exact = paged_head(draft, tables)
    rounded = TorchHead(head_of(draft), int(tables.max()) + 1, PAGE_SIZE, tables, torch.bfloat16)
    logits = []
    for head in (exact, rounded):
        settle(head, texts, [[Piece(0, 0, 9)]])
        logits.append(head.step(torch.tensor([0]), texts.token_ids[0, 9:10], torch.tensor([8]), 8, False))
    assert logits[1].dtype == torch.float32
    error = (logits[1] - logits[0]).square().mean().sqrt()
    assert 0 < error < 0.02 * logits[0].square().mean().sqrt()


def test_what_the_drafter_must_know_of_the_head() -> None:
    draft = random_draft(config())
    head = paged_head(draft, shuffled_tables())
    assert head.capture == (1, 5, 8)
    assert head.h.shape == (NUM_ROWS, 16)
    assert head.vocabulary.tolist() == draft.tensors["t2d"].nonzero()[:, 0].tolist()
