"""What a user's word for a drafter means, another target's head, and a packed target's tables in a head."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from draft_cases import config, random_draft, target_of
from paged_rows import Texts

from paceline.draft import load
from paceline.draft.build import DenseTable, PackedTable, TargetTables, build_head
from paceline.draft.checkpoint import export_draft, open_draft
from paceline.draft.load import NGRAM, NONE, resolve_draft
from paceline.errors import ConfigError, ModelError, ModelNotFoundError
from paceline.kernels.memory import Arena
from paceline.models import builtin
from paceline.models.packed import pack_dense
from paceline.models.tensors import Kind
from paceline.models.weights import Matrix, Weights

VOCAB, HIDDEN = 96, 64


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built-in model with a head shipped for it; returns the head's folder."""
    (name,) = builtin.BUILTINS
    model = dataclasses.replace(builtin.BUILTINS[name], name="tiny", draft="tiny-head")
    monkeypatch.setitem(builtin.BUILTINS, "tiny", model)
    monkeypatch.setattr(load, "_SHIPPED", tmp_path / "drafts")
    folder = tmp_path / "drafts" / "tiny-head"
    folder.mkdir(parents=True)
    return folder


def test_without_a_word_a_builtin_model_gets_the_head_shipped_for_it(shipped: Path) -> None:
    assert resolve_draft(None, "tiny") == str(shipped)
    assert resolve_draft("none", "tiny") == NONE
    assert resolve_draft("ngram", "tiny") == NGRAM


def test_without_a_word_other_models_get_none(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_draft(None, "owner/model") == NONE
    unaccompanied = dataclasses.replace(builtin.BUILTINS["tiny"], draft=None)
    monkeypatch.setitem(builtin.BUILTINS, "tiny", unaccompanied)
    assert resolve_draft(None, "tiny") == NONE


def test_a_file_with_a_builtin_models_name_is_another_model(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_draft(None, "tiny") == NONE


def test_a_shipped_head_that_is_not_there_is_named(shipped: Path) -> None:
    shipped.rmdir()
    with pytest.raises(ModelNotFoundError, match=r"tiny-head: the draft head of tiny is missing"):
        resolve_draft(None, "tiny")
    assert resolve_draft("none", "tiny") == NONE


def test_heads_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "head").mkdir()
    assert resolve_draft("head", "m") == "head"
    assert resolve_draft("owner/head", "m", revision="main") == "owner/head"
    with pytest.raises(ModelNotFoundError, match=r"no draft head 'n-gram': .* not ngram or none"):
        resolve_draft("n-gram", "m")


@pytest.mark.parametrize("draft", [None, "none", "ngram"])
def test_a_revision_needs_a_hugging_face_id(draft: str | None) -> None:
    with pytest.raises(ConfigError, match="draft_revision 'main' needs draft to be a Hugging Face id, got n"):
        resolve_draft(draft, "m", revision="main")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 50}, "than big-model: vocab_size is 40, the target's 50"),
        ({"hidden_size": 24}, "than big-model: target_hidden_size is 16, the target's hidden_size 24"),
        ({"num_layers": 8}, r"than big-model: features are read after layer 8 .* the target has 8 layers"),
    ],
)
def test_another_targets_head_is_refused_by_both_names(
    tmp_path: Path, changes: dict[str, int], words: str
) -> None:
    draft = random_draft(config())
    export_draft(draft, tmp_path / "small-head")
    with pytest.raises(ModelError, match=f"small-head: made for another target {words}"):
        open_draft(str(tmp_path / "small-head"), target_of(draft.config, **changes), target_name="big-model")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_packed_tables_rows_are_its_own_and_its_product_is_near(kind: Kind) -> None:
    matrix = pack_dense(noise(VOCAB, HIDDEN), kind, Arena())
    table, exact = PackedTable(matrix), matrix.dequantize()
    token_ids = torch.arange(150) * 7 % VOCAB
    assert torch.equal(table.embed(token_ids), exact[token_ids])
    assert table.embed(token_ids[:0]).shape == (0, HIDDEN)
    h = noise(5, HIDDEN)
    assert torch.equal(table.project(h), Matrix(None, exact.bfloat16())(h))


def weights(embedding: Matrix, head: Matrix) -> Weights:
    return Weights(embedding, (), torch.ones(HIDDEN), head)


def test_tied_tables_are_one() -> None:
    packed = Matrix(pack_dense(noise(VOCAB, HIDDEN), "Q8_0", Arena()), None)
    dense = Matrix(None, noise(VOCAB, HIDDEN))
    tied = TargetTables.of(weights(packed, packed))
    assert tied.embedding is tied.head
    untied = TargetTables.of(weights(packed, dense))
    assert isinstance(untied.embedding, PackedTable)
    assert isinstance(untied.head, DenseTable)


def test_a_head_drafts_with_a_packed_targets_tables() -> None:
    """As with the same tables dense."""
    shared = config(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        embedding="target",
        head="target",
    )
    draft, texts = random_draft(shared), Texts(shared)
    packed = pack_dense(noise(VOCAB, HIDDEN), "Q8_0", Arena())
    logits = []
    for matrix in (Matrix(packed, None), Matrix(None, packed.dequantize())):
        plain = build_head(draft, TargetTables.of(weights(matrix, matrix)))
        logits.append(plain.forward_full(texts.token_ids[:, :9], texts.features[:, :8])[0])
    assert (logits[0] - logits[1]).abs().max() < 0.02 * logits[1].abs().max()
