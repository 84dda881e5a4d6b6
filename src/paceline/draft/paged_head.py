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
    """A head's arithmetic over paged K/V, and the hidden state h of each row that drafting begins with."""

    @property
    def capture(self) -> tuple[int, ...]:
        """The target's streams that it reads: `Eagle3Config.capture_layer_ids`."""
        ...

    @property
    def vocabulary(self) -> torch.Tensor:
        """int64 [V_draft]: the target's id of each of its logits."""
        ...

    @property
    def h(self) -> torch.Tensor:
        """fp32 [rows, H], of each row's last settled pair."""
        ...

    def settle(self, settled: Settled) -> None:
        """Write K and V of the pair (next_ids, features) of every place of the batch, at its position, and
        keep the h of the pairs at `last`.

        Places beyond a row's pages go to the trash page. Every next id must be a token id, also where the
        token is not known yet. May still be at it when it returns: see `wait`.
        """
        ...

    def wait(self) -> None:
        """Until a `settle` is done with its arguments and with block tables; other calls wait themselves."""
        ...

    def step(
        self, rows: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, last: int, goes_on: bool
    ) -> torch.Tensor:
        """One draft step: writes each pair's K and V and attends over its row up to it.

        Args:
            rows: int64 [B], distinct.
            token_ids: int64 [B], target ids.
            positions: int64 [B], of the pairs: one less than the token's own.
            last: known on the host: no position exceeds it.
            goes_on: from the rows' last draft step, not from their `h`.

        Returns:
            logits fp32 [B, V_draft], valid until the next call of any method.
        """
        ...
