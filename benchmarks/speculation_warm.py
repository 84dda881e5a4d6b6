"""Back on is warm: after so many plain steps, at the same prefix, the head is as if it had always drafted.

For each prompt one request drafts in every step. Others decode plainly up to the same place of the same text
and draft from there on. Compared are the draft's K/V of all positions before that place, the drafts of the
next round, and the words that follow. The same once more with settling left out of the plain steps: then
nothing of it may hold.

Before each request the draft's K/V is wiped, in all pages: what a page held before cannot help.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import torch

from common import Row
from paceline.engine.factory import build
from speculation_runs import PINNED, Bench, Side, YardstickPrompt

NUM_STEPS = (1, 10, 100, 1000)
DEPTH, TEMPERATURE = 4, 0.8  # greedy, a small model repeats itself within a thousand tokens
NUM_AFTER = 32  # tokens that must be the same words afterwards
TOLERANCE = 2.0**-7  # absolute and relative: a step of bfloat16, in which K and V are kept


@dataclass(frozen=True, slots=True)
class Moment:
    """What the head has, and does next, at one length."""

    num_tokens: int  # generated so far
    keys: torch.Tensor  # fp32 [positions, kv_heads, D]
    values: torch.Tensor
    drafts: tuple[int, ...]  # of the next round


class Ride:
    """One request, stepped by hand; its depth may change on every step. Begins with a wiped draft."""

    def __init__(self, stand: Stand, prompt: YardstickPrompt, num_tokens: int, depth: int) -> None:
        stand.wipe()
        self._stand = stand
        self._request = stand.side.request(
            prompt, depth, TEMPERATURE, max_tokens=num_tokens + NUM_AFTER + 2 * DEPTH, ignore_eos=True
        )
        self.token_ids: list[int] = []
        stand.side.engine.add(self._request)
        self.step()

    def step(self) -> None:
        """One step; the first is the prompt's."""
        while True:
            outputs = self._stand.side.engine.step()
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                self.token_ids += output.token_ids
            if self.token_ids:
                return

    def draft_from_here(self) -> None:
        """The scheduler asks for a request's depth anew at every step."""
        msgspec.structs.force_setattr(self._request.params, "depth", DEPTH)

    def moment(self) -> Moment:
        """Read K/V, and take the step whose drafts belong to it. Drafting must be on."""
        num_tokens = len(self.token_ids)
        row = self._stand.side.engine._scheduler._roster._running[self._request.request_id].row
        keys, values = self._stand.draft_kv(row)
        self.step()
        return Moment(num_tokens, keys, values, self._stand.latest_drafts)

    def stop(self) -> None:
        """Leave the row to the next."""
        self._stand.side.engine.abort(self._request.request_id)


