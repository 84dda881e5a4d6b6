"""The governor against a server whose truth it does not know."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_simulator import COMMON, TRUTH, Server, same

from paceline.policy import (
    AcceptanceConfig,
    CostModel,
    Curve,
    Governor,
    GovernorConfig,
    Load,
    Observation,
    PolicyError,
    Reason,
    RowView,
    ShadowResult,
)
from paceline.policy import rows as rows_module
from paceline.policy.memory import Memory
from paceline.policy.warmup import FAR_BEHIND, SPACING_AGAIN

EASY, HOPELESS = (0.9, 0.9, 0.9, 0.9), (0.03, 0.03, 0.03, 0.03)


def lying(num_rows: int, plain: float = 1.0, drafted: float = 1.0) -> CostModel:
    """`TRUTH`, but steps of up to `num_rows` tokens cost `plain` times what they do, others `drafted`."""
    sizes = sorted({*range(1, 65), num_rows, 128, 256, 512})
    return CostModel(
        tokens=Curve([(n, TRUTH.tokens(n) * (plain if n <= num_rows else drafted)) for n in sizes]),
        drafts={"": tuple(Curve([(n, drafted * s) for n, s in c.points]) for c in TRUTH.drafts[""])},
        row_seconds=TRUTH.row_seconds,
        context_seconds=TRUTH.context_seconds,
    )


def prior(chance: float) -> GovernorConfig:
    """As sure of a chance as a hundred rounds would make it."""
    return GovernorConfig(acceptance=AcceptanceConfig(prior=chance, prior_weight=100))


class TestLies:
    """A loss of less than 5 % against the best fixed depth after 200 rounds, whatever it was told."""

    @pytest.mark.parametrize("num_rows", [1, 3, 16])
    @pytest.mark.parametrize("chances", [(0.3, 0.35, 0.4, 0.4), (0.6, 0.6, 0.65, 0.7), (0.85,) * 4], ids=str)
    @pytest.mark.parametrize(
        "lie",
        ["none", "no calibration", "plain x 3", "plain / 3", "drafted x 3", "drafted / 3", "a x 3", "a / 3"],
    )
    def test_the_loss_is_small(self, num_rows: int, chances: tuple[float, ...], lie: str) -> None:
        model: CostModel | None = {
            "plain x 3": lying(num_rows, plain=3),
            "plain / 3": lying(num_rows, plain=1 / 3),
            "drafted x 3": lying(num_rows, drafted=3),
            "drafted / 3": lying(num_rows, drafted=1 / 3),
            "no calibration": None,
        }.get(lie, TRUTH)
        config = {"a x 3": prior(min(0.95, 3 * chances[0])), "a / 3": prior(chances[0] / 3)}.get(lie)
        server = Server(Governor(model, config=config), chances=same(*chances), seed=num_rows, repeats=1)
        server.run(200, num_rows)
        assert server.against_best(300, num_rows) > 0.95


@pytest.mark.parametrize("seed", range(8))
def test_drafting_that_is_dearer_than_told_at_every_depth_is_compared_with_plain_decoding_early(
    seed: int,
) -> None:
    """Its depths confirm each other: only a plain round shows that the machine has not become slower."""
    server = Server(Governor(lying(16, drafted=1 / 3)), chances=same(0.3, 0.35, 0.4, 0.4), seed=seed)
    server.run(200, 16)
    assert server.against_best(300, 16) > 0.95


def test_rounds_of_a_repeated_decision_count_as_any() -> None:
    governor = Governor(TRUTH)
    server, asked = Server(governor, repeats=1), []
    decide = governor.decide
    governor.decide = lambda load, rows: asked.append(load) or decide(load, rows)  # type: ignore[method-assign]
    server.run(800, 2)
    assert 0 <= 800 - governor.num_rounds < GovernorConfig().reuse
    assert len(asked) < 300
    assert server.against_best(400, 2) > 0.95


@pytest.mark.parametrize("num_rows", [1, 4, 20, 64, 256])
def test_no_step_waits_for_learning_from_a_thousand_rows(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[int] = []
    observe = Memory.observe

    def count(memory: Memory, observation: Observation, now: int) -> None:
        learnt[-1] += len(observation.accepted)
        observe(memory, observation, now)

    monkeypatch.setattr(Memory, "observe", count)
    governor = Governor(TRUTH)
    server, decide, take_in = Server(governor), governor.decide, governor.observe
    governor.decide = lambda *load: learnt.append(0) or decide(*load)  # type: ignore[method-assign]
    governor.observe = lambda round: learnt.append(0) or take_in(round)  # type: ignore[method-assign]
    server.run(300, num_rows)
    assert sum(learnt) > 200 * num_rows
    assert max(learnt) < 1024 + num_rows


GPU = CostModel(
    tokens=Curve([(n, 0.008 + n * 0.0012 / 64) for n in (1, 64, 256, 1024, 2048)]),
    drafts={"": (Curve([(1, 0.0005), (512, 0.0015)]),) * 4},
    row_seconds=1e-6,
    context_seconds=1e-9,
)


def test_rows_that_turn_out_good_between_choices_go_on_drafting() -> None:
    """If they did not, acceptance would be learnt from the bad ones, and drafting end."""
    governor = Governor(GPU)
    rows = tuple(RowView(i, 4) for i in range(256))
    for _ in range(40):
        decision = governor.decide(Load(256, 25_600), rows)
        assert decision.reason in (Reason.PAYS, Reason.WARMUP)
        if decision.reason is Reason.PAYS:
            assert min(decision.depths[:128]) >= max(1, *decision.depths[128:])
        accepted = tuple(depth if i < 128 else 0 for i, depth in enumerate(decision.depths))
        seconds = GPU.step_seconds(decision.load, [("", depth) for depth in decision.depths])
        governor.observe(Observation(decision, accepted, seconds))


@pytest.mark.parametrize(("num_rows", "seed"), [(256, 2), (256, 4), (64, 1)])
@pytest.mark.parametrize("is_read", [False, True])
def test_many_rows_of_four_kinds(num_rows: int, seed: int, is_read: bool) -> None:
    """Above the best fixed depth, also if what was learnt is asked for after every round."""
    governor = Governor(GPU)
    if is_read:
        take_in = governor.observe
        governor.observe = lambda round: take_in(round) or governor.drift  # type: ignore[assignment,func-returns-value,method-assign]
    chances = [(chance,) * 4 for chance in (0.9, 0.6, 0.2, 0.05)]
    server = Server(governor, GPU, chances=lambda request: chances[request % 4], seed=seed)
    server.run(100, num_rows)
    assert server.against_best(200, num_rows) > 1.05


class TestLoad:
    @pytest.mark.parametrize(("lag", "repeats"), [(0, 0), (1, 0), (0, 1), (1, 1)])
    def test_back_at_the_right_depth_as_soon_as_the_load_leaves(self, lag: int, repeats: int) -> None:
        """Four minutes at 48 requests, served at depth 0; before that, a short while alone."""
        server = Server(Governor(TRUTH), lag=lag, repeats=repeats)
        server.run(150, 1)
        server.run(3000, 48)
        assert sum(server.times[150:]) > 180
        assert Counter(d.depth for d in server.decisions[1000:])[0] > 1800
        begin = len(server.decisions)
        server.run(60, 1)
        good = {k for k in range(5) if server.true_rate(1, k) > 0.95 * server.true_rate(1, server.best(1))}
        assert good == {2, 3}
        assert Counter(d.depth for d in server.decisions[begin + 10 :]).most_common(1)[0][0] in good
        assert sum(d.depth in good for d in server.decisions[begin : begin + 10]) >= 6

    def test_acceptance_that_changes_while_off_is_noticed(self) -> None:
        chances = [HOPELESS]
        server = Server(Governor(TRUTH), chances=lambda request: chances[0])
        server.run(400, 24)
        assert Counter(d.depth for d in server.decisions[200:])[0] > 190
        chances[0] = EASY
        server.run(1600, 24)
        assert Counter(d.depth for d in server.decisions[-200:])[0] < 30
        assert server.against_best(300, 24) > 0.95

    def test_and_when_it_becomes_hopeless_drafting_stops(self) -> None:
        chances = [EASY]
        server = Server(Governor(TRUTH), chances=lambda request: chances[0])
        server.run(300, 2)
        chances[0] = HOPELESS
        server.run(250, 2)
        assert server.against_best(200, 2) > 0.95

    def test_a_slower_machine_changes_nothing(self) -> None:
        governor = Governor(TRUTH)
        server = Server(governor)
        server.run(300, 2)
        server.truth = replace(
            TRUTH,
            tokens=Curve([(n, 2 * s) for n, s in TRUTH.tokens.points], TRUTH.tokens.stairs),
            drafts={"": tuple(Curve([(n, 2 * s) for n, s in c.points]) for c in TRUTH.drafts[""])},
        )
        server.run(100, 2)
        assert server.against_best(200, 2) > 0.97
        assert governor.drift == pytest.approx(1.8, abs=0.25)


class TestBounds:
    def test_shadows_cost_at_most_three_in_a_thousand(self) -> None:
        server = Server(Governor(TRUTH), chances=same(*HOPELESS))
        server.run(2500, 16)
        spent = sum(TRUTH.draft_seconds([len(d.shadow)] * d.shadow_depth) for d in server.decisions)
        assert 0 < spent / sum(server.times) <= 0.003
        assert all(d.reason is Reason.PROBE for d in server.decisions if d.shadow)
        assert all(d.depth == 0 for d in server.decisions if d.shadow)

    def test_controls_are_at_most_five_in_a_thousand(self) -> None:
        server = Server(Governor(TRUTH))
        server.run(3000, 1)
        controls = [d.is_control for d in server.decisions]
        assert 0 < sum(controls) <= 0.005 * len(controls)
        assert all(d.depth == 0 for d in server.decisions if d.is_control)

    def test_warm_up_ends_but_for_close_rivals_now_and_then(self) -> None:
        server = Server(Governor(TRUTH))
        server.run(1500, 4)
        late = [d.reason is Reason.WARMUP for d in server.decisions[600:]]
        assert 0 < sum(late) <= 900 / SPACING_AGAIN
        best = server.true_rate(4, server.best(4))
        again = {d.depth for d in server.decisions[600:] if d.reason is Reason.WARMUP}
        assert all(server.true_rate(4, depth) > (1 - FAR_BEHIND) * best for depth in again)

    @pytest.mark.parametrize("num_rows", [1, 3, 8])
    def test_with_a_reuse_of_one_every_step_is_chosen_anew(
        self, num_rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        governor, chosen = Governor(TRUTH, config=GovernorConfig(reuse=1)), []
        choose = governor._choose
        monkeypatch.setattr(governor, "_choose", lambda scene: chosen.append(scene) or choose(scene))
        Server(governor, repeats=1).run(100, num_rows)
        assert len(chosen) == governor.num_rounds == 100

    def test_no_warm_up_if_it_is_not_wanted(self) -> None:
        server = Server(Governor(TRUTH, config=GovernorConfig(warms_up=False)))
        server.run(200, 4)
        assert server.share(Reason.WARMUP) == 0


class TestGuard:
    def test_a_policy_that_is_told_lies_for_ever_loses_little(self) -> None:
        """It hears that drafts are free and always right; only the clock and the words say otherwise."""
        governor = Governor(TRUTH, config=GovernorConfig(warms_up=False))

        class Flattered(Server):
            def round(self, num_rows: int, num_prompt_tokens: int = 0):  # type: ignore[no-untyped-def]
                decision = super().round(num_rows, num_prompt_tokens)
                governor._memory.acceptance(0).add([(governor._memory.rows.states[0], 4, 4)] * 50)
                return decision

        server = Flattered(governor, chances=same(*HOPELESS))
        server.run(1500, 2)
        assert governor.num_trips >= 1
        assert server.against_best(3000, 2) > 0.85
        assert server.share(Reason.GUARD) > 0.5

    def test_it_lets_go_again(self) -> None:
        server = Server(Governor(TRUTH))
        server.run(200, 1)
        site = server.policy._memory.guard._sites[1]  # type: ignore[attr-defined]
        site.blocked_until = 400
        server.run(150, 1)
        assert {d.reason for d in server.decisions[201:300]} == {Reason.GUARD}
        server.run(200, 1)
        assert server.decisions[-1].reason is Reason.PAYS


class TestRagged:
    def test_rows_that_differ_get_different_depths(self) -> None:
        def mixed(request: int) -> tuple[float, ...]:
            return EASY if request % 2 else HOPELESS

        server = Server(Governor(TRUTH), chances=mixed)
        server.run(200, 2)
        assert server.against_best(300, 2) > 1.1
        assert server.decisions[-1].depths[0] < server.decisions[-1].depths[1]
        uniform = Server(Governor(TRUTH, config=GovernorConfig(is_ragged=False)), chances=mixed)
        uniform.run(200, 2)
        assert uniform.against_best(300, 2) > 0.97
        assert all(len(set(d.depths)) == 1 for d in uniform.decisions)

    def test_prompts_are_priced(self) -> None:
        """Beside a prompt a token more has no stair to climb: rows draft that would not in a step alone."""
        server = Server(Governor(TRUTH))
        server.run(300, 5)
        alone = server.round(5)
        beside = server.round(5, num_prompt_tokens=256)
        assert sum(beside.depths) > sum(alone.depths)
        assert beside.predicted_seconds is not None
        assert beside.predicted_seconds > 0.2

    @pytest.mark.parametrize("lie", [1 / 1.45, 1.45])
    def test_a_wrong_price_of_prompts_is_corrected(self, lie: float) -> None:
        governor = Governor(TRUTH)
        server = Server(governor, noise=0.02)
        server.run(100, 3)
        wrong = replace(
            TRUTH, tokens=Curve([(n, s * (lie if n > 64 else 1)) for n, s in TRUTH.tokens.points])
        )
        server.truth = wrong
        for _ in range(30):
            decision = server.round(3, num_prompt_tokens=256)
            server.round(3)
        assert decision.predicted_seconds == pytest.approx(server.times[-2], rel=0.1)
        assert governor.drift == pytest.approx(1, abs=0.1)

    def test_prompts_that_should_cost_nothing_teach_nothing(self) -> None:
        free = replace(TRUTH, prompt=Curve([(0, 0.0), (1, -1.0), (512, -1.0)]))
        governor = Governor(free)
        decision = governor.decide(Load(1, 100, 8), (RowView(0, 4),))
        governor.observe(Observation(decision, (0,), 0.02))
        assert governor._memory.served.prompt_factor(1, 7) == 1.0


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_never_a_depth_that_is_not_declared_or_has_no_room(data: st.DataObject) -> None:
    depths = data.draw(st.sampled_from([(0, 1, 3), (0, 2), (0, 1, 2, 3, 4), (0, 5)]))
    governor = Governor(TRUTH, depths=depths, config=GovernorConfig(is_ragged=data.draw(st.booleans())))
    draw = random.Random(data.draw(st.integers(0, 1000)))
    for _ in range(40):
        rows = tuple(
            RowView(
                draw.randrange(12),
                draw.choice([0, 1, 2, 3, 4, 9]),
                draw.choice([None, None, None, 0, 1, 2, 7]),
                draw.choice(["", "ngram"]),
            )
            for _ in range(draw.randrange(7))
        )
        rows = tuple({row.key: row for row in rows}.values())
        decision = governor.decide(Load(len(rows), 100 * len(rows), draw.choice([0, 0, 64])), rows)
        assert decision.rows == rows
        for row, depth in zip(rows, decision.depths, strict=True):
            assert depth in depths
            assert depth <= row.max_depth
            if row.pinned is not None:
                assert depth == max(d for d in depths if d <= min(row.pinned, row.max_depth))
        assert all(rows[i].pinned is None and rows[i].max_depth >= depths[-1] for i in decision.shadow)
        accepted = tuple(draw.randint(0, depth) for depth in decision.depths)
        seconds = None if draw.random() < 0.2 else 0.01 * (1 + draw.random())
        cut = tuple(i for i in range(len(rows)) if draw.random() < 0.1)
        shadows = tuple(ShadowResult(rows[i].key, draw.randrange(50), depths[-1], 0) for i in decision.shadow)
        governor.observe(Observation(decision, accepted, seconds, cut=cut, shadows=shadows))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.permutations(range(6)))
def test_the_order_of_rows_does_not_matter(seed: int, order: list[int]) -> None:
    """Two governors see the same rounds, one with its rows in another order."""
    draw = random.Random(seed)
    one, other = Governor(TRUTH), Governor(TRUTH)
    rows = tuple(RowView(i, 4 if i else 2) for i in range(6))
    turned = tuple(rows[i] for i in order)
    for _ in range(60):
        load = Load(6, 600)
        a, b = one.decide(load, rows), other.decide(load, turned)
        assert a.reason is b.reason
        assert sorted(a.depths) == sorted(b.depths)
        assert a.predicted_seconds == pytest.approx(b.predicted_seconds)
        accepted = {
            row.key: min(depth, draw.randint(0, 4)) for row, depth in zip(rows, a.depths, strict=True)
        }
        seconds = 0.01 * draw.gauss(1, 0.05)
        one.observe(Observation(a, tuple(accepted[row.key] for row in rows), seconds))
        b_depths = {row.key: depth for row, depth in zip(rows, a.depths, strict=True)}
        other.observe(
            Observation(
                b,
                tuple(accepted[row.key] for row in turned),
                seconds,
                verified=tuple(b_depths[row.key] for row in turned),
            )
        )


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 0.9), st.floats(0, 0.09), st.sampled_from([1, 2, 3, 5, 8, 16]))
def test_better_acceptance_never_turns_drafting_off_nor_lowers_the_rate(
    chance: float, more: float, num_rows: int
) -> None:
    decisions = []
    for prior_chance in (chance, chance + more):
        governor = Governor(TRUTH, config=prior(prior_chance))
        rows = tuple(RowView(i, 4) for i in range(num_rows))
        decisions.append(governor.decide(Load(num_rows, 100 * num_rows), rows))
    worse, better = decisions
    assert worse.depth == 0 or better.depth > 0
    assert worse.predicted_gain is not None
    assert better.predicted_gain is not None
    assert better.predicted_gain >= worse.predicted_gain - 1e-9


@pytest.mark.parametrize(("gain", "depth"), [(1.005, 1), (1.03, 2)])
def test_a_deeper_depth_that_is_hardly_better_is_left(gain: float, depth: int) -> None:
    """With a half at every position: 1.5 tokens in 1.2 s, or 1.75 at a rate of `gain` times that."""
    seconds = 1.75 / (1.5 / 1.2 * gain)
    costs = CostModel(
        tokens=Curve([(1, 1.0), (2, 1.1), (3, seconds - 0.2)]), drafts={"": (Curve([(1, 0.1)]),) * 2}
    )
    governor = Governor(costs, depths=(0, 1, 2), config=replace(prior(0.5), warms_up=False))
    assert governor.decide(Load(1, 10), (RowView(0, 2),)).depths == (depth,)


def test_it_is_deterministic() -> None:
    runs = [Server(Governor(TRUTH), seed=4) for _ in range(2)]
    for server in runs:
        server.run(400, 5)
    assert [d.depths for d in runs[0].decisions] == [d.depths for d in runs[1].decisions]


class TestReasons:
    def test_pins_and_room(self) -> None:
        governor = Governor(TRUTH)
        pinned = governor.decide(Load(2, 0), (RowView("a", 4, 2), RowView("b", 1, 3)))
        assert (pinned.depths, pinned.reason) == ((2, 1), Reason.PINNED)
        full = governor.decide(Load(1, 0), (RowView("a", 0),))
        assert (full.depths, full.reason) == ((0,), Reason.CAPACITY)
        assert governor.decide(Load(0, 0), ()).reason is Reason.CAPACITY

    def test_a_pinned_row_among_others(self) -> None:
        governor = Governor(TRUTH)
        server = Server(governor)
        server.views[0] = RowView(0, 4, 3)
        server.run(400, 2)
        assert all(d.depths[0] == 3 for d in server.decisions)
        assert governor.num_controls == 0

    def test_rounds_and_their_predictions(self) -> None:
        server = Server(Governor(TRUTH))
        server.run(200, 1)
        last = server.decisions[-1]
        assert last.predicted_seconds == pytest.approx(
            TRUTH.step_seconds(last.load, [("", last.depth)]), rel=0.1
        )
        assert last.predicted_gain == pytest.approx(
            server.true_rate(1, last.depth) / server.true_rate(1, 0), rel=0.15
        )
        assert server.policy.num_rounds == 200  # type: ignore[attr-defined]
        assert server.policy.depths == (0, 1, 2, 3, 4)  # type: ignore[attr-defined]
        assert server.policy.acceptance()[0] == pytest.approx(0.6, abs=0.12)  # type: ignore[attr-defined]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(PolicyError, match="begin at 0"):
        Governor(depths=(1, 2))
    with pytest.raises(PolicyError, match="a depth must be 0 to 256, got -1"):
        Governor(depths=(-1, 0))
    with pytest.raises(PolicyError, match="2 rows"):
        Governor().decide(Load(2, 0), (RowView(1, 1),))
    with pytest.raises(PolicyError, match="dead_band"):
        GovernorConfig(dead_band=1)
    with pytest.raises(PolicyError, match="reuse"):
        GovernorConfig(reuse=0)


def test_requests_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_MANY", 8)
    governor = Governor(TRUTH)
    late = None
    for i in range(50):
        decision = governor.decide(Load(1, 10), (RowView(i, 4),))
        late = late or decision
        governor.observe(Observation(decision, (0,), 0.01))
    assert len(governor._memory.rows._known) <= 10
    result = ShadowResult(0, 3, 4, 1)
    governor.observe(
        Observation(late, (0,), None, verified=(1,), drafted=(1,), shadows=(result, result._replace(start=5)))
    )


def test_depth_zero_alone_is_a_policy_too() -> None:
    server = Server(Governor(TRUTH, depths=(0,)), chances=COMMON)
    server.run(50, 2)
    assert {d.depth for d in server.decisions} == {0}


class TestOddities:
    """What a loop may do, and costs may be, that no server of ours does."""

    def _round(self, governor: Governor, num_prompt_tokens: int = 0, **more: object) -> Observation:
        rows = (RowView("a", 4), RowView("b", 4))
        decision = governor.decide(Load(2, 200, num_prompt_tokens), rows)
        return Observation(decision, (0,) * 2, 0.01, **more)  # type: ignore[arg-type]

    def test_rounds_are_learnt_from_though_nobody_asks_again(self) -> None:
        governor = Governor(TRUTH)
        observation = self._round(governor)
        for _ in range(1000):
            governor.observe(observation)
        assert len(governor._untaken) < 100

    def test_shadows_of_a_row_that_nobody_knows_say_nothing(self) -> None:
        told, other = Governor(TRUTH), Governor(TRUTH)
        for start in (5, 7, 9):
            told.observe(self._round(told, shadows=(ShadowResult("nobody", start, 4, 1),)))
            other.observe(self._round(other))
        assert told.acceptance() == other.acceptance()

    def test_prompt_tokens_that_seem_to_cost_less_than_nothing_correct_nothing(self) -> None:
        costs = replace(TRUTH, prompt=Curve([(0, 0.0), (16, -1.0)]))
        governor = Governor(costs)
        governor.observe(self._round(governor, num_prompt_tokens=16))
        assert governor.drift == 1.0
        assert governor._memory.served.prompt_factor(1, 5) == 1.0
