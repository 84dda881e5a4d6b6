"""What oneDNN compiles for each size of step must not pile up.

In a process of its own, since the bounds are read only once.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = """
import os, sys
import numpy as np, torch
from paceline.config import EngineConfig
from paceline.models.batch import Batch
from paceline.worker.build import build_worker

worker, _ = build_worker(EngineConfig(model=sys.argv[1], precision="bf16", max_num_seqs=4, threads=1))

@torch.inference_mode()
def step(num_tokens):
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    worker._model.forward(Batch(ids, torch.arange(num_tokens), np.array([[0, num_tokens, 0, 0]])))

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

for num_tokens in range(1, 81):
    step(num_tokens)
before = resident()
for num_tokens in range(81, 201):
    step(num_tokens)
print(resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="reads Linux's own figures")
def test_steps_of_ever_new_sizes_take_no_more_memory(tiny_folder: Path) -> None:
    bounds = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # an earlier test may have set them
    env = {name: value for name, value in os.environ.items() if name not in bounds}
    ended = subprocess.run(
        [sys.executable, "-c", STEPS, str(tiny_folder)], env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 30e6  # 120 sizes of four products: 250 MB, where all are kept