class Stand:
    """An engine with the head whose pages can be read, and whose settling can be left out."""

    def __init__(self) -> None:
        self.side = Side(build(replace(PINNED, prefix_caching=False, max_num_seqs=1)))
        self.latest_drafts: tuple[int, ...] = ()
        worker = self.side.worker
        self._settle, self._drafter = worker._settle_draft, worker._drafter
        self._cache = self._drafter._head._cache
        propose = self._drafter.propose

        def remembering(*args: Any) -> torch.Tensor:
            drafts: torch.Tensor = propose(*args)
            self.latest_drafts = tuple(drafts[0].tolist())
            return drafts

        self._drafter.propose = remembering

    def wipe(self) -> None:
        """As if no page had ever been written."""
        self._drafter.wait()
        self._cache._k.zero_()
        self._cache._v.zero_()
        self._drafter._head.h.zero_()

    @contextmanager
    def no_settling(self) -> Iterator[None]:
        """Target steps leave nothing to the drafter."""
        self.side.worker._settle_draft = lambda step, settled: None
        try:
            yield
        finally:
            self.side.worker._settle_draft = self._settle

    def draft_kv(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of every position of a row that has been through the target: fp32 [n, kv_heads, D]."""
        self._drafter.wait()
        rows = self.side.worker._rows
        page_size = self._cache._page_size
        positions = torch.arange(int(rows.seq_len[row]))
        pages, places = rows.tables[row].long()[positions // page_size], positions % page_size
        # The kernel keeps 16 keys side by side: [page, head, place / 16, D, place % 16].
        keys = self._cache._k[0].permute(0, 2, 4, 1, 3).flatten(1, 2)  # [page, place, head, D]
        values = self._cache._v[0].permute(0, 2, 1, 3)
        return keys[pages, places].float(), values[pages, places].float()


class Checkpoints:
    """A request that always drafts, at the first place behind each number of plain steps."""

    def __init__(self, stand: Stand, prompt: YardstickPrompt, num_steps: tuple[int, ...]) -> None:
        ride = Ride(stand, prompt, max(num_steps), DEPTH)
        self.moments: dict[int, Moment] = {}
        for num in num_steps:
            while len(ride.token_ids) < 1 + num:
                ride.step()
            self.moments[num] = ride.moment()
        last = max(moment.num_tokens for moment in self.moments.values())
        while len(ride.token_ids) < last + NUM_AFTER:
            ride.step()
        self.token_ids = ride.token_ids
        ride.stop()


class Warmth:
    """Makes the rows. One stand for all of them."""

    def __init__(self, bench: Bench) -> None:
        num_prompts = 1 if bench.quick else 3
        self.num_steps = NUM_STEPS[:2] if bench.quick else NUM_STEPS
        self._prompts = [p for p in bench.prompts if p.category != "summarization"][:num_prompts]

    @cached_property
    def stand(self) -> Stand:
        """Loaded when first needed."""
        return Stand()

    @cached_property
    def always_on(self) -> list[Checkpoints]:
        """One for each prompt."""
        return [Checkpoints(self.stand, prompt, self.num_steps) for prompt in self._prompts]

    def measure(self, num_steps: int, *, is_settled: bool) -> Row:
        """How many prompts pass, and how far the others are off."""
        checks = [
            self._check(prompt, always, num_steps, is_settled)
            for prompt, always in zip(self._prompts, self.always_on, strict=True)
        ]
        return {
            "value": sum(check["passes"] for check in checks) / len(checks),
            "num_steps": num_steps,
            "is_settled": is_settled,
            "num_prompts": len(checks),
            "num_close": sum(check["is_close"] for check in checks),
            "max_abs_difference": {name: max(check[name] for check in checks) for name in ("keys", "values")},
            "largest": max(check["largest"] for check in checks),
            "num_equal_drafts": sum(check["num_equal_drafts"] for check in checks),
            "num_drafts": DEPTH * len(checks),
            "num_same_words": sum(check["is_same_text"] for check in checks),
            "checks": checks,
        }

    def _check(self, prompt: YardstickPrompt, always: Checkpoints, num_steps: int, is_settled: bool) -> Row:
        expected = always.moments[num_steps]
        ride = Ride(self.stand, prompt, expected.num_tokens, 0)
        if is_settled:
            self._go_plainly(ride, expected.num_tokens)
        else:
            with self.stand.no_settling():
                self._go_plainly(ride, expected.num_tokens)
        num_plain = len(ride.token_ids) - 1
        ride.draft_from_here()
        found = ride.moment()
        while len(ride.token_ids) < expected.num_tokens + NUM_AFTER:
            ride.step()
        ride.stop()
        pairs = {"keys": (found.keys, expected.keys), "values": (found.values, expected.values)}
        is_close = all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in pairs.values())
        num_equal = sum(a == b for a, b in zip(found.drafts, expected.drafts, strict=True))
        end = expected.num_tokens + NUM_AFTER
        is_same_text = ride.token_ids[:end] == always.token_ids[:end]
        return {
            "passes": is_close and num_equal == DEPTH and is_same_text,
            "num_plain_steps": num_plain,
            "is_close": is_close,
            **{name: float((a - b).abs().max()) for name, (a, b) in pairs.items()},
            "largest": float(max(expected.keys.abs().max(), expected.values.abs().max())),
            "num_equal_drafts": num_equal,
            "is_same_text": is_same_text,
        }

    def _go_plainly(self, ride: Ride, num_tokens: int) -> None:
        while len(ride.token_ids) < num_tokens:
            ride.step()
