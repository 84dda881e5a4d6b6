"""The head's arithmetic against EAGLE-3 by hand, for every option."""

from __future__ import annotations

import torch
from draft_cases import ByHand, PlainCache, config, configs, head_of, random_draft
from hypothesis import given, settings

from paceline.draft.config import Eagle3Config
from paceline.draft.schema import weight_shapes

ROWS, LENGTH, DEPTH = 2, 4, 4
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def sequences(config: Eagle3Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [ROWS, LENGTH + 1] and features [ROWS, LENGTH, k T]."""
    generator = torch.Generator().manual_seed(7)
    token_ids = torch.randint(config.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    return token_ids, 3 * torch.randn(ROWS, LENGTH, config.feature_size, generator=generator)


@settings(max_examples=25, deadline=None)
@given(config=configs())
def test_settle_and_step_equal_the_full_forward_and_both_the_reference(config: Eagle3Config) -> None:
    draft = random_draft(config)
    head = head_of(draft)
    token_ids, features = sequences(config)
    logits, h = head.forward_full(token_ids, features)

    shuffled = torch.tensor([3, 0, 1, 2])
    k, v = head.settle(
        token_ids[:, 1 + shuffled].flatten(),
        head.fuse(features[:, shuffled].flatten(0, 1)),
        shuffled.repeat(ROWS),
    )
    cache = PlainCache(config, ROWS, LENGTH)
    cache.write(shuffled, k.unflatten(0, (ROWS, LENGTH)), v.unflatten(0, (ROWS, LENGTH)))
    settled_k, settled_v = cache.k.clone(), cache.v.clone()

    for row in range(ROWS):
        by_hand = ByHand(draft)
        for t in range(LENGTH):
            expected = by_hand.pair(int(token_ids[row, t + 1]), by_hand.fuse(features[row, t]), t)
            torch.testing.assert_close(logits[row, t].double(), expected[0], **CLOSE)
            torch.testing.assert_close(h[row, t].double(), expected[1], **CLOSE)
            torch.testing.assert_close(settled_k[row, t].double(), by_hand.keys[t], **CLOSE)
            torch.testing.assert_close(settled_v[row, t].double(), by_hand.values[t], **CLOSE)

    for t in reversed(range(LENGTH)):  # from settled K/V alone, whatever was stepped before
        stepped = head.step(token_ids[:, t + 1], head.fuse(features[:, t]), torch.full((ROWS,), t), cache)
        torch.testing.assert_close(stepped[0], logits[:, t], **CLOSE)
        torch.testing.assert_close(stepped[1], h[:, t], **CLOSE)
    torch.testing.assert_close(cache.k, settled_k, **CLOSE)
    torch.testing.assert_close(cache.v, settled_v, **CLOSE)


@settings(max_examples=15, deadline=None)
@given(config=configs())
def test_chained_drafting_equals_the_reference_and_settling_undoes_it(config: Eagle3Config) -> None:
    """Rows of different lengths draft DEPTH tokens; then the true pairs overwrite what drafting wrote."""
    draft = random_draft(config, seed=1)
    head = head_of(draft)
    token_ids, features = sequences(config)
    lengths = [LENGTH - 2, LENGTH]  # settled pairs of each row
    positions = torch.tensor([n - 1 for n in lengths])
    cache = PlainCache(config, ROWS, LENGTH + DEPTH)
    all_k, all_v = head.settle(
        token_ids[:, 1:].flatten(),
        head.fuse(features.flatten(0, 1)),
        torch.arange(LENGTH).repeat(ROWS),
    )
    settled_k, settled_v = (x.unflatten(0, (ROWS, LENGTH)) for x in (all_k, all_v))
    for row, n in enumerate(lengths):
        cache.k[row, :n], cache.v[row, :n] = settled_k[row, :n], settled_v[row, :n]

    rows = torch.arange(ROWS)
    h = head.fuse(features[rows, positions])
    token = token_ids[rows, positions + 1]
    drafted = []
    for i in range(DEPTH):
        logits, h = head.step(token, h, positions + i, cache)
        token = head.target_ids(logits.argmax(-1))
        drafted.append((token, logits))

    vocabulary = draft.tensors["t2d"].nonzero()[:, 0]
    for row, n in enumerate(lengths):
        by_hand = ByHand(draft)
        for t in range(n):
            next_token = int(token_ids[row, t + 1])
            expected, hidden = by_hand.pair(next_token, by_hand.fuse(features[row, t]), t)
        for i in range(DEPTH):
            torch.testing.assert_close(drafted[i][1][row].double(), expected, rtol=1e-4, atol=1e-4)
            next_token = int(vocabulary[expected.argmax()])
            assert next_token == int(drafted[i][0][row])
            expected, hidden = by_hand.pair(next_token, hidden, n + i)

    cache.write(torch.arange(LENGTH), settled_k, settled_v)
    again, _ = head.step(
        token_ids[:, LENGTH], head.fuse(features[:, -1]), torch.full((ROWS,), LENGTH - 1), cache
    )
    torch.testing.assert_close(again, head.forward_full(token_ids, features)[0][:, -1], **CLOSE)


def test_matrices_in_bf16_stay_near_fp32() -> None:
    plain = config(fc_norm=True)
    draft = random_draft(plain)
    token_ids, features = sequences(plain)
    exact, _ = head_of(draft).forward_full(token_ids, features)
    rounded, h = head_of(draft, torch.bfloat16).forward_full(token_ids, features.bfloat16())
    assert rounded.dtype == h.dtype == torch.float32
    assert 0 < (rounded - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt()


def test_target_ids_are_the_marked_tokens() -> None:
    draft = random_draft(config())
    assert (
        head_of(draft).target_ids(torch.arange(12)).tolist() == draft.tensors["t2d"].nonzero()[:, 0].tolist()
    )
    whole = random_draft(config(draft_vocab_size=40))
    assert head_of(whole).target_ids(torch.arange(40)).tolist() == list(range(40))


def test_the_plain_head_has_specforges_tensors() -> None:
    layer = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    layer += ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    names = {f"midlayer.{n}.weight" for n in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    plain = config()
    assert set(weight_shapes(plain)) == names
    assert set(random_draft(plain).tensors) == names | {"d2t", "t2d"}
    assert weight_shapes(plain)["midlayer.self_attn.k_proj.weight"] == (2 * 6, 2 * 16)
    assert weight_shapes(plain)["fc.weight"] == (16, 3 * 16)
