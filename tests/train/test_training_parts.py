"""The pieces of training against plain references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.build import TargetTables, build_head
from paceline.models.config import ModelConfig
from paceline.models.weights import Weights
from paceline.tokenizer import Tokenizer
from paceline.train.attention import causal_with_diagonals
from paceline.train.generate import Lockstep
from paceline.train.head import HeadShape, TrainableHead
from paceline.train.loss import soft_cross_entropy
from paceline.train.measure import answers, rounds
from paceline.train.run import from_draft, to_draft
from paceline.train.scripts import Script, Segment, Template, Turn
from paceline.train.target import Target, default_capture_layers
from paceline.worker.noise import gumbel, seed_words

Model = tuple[ModelConfig, Weights]


def _reference_attention(q, k, v, chain_k, chain_v):  # type: ignore[no-untyped-def]
    length, scale = q.shape[-2], q.shape[-1] ** -0.5
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~causal, float("-inf"))
    diagonals = (q * chain_k).sum(-1).permute(1, 2, 3, 0) * scale
    weights = torch.cat((scores, diagonals), dim=-1).softmax(dim=-1)
    return weights[..., :length] @ v + (weights[..., length:].permute(3, 0, 1, 2)[..., None] * chain_v).sum(0)


@pytest.mark.parametrize("num_diagonals", [0, 1, 4])
def test_merged_attention_and_its_gradients(num_diagonals: int) -> None:
    torch.manual_seed(num_diagonals)
    shape = (2, 3, 11, 16)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    inputs += [torch.randn(num_diagonals, *shape, requires_grad=True) for _ in range(2)]
    got, wanted = causal_with_diagonals(*inputs), _reference_attention(*inputs)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
    grad = torch.randn(shape)
    for a, b in zip(
        torch.autograd.grad(got, inputs, grad, allow_unused=True),
        torch.autograd.grad(wanted, inputs, grad, allow_unused=True),
        strict=True,
    ):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_soft_cross_entropy_is_torchs() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 13, requires_grad=True)
    targets = torch.rand(7, 13).softmax(-1) * torch.rand(7, 1)  # part of the mass is elsewhere
    ours = soft_cross_entropy(logits, targets)
    theirs = -(targets * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(ours, theirs)
    (a,), (b,) = torch.autograd.grad(ours * 3, [logits]), torch.autograd.grad(theirs * 3, [logits])
    torch.testing.assert_close(a, b)


class _Cache:
    """A draft's K/V of one row, kept by position."""

    def __init__(self, head_dim: int) -> None:
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        self._scale = head_dim**-0.5

    def __call__(self, q, k, v, positions):  # type: ignore[no-untyped-def]
        position = int(positions[0])
        self.k[position], self.v[position] = k[0], v[0]
        group = q.shape[1] // k.shape[1]
        keys = torch.stack([self.k[p] for p in range(position + 1)]).repeat_interleave(group, 1)
        values = torch.stack([self.v[p] for p in range(position + 1)]).repeat_interleave(group, 1)
        weights = (torch.einsum("hd,phd->hp", q[0], keys) * self._scale).softmax(-1)
        return torch.einsum("hp,phd->hd", weights, values)[None]


def _head(config: ModelConfig, size: int = 50) -> TrainableHead:
    torch.manual_seed(1)
    draft_ids = torch.randperm(config.vocab_size)[:size].sort().values
    return TrainableHead(config, HeadShape(draft_vocab_size=size, intermediate_size=96), draft_ids)


def test_training_chains_are_serving_rounds(target_model: Model) -> None:
    """Chain t of the training-time test equals settling pairs before t, then `step` from t on."""
    config, weights = target_model
    capture = default_capture_layers(config.num_layers)
    head, target = _head(config), Target(config, weights, capture, "cpu")
    token_ids = torch.randint(0, config.vocab_size, (1, 12))
    features, _ = target.read(token_ids)
    embedded = torch.nn.functional.embedding(token_ids[:, 1:], target.embedding)
    steps, length = 3, 8
    chained = [head.logits(h) for h in head.chain(embedded, features[:, :length], steps)]

    serving = build_head(to_draft(head, capture, torch.float32), TargetTables.of(weights))
    fused = serving.fuse(features[0])
    for t in range(length):
        cache = _Cache(config.head_dim)
        k, v = serving.settle(token_ids[0, 1 : t + 1], fused[:t], torch.arange(t))
        cache.k.update(enumerate(k))
        cache.v.update(enumerate(v))
        h = fused[t : t + 1]
        for step in range(steps):
            token, position = token_ids[0, t + 1 + step : t + 2 + step], torch.tensor([t + step])
            logits, h = serving.step(token, h, position, cache)
            torch.testing.assert_close(logits[0], chained[step][0, t], atol=1e-5, rtol=1e-4)


