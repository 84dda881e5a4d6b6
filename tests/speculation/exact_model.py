"""A float32 model whose sums are so exact that the shape of a batch decides no near tie.

Weights and logits are float32 as ever; what lies between is float64. Two batch shapes then give logits that
differ, if at all, once in a hundred million, and words can be compared token for token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paceline.models.decoder import Decoder
from paceline.models.rope import rope_tables
from paceline.worker.attention.torch_paged import TorchAttention
from paceline.worker.build import EagerModel, ModelInfo
from paceline.worker.worker import ModelWorker


class _Decoder(Decoder):
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids).double()


class _Model(EagerModel):
    @property
    def features(self) -> torch.Tensor | None:
        return None if self._features is None else self._features.float()


def make_exact(worker: ModelWorker, info: ModelInfo, page_size: int) -> None:
    """Give a worker that was built in float32 the same model, computed in float64."""
    inner: Any = worker._model
    config, weights = inner._decoder.config, _doubled(inner._decoder._weights)
    cos, sin = (table.double() for table in rope_tables(config, info.max_model_len))
    norms = [(layer.q_norm, layer.k_norm) for layer in weights.layers]
    pages = (info.num_pages, page_size, worker._rows.tables)
    attention = TorchAttention(config, *pages, (cos, sin), norms, torch.float64)
    worker._model = _Model(_Decoder(config, weights), attention, inner._capture)


def _doubled(part: Any) -> Any:
    """A dataclass of tensors, and of tuples and dataclasses of such, in float64."""
    if isinstance(part, torch.Tensor):
        return part.double()
    if isinstance(part, tuple):
        return tuple(_doubled(each) for each in part)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return dataclasses.replace(
            part, **{f.name: _doubled(getattr(part, f.name)) for f in dataclasses.fields(part)}
        )
    return part
