"""An EAGLE-3 head with its K/V in the target's pages: what the drafter runs, however it is computed.

The draft's K and V lie in pages of their own under the target's page numbers: a row's block table is that of
both, so what the target shares or caches is shared and cached here too.

Does not know which tokens are proposed, nor how drafts are chosen from logits.
"""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.draft.protocol import Settled


class PagedHead(Protocol):
    """A head's arithmetic over paged K/V. Keeps no state by row but the pages."""

    @property
    def capture(self) -> tuple[int, ...]:
        """The target's streams that it reads: `Eagle3Config.capture_layer_ids`."""
        ...

    @property
    def hidden_size(self) -> int:
        """H."""
        ...

    @property
    def vocabulary(self) -> torch.Tensor:
        """int64 [V_draft]: the target's id of each of its logits."""
        ...

    def settle(self, settled: Settled) -> torch.Tensor:
        """Write K and V of the pair (next_ids, features) of every place of the batch, at its position.

        Places beyond a row's pages go to the trash page. Every next id must be a token id, also where the
        token is not known yet.

        Returns:
            The hidden states of the pairs, fp32 [M, H], valid until the next call of any method.
        """
        ...

    def step(
        self, rows: torch.Tensor, token_ids: torch.Tensor, h: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step: writes each pair's K and V and attends over its row up to it.

        Args:
            rows: int64 [B], distinct.
            token_ids: int64 [B], target ids.
            h: fp32 [B, H]; may be (the first rows of) what the step before returned.
            positions: int64 [B], of the pairs: one less than the token's own.

        Returns:
            logits fp32 [B, V_draft] and the next step's h fp32 [B, H], valid until the next call of any
            method.
        """
        ...