def test_a_head_survives_its_checkpoint(target_model: Model) -> None:
    config, _ = target_model
    head, capture = _head(config), default_capture_layers(config.num_layers)
    again = from_draft(to_draft(head, capture, torch.float32), config, "cpu")
    assert again.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def _scripts(num: int, vocab_size: int) -> list[Script]:
    """Prompts of different lengths, two answers each."""
    made = []
    for i in range(num):
        first = tuple((7 * i + j) % vocab_size for j in range(1, 3 + i))
        made.append(Script("k", (Segment(first, Turn.ANSWER), Segment((5, 6), Turn.ANSWER))))
    return made


def test_lockstep_rows_are_what_the_target_says(target_model: Model) -> None:
    """Greedy: every answer token is the target's likeliest; forced tokens stand where the script has them."""
    config, weights = target_model
    lockstep = Lockstep(config, weights, [3], 5, 40, "cpu")
    made = lockstep.run(_scripts(4, config.vocab_size), [0.0] * 4, seed=0, max_turn_tokens=9)
    target = Target(config, weights, (2, 4, 5), "cpu")
    ids = torch.from_numpy(made.token_ids.astype(np.int64))
    _, hidden = target.read(ids)
    likeliest = target._decoder.logits(hidden.flatten(0, 1)).argmax(-1).view_as(ids)
    for row in range(4):
        assert (
            tuple(made.token_ids[row, : 2 + row]) == _scripts(4, config.vocab_size)[row].segments[0].token_ids
        )
        for at in np.flatnonzero(made.turns[row] == Turn.ANSWER):
            assert ids[row, at] == likeliest[row, at - 1]
        runs = list(answers(made.turns[row], int(made.lengths[row])))
        assert runs, "no answer"
        assert all(end - begin <= 9 for begin, end in runs)


def test_lockstep_with_serving_noise(target_model: Model) -> None:
    config, weights = target_model
    lockstep = Lockstep(config, weights, [3], 3, 24, "cpu", coupled=True)
    made = lockstep.run(_scripts(3, config.vocab_size), [0.8] * 3, seed=11, max_turn_tokens=30)
    target = Target(config, weights, (2, 4, 5), "cpu")
    _, hidden = target.read(torch.from_numpy(made.token_ids.astype(np.int64)))
    logits = target._decoder.logits(hidden.flatten(0, 1)).view(3, 24, -1)
    everything = torch.arange(config.vocab_size)
    for row in range(3):
        for at in np.flatnonzero(made.turns[row] == Turn.ANSWER):
            seeds = torch.tensor([seed_words(11 + row)])
            noise = gumbel(torch.tensor([at]), torch.tensor([0]), seeds, everything)[0]
            assert made.token_ids[row, at] == (logits[row, at - 1].double() / 0.8 + noise).argmax()


def test_template_cuts_turns_apart(tokenizer: Tokenizer) -> None:
    template = Template(tokenizer)
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "3"},
        ],
        add_generation_prompt=True,
    )
    end = tokenizer.eos_token_ids[0]
    script = template.task("k", ["one", "3"])
    said = tokenizer.encode("two", add_special_tokens=False)
    whole = [*script.segments[0].token_ids, *said, end, *script.segments[1].token_ids]
    assert tokenizer.decode(whole, skip_special_tokens=False) == rendered


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_rounds_deliver_every_token_once(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 5))
    begin = data.draw(st.integers(1, 6))
    end = begin + data.draw(st.integers(1, 20))
    hits = np.array(
        data.draw(
            st.lists(st.lists(st.booleans(), min_size=depth, max_size=depth), min_size=end, max_size=end)
        )
    )
    newest = begin
    for accepted in rounds(hits, begin, end, depth):
        pair = newest - 1
        assert hits[pair, :accepted].all()
        stopped_short = accepted < min(depth, end - 1 - newest)
        assert not stopped_short or not hits[pair, accepted]
        newest += accepted + 1
    assert newest in (end - 1, end)  # the last round's bonus token may stand behind the answer
