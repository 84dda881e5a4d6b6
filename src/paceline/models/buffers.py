"""Memory that the programs of all numbers of tokens share, since only one of them runs at a time.

Does not know what is in it.
"""

from __future__ import annotations

import torch


class Buffers:
    """Named float32 buffers of as many rows as the largest program needs; between steps they mean nothing.

    A buffer grows to a power of two of rows. Programs made before that keep the memory they had, so all
    of it comes to less than twice the largest.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def get(self, name: str, num_rows: int, width: int) -> torch.Tensor:
        """The first rows of a buffer, whose width is always the same: [num_rows, width], contiguous."""
        memory = self._memory.get(name)
        if memory is None or len(memory) < num_rows:
            memory = self._memory[name] = torch.empty(1 << (num_rows - 1).bit_length(), width)
        return memory[:num_rows]
