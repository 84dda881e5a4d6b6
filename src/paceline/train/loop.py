"""The training loop: training-time test, soft targets, a clock instead of an epoch count."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.train.generate import Conversations
from paceline.train.head import TrainableHead
from paceline.train.loss import soft_cross_entropy
from paceline.train.measure import Tally, measure
from paceline.train.scripts import Turn
from paceline.train.target import Target

logger = logging.getLogger(__name__)

_LENGTHS = (
    128,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    8192,
)  # rows are padded to the next of these


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """How to train."""

    seconds: float
    batch_tokens: int = 32_768
    num_steps: int = 5  # of the training-time test
    step_weight: float = 0.8  # loss of test step j counts step_weight**j
    learning_rate: float = 1e-3
    warm_up: float = 0.02  # share of the time
    weight_decay: float = 0.01
    clip: float = 1.0
    report_seconds: float = 60.0
    max_updates: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Where training stands."""

    updates: int
    tokens: int
    seconds: float
    loss: float
    accuracy: tuple[float, ...]  # by test step: the head's likeliest token is the target's
    held_out: dict[str, Tally]


class Trainer:
    """Trains a head on one target's conversations.

    A checkpoint in `folder` is continued; it holds the optimiser too.
    """

    def __init__(
        self, head: TrainableHead, target: Target, train: Conversations, held_out: Conversations, folder: Path
    ) -> None:
        self._head, self._target, self._held_out, self._folder = head, target, held_out, folder
        self._rows, self._draft_ids = train, head.draft_ids
        self._state = {"updates": 0, "tokens": 0, "seconds": 0.0}

    def run(self, plan: TrainPlan) -> Iterator[Report]:
        """Train until the time is over, reporting now and then and at the end."""
        optimiser = torch.optim.AdamW(
            self._head.parameters(), plan.learning_rate, betas=(0.9, 0.95), weight_decay=plan.weight_decay
        )
        self._resume(optimiser)
        rng = np.random.default_rng(plan.seed + int(self._state["updates"]))
        resumed, started, reported = self._state["seconds"], time.monotonic(), time.monotonic()
        recent: list[torch.Tensor] = []
        for batch in self._batches(plan, rng):
            self._state["seconds"] = resumed + time.monotonic() - started
            over = self._state["seconds"] >= plan.seconds or self._state["updates"] == plan.max_updates
            if recent and (over or time.monotonic() - reported > plan.report_seconds):
                yield self._report(recent)
                self._save(optimiser)
                recent, reported = [], time.monotonic()
            if over:
                return
            for group in optimiser.param_groups:
                group["lr"] = plan.learning_rate * _schedule(self._progress(plan), plan.warm_up)
            recent.append(self._update(batch, optimiser, plan))

    def _progress(self, plan: TrainPlan) -> float:
        by_time = self._state["seconds"] / plan.seconds
        by_count = self._state["updates"] / plan.max_updates if plan.max_updates else 0.0
        return min(1.0, max(by_time, by_count))

    def _batches(
        self, plan: TrainPlan, rng: np.random.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless batches (token ids int64 [B, T], answer mask bool [B, T]) of rows of like length."""
        widths = np.array([next((w for w in _LENGTHS if w >= n), _LENGTHS[-1]) for n in self._rows.lengths])
        while True:
            groups = []
            for width in np.unique(widths):
                rows = rng.permutation(np.flatnonzero(widths == width))
                size = max(1, plan.batch_tokens // int(width))
                groups += [(int(width), rows[i : i + size]) for i in range(0, len(rows), size)]
            for at in rng.permutation(len(groups)):
                width, rows = groups[at]
                ids, turns = self._rows.token_ids[rows, :width], self._rows.turns[rows, :width]
                extra = ((0, 0), (0, width - ids.shape[1]))
                yield (
                    torch.from_numpy(np.pad(ids, extra).astype(np.int64)).to(self._target.device),
                    torch.from_numpy(np.pad(turns, extra) == Turn.ANSWER).to(self._target.device),
                )

    def _update(
        self, batch: tuple[torch.Tensor, torch.Tensor], optimiser: torch.optim.Optimizer, plan: TrainPlan
    ) -> torch.Tensor:
        """One optimiser step; returns [loss, accuracy by test step], still on the device."""
        token_ids, answer = batch
        head, target, steps = self._head, self._target, plan.num_steps
        draft_ids = self._draft_ids
        features, hidden = target.read(token_ids)
        length = token_ids.shape[1] - 1 - steps
        # The distribution of x_s comes from the hidden state at s - 1; only answers are learned from.
        learned = answer.clone()
        learned[:, :2] = False
        places = learned.flatten().nonzero()[:, 0]
        probabilities, likeliest = target.distributions(hidden.flatten(0, 1)[places - 1], draft_ids)
        index = torch.full_like(token_ids, -1).flatten()
        index[places] = torch.arange(len(places), device=index.device)
        index = index.view_as(token_ids)
        embedded = torch.nn.functional.embedding(token_ids[:, 1:-1], target.embedding).to(features.dtype)
        losses, hits = [], []
        for step, h in enumerate(head.chain(embedded, features[:, :length], steps)):
            at = index[:, 2 + step : 2 + step + length].flatten()
            mine = (at >= 0).nonzero()[:, 0]
            rows = at[mine]
            logits = head.logits(h.flatten(0, 1)[mine])
            losses.append(soft_cross_entropy(logits, probabilities[rows]) / max(1, len(rows)))
            hits.append((draft_ids[logits.detach().argmax(-1)] == likeliest[rows]).float().mean())
        weights = [plan.step_weight**j for j in range(steps)]
        loss = sum(
            (w * x for w, x in zip(weights, losses, strict=True)), torch.zeros((), device=index.device)
        ) / sum(weights)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), plan.clip)
        optimiser.step()
        self._state["updates"] += 1
        self._state["tokens"] += token_ids.numel()
        return torch.stack([loss.detach(), *hits])

    def _report(self, recent: list[torch.Tensor]) -> Report:
        means = torch.stack(recent).mean(0).tolist()
        held_out = measure(self._head, self._target, self._held_out)
        return Report(
            int(self._state["updates"]), int(self._state["tokens"]), self._state["seconds"],
            means[0], tuple(means[1:]), held_out,
        )  # fmt: skip

    def _save(self, optimiser: torch.optim.Optimizer) -> None:
        """Replace the checkpoint whole, so that a crash leaves the one before."""
        self._folder.mkdir(parents=True, exist_ok=True)
        new = self._folder / "checkpoint.tmp"
        torch.save(
            {"head": self._head.state_dict(), "optimiser": optimiser.state_dict(), "state": self._state}, new
        )
        os.replace(new, self._folder / "checkpoint.pt")

    def _resume(self, optimiser: torch.optim.Optimizer) -> None:
        path = self._folder / "checkpoint.pt"
        if not path.exists():
            return
        saved = torch.load(path, map_location=self._target.device, weights_only=True)
        self._head.load_state_dict(saved["head"])
        optimiser.load_state_dict(saved["optimiser"])
        self._state = saved["state"]
        logger.info("continuing from %s at update %d", path, self._state["updates"])


def _schedule(progress: float, warm_up: float) -> float:
    """Linear warm-up, then a cosine to a hundredth."""
    if progress < warm_up:
        return (progress + 1e-3) / (warm_up + 1e-3)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))
