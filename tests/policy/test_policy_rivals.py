"""The rules of other servers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.policy import (
    AcceptanceEma,
    BatchTable,
    Fixed,
    Load,
    Observation,
    Policy,
    PolicyError,
    Reason,
    RowView,
    Threshold,
)


def depth(policy: Policy, num_rows: int, accepted: int = 0) -> int:
    """The depth of a round, which is observed."""
    rows = tuple(RowView(i, 8) for i in range(num_rows))
    decision = policy.decide(Load(num_rows, 10), rows)
    policy.observe(Observation(decision, tuple(min(accepted, d) for d in decision.depths), None))
    assert len(set(decision.depths)) <= 1
    return decision.depth


def test_fixed() -> None:
    assert [depth(Fixed(3), b) for b in (1, 100)] == [3, 3]
    decision = Fixed(3).decide(Load(3, 0), (RowView(1, 2), RowView(2, 8, 5), RowView(3, 8)))
    assert (decision.depths, decision.reason) == ((2, 5, 3), Reason.PAYS)
    assert Fixed(0).decide(Load(1, 0), (RowView(1, 2),)).reason is Reason.COSTS
    assert Fixed(2).decide(Load(1, 0), (RowView(1, 2, 1),)).reason is Reason.PINNED
    assert Fixed(2).decide(Load(1, 0), (RowView(1, 0),)).reason is Reason.CAPACITY


def test_a_table_as_vllm_reads_it() -> None:
    table = BatchTable([(1, 4, 3), (9, 16, 1), (17, 32, 0)])
    assert [depth(table, b) for b in (1, 4, 5, 8, 9, 16, 17, 33)] == [3, 3, 3, 3, 1, 1, 0, 0]
    assert depth(table, 0) == 0


def test_a_schedule_as_tensorrt_llm_reads_it() -> None:
    table = BatchTable.from_upper_bounds({4: 4, 8: 2, 32: 1})
    assert [depth(table, b) for b in (1, 4, 5, 8, 9, 32, 33, 500)] == [4, 4, 2, 2, 1, 1, 0, 0]


def test_a_threshold_has_hysteresis() -> None:
    policy = Threshold(3, off_above=8, on_below=5)
    assert [depth(policy, b) for b in (4, 8, 9, 8, 5, 4, 8)] == [3, 3, 0, 0, 0, 3, 3]


class TestAcceptanceEma:
    def test_it_climbs_while_all_is_accepted_and_falls_when_nothing_is(self) -> None:
        policy = AcceptanceEma()
        assert depth(policy, 1) == 5
        for _ in range(60):
            up = depth(policy, 1, accepted=8)
        assert up == 7
        for _ in range(60):
            down = depth(policy, 1, accepted=0)
        assert down == 1

    def test_it_does_not_ask_what_drafting_costs(self) -> None:
        """With good acceptance 40 rows draft, whatever that does to the machine."""
        policy = AcceptanceEma()
        assert {depth(policy, 40, accepted=1) for _ in range(100)} == {1}
        assert {depth(policy, 64, accepted=1) for _ in range(100)} == {0}

    def test_at_zero_it_probes_for_ever(self) -> None:
        """Half of all rounds at hopeless acceptance, in runs of five."""
        policy = AcceptanceEma()
        depths = [depth(policy, 30, accepted=0) for _ in range(2000)]
        switches = sum(a != b for a, b in pairwise(depths))
        assert 0.45 < sum(map(bool, depths)) / len(depths) < 0.55
        assert switches == pytest.approx(397, abs=10)  # as measured with the real one

    def test_a_slot_that_began_at_zero_starts_neutral(self) -> None:
        policy = AcceptanceEma({1: (0,), 2: (0, 3, 5)}, down={})
        assert depth(policy, 1) == 0
        assert [depth(policy, 2, accepted=4) for _ in range(40)][-1] == 5
        lonely = AcceptanceEma({1: (0, 2)}, down={}, warmup=0, interval=1)
        slot = lonely._slot(1)
        slot.depth, slot._mean = 0, -1.0
        depth(lonely, 1)
        assert (slot.depth, slot._mean) == (2, 1.0)

    def test_no_rows_are_no_batch(self) -> None:
        policy = AcceptanceEma()
        policy.observe(Observation(policy.decide(Load(0, 0), ()), (), None))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(-1),
        lambda: BatchTable([]),
        lambda: BatchTable([(2, 3, 1)]),
        lambda: BatchTable([(1, 4, 1), (4, 8, 0)]),
        lambda: BatchTable([(1, 4, -1)]),
        lambda: Threshold(0, 4, 4),
        lambda: Threshold(1, 4, 6),
        lambda: Threshold(1, -1, 0),
        lambda: AcceptanceEma({8: (0, 1)}),
        lambda: AcceptanceEma({1: ()}),
    ],
)
def test_nonsense_is_refused(make: type) -> None:
    with pytest.raises(PolicyError):
        make()


@pytest.mark.parametrize("policy", [Fixed(1), BatchTable([(1, 1, 1)]), Threshold(1, 1, 1), AcceptanceEma()])
def test_the_load_must_be_of_the_rows(policy: Policy) -> None:
    with pytest.raises(PolicyError, match="3 rows"):
        policy.decide(Load(3, 0), (RowView(1, 1),))
