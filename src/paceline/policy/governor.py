"""The governor: at every step, the depth of each row that makes most tokens a second.

    choose the rows' depths to maximise  E - lambda T        E expected tokens, T expected seconds of the step

lambda is the *price* of a second: the best rate E / T that this load allows in steps without prompt tokens.
In such a step the rule is argmax E / T. In a step that prompt tokens make long it is not: that time has to
be spent whatever is drafted, and a token drafted now saves 1 / lambda seconds of some later step. (Fix how
many prompt steps there are per token made, and minimise the time per token: this rule comes out.)

On top of the choice, in this order: a load whose guard has tripped runs plain; depths without a served
price are warmed up; rows draft in the shadow while none drafts in earnest; controls are interleaved.
Between depths whose rates differ by less than the dead band, the one that ran stays, and a shallower one wins
against all that are not better by half of it. Rows with their own depth keep it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from paceline.policy.checks import check_depths, check_load
from paceline.policy.config import GovernorConfig
from paceline.policy.cost import CostModel
from paceline.policy.doubt import MOST, insurance
from paceline.policy.memory import Memory
from paceline.policy.plans import FEW, Plan, Plans, spread
from paceline.policy.scene import Scene, Stage
from paceline.policy.search import Choice, best_by_depth, group_depths, increments
from paceline.policy.served import bucket
from paceline.policy.types import Decision, Load, Observation, Reason, RowView
from paceline.policy.warmup import LONG, NUM_TRIED, Warmup, is_sure, reach

_MANY = 64  # rounds that are learnt from even if no choice is made
_MANY_ROWS = 1024  # of rounds of many rows: learning from more at once would be a pause
_FEW_REPEATS = 7  # of a decision, with few rows


class Governor:
    """Measured cost and measured acceptance, against each other.

    Args:
        costs: from a calibration; None: a prior, which the first rounds correct.
        depths: what a row may draft; 0 must be among them.

    Raises:
        PolicyError: 0 is not among the depths, or one is none.
    """

    def __init__(
        self,
        costs: CostModel | None = None,
        depths: tuple[int, ...] = (0, 1, 2, 3, 4),
        config: GovernorConfig | None = None,
    ) -> None:
        self._depths = check_depths(depths)
        self._config = config or GovernorConfig()
        self._memory = Memory(costs or CostModel.prior(), self._depths, self._config)
        self._stage = Stage(self._memory, self._depths, self._config.is_ragged)
        self._warmup = Warmup(self._depths)
        self._last_limit: dict[int, int] = {}  # deepest draft that was chosen, by site
        self._tried: Counter[int] = Counter()  # rounds of rows that went deeper to see how it is accepted
        self._plans = Plans(self._memory.rows, self._config.reuse)
        self._untaken: list[tuple[Observation, int]] = []  # rounds to learn from, and when they were decided
        self._num_rounds_taken = 0  # of them, those whose rows' acceptance is learnt already
        self._num_rows_untaken = 0  # in all of them
        self._now = 0
        self._num_since = 0  # rounds observed since the last decision: more than one where it was repeated
        self._site = -1

    @property
    def depths(self) -> tuple[int, ...]:
        """The declared depths."""
        return self._depths

    @property
    def num_rounds(self) -> int:
        """Decisions made."""
        return self._now

    @property
    def num_controls(self) -> int:
        """Of them, those that were controls."""
        return self._memory.guard.num_controls

    @property
    def num_trips(self) -> int:
        """How often the guard has tripped."""
        self._learn()
        return self._memory.guard.num_trips

    @property
    def drift(self) -> float:
        """How many times slower the machine has become since its costs were learnt."""
        self._learn()
        return self._memory.served.drift

    def acceptance(self, drafter: str = "") -> tuple[float, ...]:
        """a_1, a_2, ... of a drafter, over all rows."""
        self._learn()
        return self._memory.acceptance(self._memory.rows.drafter_of(drafter)).conditional

    def observe(self, observation: Observation) -> None:
        """Learn from a step that has run, before the next choice is made. See `types.Policy`.

        Several rounds at once: after a step nothing of this code is in the processor's caches, and what costs
        microseconds then costs a tenth for the rounds that follow at once. No more than make a short pause.
        """
        self._untaken.append((observation, self._now + self._num_since))
        self._num_since += 1
        self._num_rows_untaken += len(observation.accepted)
        if len(self._untaken) >= _MANY or self._num_rows_untaken >= _MANY_ROWS:
            self._learn()

    def _learn_rounds(self) -> None:
        begin, self._num_rounds_taken = self._num_rounds_taken, len(self._untaken)
        for observation, _ in self._untaken[begin:]:
            self._memory.observe_rounds(observation)

    def _learn(self) -> None:
        self._learn_rounds()
        untaken, self._untaken = self._untaken, []
        self._num_rounds_taken = self._num_rows_untaken = 0
        for observation, now in untaken:
            self._memory.observe(observation, now)

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        """The depths of the next step. See `types.Policy`.

        Raises:
            PolicyError: the load is of another number of rows, or none that can be.
        """
        check_load(load, len(rows))
        self._now += max(1, self._num_since)
        self._num_since = 0
        if len(rows) <= FEW:
            self._learn_rounds()
        codes = self._look(rows)
        known = self._good_plan(load, codes)
        if known is not None:
            reason = Reason.PAYS if known.choice.num_items else Reason.COSTS
            if reason is Reason.PAYS or not self._memory.shadows.is_due(self._now):
                return self._decision(load, codes, known, reason, is_lasting=not load.num_prompt_tokens)
            self._learn()
            return self._rest(self._stage.scene(load, codes), known, reason)
        self._learn()
        codes = self._look(rows)
        scene = self._stage.scene(load, codes)
        if scene.site != self._site:
            self._site = scene.site
            self._memory.shadows.wake(self._now)
        plan = self._choose(scene)
        if not scene.free:
            has_pins = any(view.pinned is not None for view in rows)
            return self._decision(load, codes, plan, Reason.PINNED if has_pins else Reason.CAPACITY)
        return self._on_top(scene, self._plans.keep(load, codes, plan, self._now))

    def _look(self, rows: tuple[RowView, ...]) -> list[int]:
        """The codes of these rows."""
        self._memory.rows.take(rows)
        return self._memory.rows.codes()

    def _good_plan(self, load: Load, codes: list[int]) -> Plan | None:
        """The plan that holds for this step, if there is one and nothing but a shadow is due in it."""
        now, memory = self._now, self._memory
        plan = self._plans.find(load, codes, now)
        if plan is None:
            return None
        is_clean = not load.num_prompt_tokens and min(codes) >= 0
        if is_clean and self._config.warms_up and self._warmup.is_due(plan.site, now):
            return None
        if plan.choice.num_items and (
            memory.guard.is_tripped(plan.site, now) or memory.guard.wants_control(plan.site, now)
        ):
            return None
        return self._plans.extended(plan, codes)

    def _choose(self, scene: Scene) -> Plan:
        """The best choice, or the one that ran before if it is nearly as good."""
        items = increments(self._stage.groups(scene), self._depths) if scene.free else []
        calm = scene.prices
        if scene.load.num_prompt_tokens:
            calm = self._stage.prices(scene.load._replace(num_prompt_tokens=0), scene.site)
        choices = best_by_depth(items, scene.base, calm, self._depths, margin=self._config.dead_band)
        price = max(choice.expected / choice.seconds for choice in choices)
        if calm is not scene.prices:
            near = [choice.limit for choice in choices]
            choices = best_by_depth(items, scene.base, scene.prices, near, price)
        worth = [choice.expected - price * choice.seconds for choice in choices]
        best = worth.index(max(worth))
        last = self._last_limit.get(scene.site, 0)
        for i, choice in enumerate(choices):
            least = worth[best] - self._config.dead_band * choice.expected
            if choice.limit == last and worth[i] > least:
                best = i
        # What is told of the best is told of the best of many guesses, and deeper ones rest on more of them.
        best = next(
            i
            for i, choice in enumerate(choices)
            if i == best or worth[i] > max(worth) - self._config.dead_band / 2 * choice.expected
        )
        chosen = choices[best]
        self._last_limit[scene.site] = chosen.limit
        if self._config.is_ragged:
            found = group_depths(items, chosen, len(scene.free))
            depths = {code: of for (code, _), of in zip(scene.free, found, strict=True)}
        else:
            depths = self._same(scene, chosen.limit)
        return Plan(scene.site, depths | self._own(scene), chosen, choices[0])

    def _same(self, scene: Scene, depth: int) -> dict[int, tuple[int, int, int]]:
        """The same depth for all rows that have none of their own, as far as they have room."""
        return {
            code: (min(depth, spelled.depth), 0, min(depth, spelled.depth)) for code, spelled in scene.free
        }

    def _own(self, scene: Scene) -> dict[int, tuple[int, int, int]]:
        spelled = {code: self._memory.rows.decode(code) for code in scene.numbers if code < 0}
        return {code: (own.depth, 0, own.depth) for code, own in spelled.items()}

    def _on_top(self, scene: Scene, plan: Plan) -> Decision:
        """What overrules the choice."""
        load, codes, guard = scene.load, scene.codes, self._memory.guard
        plain = plan._replace(depths=self._same(scene, 0) | self._own(scene), choice=plan.plain)
        if plan.choice.num_items and guard.is_tripped(scene.site, self._now):
            return self._rest(scene, plain, Reason.GUARD)
        depth = self._warmup_depth(scene, plan.choice)
        if depth is not None:
            warm = plan._replace(depths=self._same(scene, depth), choice=self._stage.uniform(scene, depth))
            return self._decision(load, codes, warm, Reason.WARMUP)
        if not plan.choice.num_items:
            return self._rest(scene, plain, Reason.COSTS)
        self._memory.shadows.stop()
        is_clean = not load.num_prompt_tokens and not any(scene.base.rows)
        if is_clean and guard.wants_control(scene.site, self._now):
            guard.spend(self._now)
            return self._decision(load, codes, plain, Reason.GUARD, is_control=True)
        return self._decision(load, codes, plan, Reason.PAYS, is_lasting=not load.num_prompt_tokens)

    def _rest(self, scene: Scene, plain: Plan, reason: Reason) -> Decision:
        """No row drafts in earnest; some may in the shadow."""
        shadow: tuple[int, ...] = ()
        shadows, states = self._memory.shadows, self._memory.rows.states
        if shadows.is_due(self._now):
            deep = {code for code, spelled in scene.free if spelled.depth == self._depths[-1]}
            allowed = [i for i, code in enumerate(scene.codes) if code in deep]
            shadow = shadows.plan(
                self._now,
                keys=[state.view.key for state in states],
                order=sorted(allowed, key=lambda i: states[i].reached),
                depth=self._depths[-1],
                seconds_of=lambda num: self._stage.shadow_seconds(scene, num),
            )
            if shadows.take_good_news():
                self._plans.clear()
                self._memory.doubt_acceptance({spelled.drafter for _, spelled in scene.free})
        if shadow and reason is Reason.COSTS:
            reason = Reason.PROBE
        is_lasting = not shadow and not scene.load.num_prompt_tokens
        return self._decision(scene.load, scene.codes, plain, reason, shadow, is_lasting=is_lasting)

    def _warmup_depth(self, scene: Scene, choice: Choice) -> int | None:
        """The depth to run so as to learn what it costs or yields; None: nothing is to be learnt now."""
        site, now = scene.site, self._now
        is_clean = len(scene.free) == len(scene.numbers) and not scene.load.num_prompt_tokens
        if not (self._config.warms_up and is_clean and self._warmup.is_due(site, now)):
            return None
        memory, served = self._memory, self._memory.served
        best = choice.expected / choice.seconds
        is_known = all(memory.acceptance(spelled.drafter).is_known for _, spelled in scene.free)

        def rate(depth: int, is_optimistic: bool) -> float:
            uniform = self._stage.uniform(scene, depth, is_optimistic)
            return uniform.expected / uniform.seconds

        def num_visits(depth: int) -> int:
            tokens = self._stage.uniform(scene, depth).num_tokens
            return served.num_rounds(site, depth, bucket(tokens))

        def may_pay(depth: int) -> bool:
            num, noise = num_visits(depth), served.noise
            if num and not is_sure(num, served.surprises.get(depth, {}).get(site, 0.0), noise):
                return True
            # Costs of drafting that are wrong alike confirm each other, and plain decoding is the promise.
            trust = insurance(served.surprises, depth, memory.model.is_measured) if depth else MOST
            hoped = rate(depth, not (num or is_known)) * reach(num, trust, noise)
            return hoped > (1 + self._config.dead_band) * best

        def in_doubt() -> int | None:
            if choice.num_items:
                return self._deeper(choice, len(scene.codes), lambda depth: rate(depth, True) / best)
            if is_known:
                return None
            return next((depth for depth in self._depths if rate(depth, True) > best), None)

        def gap(depth: int) -> float | None:
            uniform = self._stage.uniform(scene, depth)
            if depth == choice.limit and uniform.num_tokens == choice.num_tokens:
                return None
            return 1 - uniform.expected / uniform.seconds / best

        return self._warmup.depth(site, now, num_visits, may_pay, in_doubt, gap)

    def _deeper(self, choice: Choice, num_rows: int, hope: Callable[[int], float]) -> int | None:
        """The next deeper depth, if its last drafts were rarely tried and may be better than they seem.

        Nothing that is chosen teaches how they are accepted.
        """
        depth = next((depth for depth in self._depths if depth > choice.limit), None)
        if depth is None or self._tried[depth] >= NUM_TRIED or hope(depth) <= 1 + self._config.dead_band:
            return None
        self._tried[depth] += LONG * num_rows
        return depth

    def _num_repeats(self, plan: Plan, num_rows: int) -> int:
        """How many rounds more a plan is good for."""
        last = plan.until
        if num_rows <= FEW:
            last = min(last, self._now + _FEW_REPEATS)
        if self._config.warms_up:
            last = min(last, self._warmup.next_at(plan.site, self._now + 1) - 1)
        return max(0, last - self._now)

    def _decision(
        self,
        load: Load,
        codes: list[int],
        plan: Plan,
        reason: Reason,
        shadow: tuple[int, ...] = (),
        is_control: bool = False,
        is_lasting: bool = False,
    ) -> Decision:
        drift = self._memory.served.drift
        return Decision(
            load=load,
            rows=self._memory.rows.views,
            depths=spread(plan.depths, codes),
            reason=reason,
            shadow=shadow,
            shadow_depth=self._depths[-1] if shadow else 0,
            is_control=is_control,
            predicted_tokens=plan.choice.expected,
            predicted_seconds=plan.choice.seconds * drift,
            plain_seconds=plan.plain.seconds * drift,
            repeat=self._num_repeats(plan, load.num_rows) if is_lasting else 0,
        )
