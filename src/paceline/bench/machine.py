"""The machine that measured, in words that tell whether two reports can be compared; no hosts, no users."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from paceline.config import available_cores


def describe(device: str) -> dict[str, str]:
    """Processor, cores and memory; with `cuda`, the GPU as well."""
    facts = {"cpu": platform.processor() or platform.machine(), "cores": str(available_cores())}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        found = dict(line.split("\t: ", 1) for line in lines if "\t: " in line)
        facts["cpu"] = found.get("model name", facts["cpu"])
        num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        facts["memory"] = f"{num_bytes / 1e9:.0f} GB"
    except (OSError, ValueError):  # not Linux
        pass
    if device == "cuda":
        import torch

        facts["gpu"] = torch.cuda.get_device_name()
    facts["system"] = platform.system()
    return facts
