"""A bound on what oneDNN keeps: it compiles a program for each size of a bfloat16 product on CPU.

Each takes 0.6 MB, and every number of tokens in a step makes one for each shape of a layer's four matrices.
Unbounded, as both caches nearly are (1,024 entries), a server grows by 600 MB while it meets new sizes.
"""

from __future__ import annotations

import os

# 32 sizes of step, 80 MB. One that is not among them costs 4 ms once; the others cost what they always did.
_NUM_PROGRAMS = 128

# Of oneDNN, for programs, and of torch's layer above it, for their descriptions.
_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_caches() -> None:
    """Bound both caches, unless the environment does; of use only before the process's first such product."""
    for name in _CAPACITIES:
        os.environ.setdefault(name, str(_NUM_PROGRAMS))
