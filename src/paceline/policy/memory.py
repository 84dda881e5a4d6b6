"""What a governor has learnt, and how it learns from a step: acceptance, time, and what the guard
compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from paceline.policy.acceptance import Acceptance
from paceline.policy.config import GovernorConfig
from paceline.policy.cost import CostModel
from paceline.policy.guard import Guard
from paceline.policy.rows import RowBook, RowState
from paceline.policy.served import ServedCosts, bucket
from paceline.policy.shadow import Shadows
from paceline.policy.types import Decision, Observation, Reason

_FADE = 0.92  # of what a row has shown, if others draft and it does not
_FADE_EVERY = 8  # rounds
_MANY = 512  # mixes of depths whose price is kept


def _verified(observation: Observation) -> tuple[int, ...]:
    """Drafts of each row that went through the target."""
    return observation.decision.depths if observation.verified is None else observation.verified


class Memory:
    """Everything that outlives a step."""

    def __init__(self, model: CostModel, depths: Sequence[int], config: GovernorConfig) -> None:
        self._max_depth = depths[-1]
        self._config = config
        self._acceptances: list[Acceptance] = []  # by drafter
        self._num_observed = 0
        self._drafting: dict[frozenset[tuple[tuple[str, int], int]], float] = {}  # seconds
        self.model = model
        self.served = ServedCosts()
        self.rows = RowBook(depths)
        self.guard = Guard(config.guard)
        self.shadows = Shadows(config.shadow)

    def acceptance(self, drafter: int) -> Acceptance:
        """What is known of a drafter."""
        while len(self._acceptances) <= drafter:
            self._acceptances.append(Acceptance(self._max_depth, self._config.acceptance))
        return self._acceptances[drafter]

    def doubt_acceptance(self, drafters: Iterable[int]) -> None:
        """What was believed of these drafters has been contradicted: it no longer counts as known."""
        for drafter in drafters:
            self.acceptance(drafter).doubt()

    def observe_rounds(self, observation: Observation) -> None:
        """Take in what a step's rows accepted. Steps come in their order, each before its `observe`."""
        verified = _verified(observation)
        self._num_observed += 1
        if any(verified):
            self._learn_rounds(observation, verified)

    def observe(self, observation: Observation, now: int) -> None:
        """Take in all else that a step came to; `now` counts decisions."""
        decision = observation.decision
        verified = _verified(observation)
        drafted = verified if observation.drafted is None else observation.drafted
        if observation.shadows:
            self._learn_shadows(observation)
        seconds = observation.seconds
        if seconds is None:
            self.shadows.earn(decision.predicted_seconds or 0.0)
            return
        self.shadows.earn(seconds)
        if decision.rows and not decision.shadow:
            self._learn_time(decision, verified, drafted, seconds)
            if not decision.load.num_prompt_tokens:
                self._learn_rate(observation, any(drafted), seconds, now)

    def _learn_rounds(self, observation: Observation, verified: tuple[int, ...]) -> None:
        """Acceptance, from rows whose round before drafted too: so this one started where rounds start."""
        rounds: dict[int, list[tuple[RowState, int, int]]] = {}
        now, cut = self._num_observed, observation.cut
        is_fading = not now % _FADE_EVERY
        states = self.rows.find(observation.decision.rows)
        for i, (state, depth, accepted) in enumerate(
            zip(states, verified, observation.accepted, strict=True)
        ):
            if state is None:
                continue
            if not depth:
                if is_fading:
                    state.fade(_FADE, self._config.acceptance)
                continue
            if state.last_drafted == now - 1:
                reached = accepted + 1 if accepted < depth and not (cut and i in cut) else accepted
                if reached:
                    rounds.setdefault(state.drafter, []).append((state, reached, accepted))
            state.last_drafted = now
        for drafter, of in rounds.items():
            self.acceptance(drafter).add(of)

    def _learn_shadows(self, observation: Observation) -> None:
        for result in self.shadows.take(observation.shadows, self._expected):
            state = self.rows.get(result.key)
            if state is not None:
                reached = min(result.matched + 1, result.depth)
                self.acceptance(state.drafter).add([(state, reached, result.matched)])

    def _expected(self, key: Hashable, depth: int) -> tuple[float, float]:
        """Drafts that a row should accept: mean and variance."""
        state = self.rows.get(key)
        if state is None:
            return 0.0, 0.0
        survivals = self.acceptance(state.drafter).survivals(state.kind)[:depth]
        mean = sum(survivals)
        return mean, sum((2 * j + 1) * s for j, s in enumerate(survivals)) - mean * mean

    def _learn_time(
        self, decision: Decision, verified: tuple[int, ...], drafted: tuple[int, ...], seconds: float
    ) -> None:
        num_rows = len(decision.rows)
        num_tokens = num_rows + sum(verified)
        deepest = max(drafted)
        cell = bucket(num_rows), deepest, bucket(num_tokens)
        prompts = decision.load.num_prompt_tokens
        model_seconds = self.model.target_seconds(num_tokens, decision.load._replace(num_prompt_tokens=0))
        if deepest:
            model_seconds += self._drafting_seconds(decision, drafted, deepest)
        if not prompts:
            self.served.observe(*cell, model_seconds, seconds)
            return
        predicted = self.model.prompt_seconds(num_tokens, prompts)
        if predicted > 0:
            left = seconds / self.served.drift - model_seconds * self.served.factor(*cell)
            self.served.observe_prompt(bucket(prompts), predicted, left)

    def _drafting_seconds(self, decision: Decision, drafted: tuple[int, ...], deepest: int) -> float:
        counts = Counter(zip([row.drafter for row in decision.rows], drafted, strict=True))
        key = frozenset(counts.items())
        known = self._drafting.get(key)
        if known is None:
            by_drafter: dict[str, list[int]] = {}
            for (name, depth), num in counts.items():
                rows = by_drafter.setdefault(name, [0] * deepest)
                for j in range(depth):
                    rows[j] += num
            known = sum(self.model.draft_seconds(rows, name) for name, rows in by_drafter.items())
            if len(self._drafting) >= _MANY:
                self._drafting.clear()
            self._drafting[key] = known
        return known

    def _learn_rate(self, observation: Observation, has_drafts: bool, seconds: float, now: int) -> None:
        """For the guard: rounds chosen to draft, and controls.

        Plain rounds of the warm-up are none: they come so close to each other that all of them would be
        paired with the same drafted rounds.
        """
        decision = observation.decision
        if decision.reason is not Reason.PAYS if has_drafts else not decision.is_control:
            return
        num_rows = len(decision.rows)
        num_tokens = num_rows + sum(observation.accepted)
        self.guard.observe(bucket(num_rows), not has_drafts, num_tokens, seconds, now)
