"""Any interleaving of arrivals, aborts and steps, on any sizes: nothing lost, no word changed."""

import hypothesis.strategies as st
from engine_driver import Driver, make_request
from fake_worker import VOCAB_SIZE, hashed
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paceline.errors import QueueFullError, RequestError

BASES = [[(7 * i + 3 * base) % VOCAB_SIZE for i in range(24)] for base in range(2)]


class Interleavings(RuleBasedStateMachine):
    """The driver checks the books at every step and each request's words at the end."""

    @initialize(
        lag=st.integers(0, 2),
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(4, 14),
        max_num_seqs=st.integers(1, 4),
        spare_tokens=st.sampled_from([0, 1, 3, 20]),
        depths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
        prefix_caching=st.booleans(),
    )
    def start(
        self,
        lag: int,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        spare_tokens: int,
        depths: list[int],
        prefix_caching: bool,
    ):
        self.driver = Driver(
            lag=lag,
            num_pages=num_pages,
            max_model_len=30,
            max_depth=6,
            choose_depth=lambda num_decoding: depths[num_decoding % len(depths)],
            accepts=lambda history, depth: hashed([*history, 1]) % (depth + 1),
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_tokens,
            max_queue=6,
            prefix_caching=prefix_caching,
        )
        self.capacity = (num_pages - 1) * page_size
        self.num_open_most = max_num_seqs + 6

    def open_ids(self) -> list[str]:
        return [name for name in self.driver.outputs if self.driver.reason(name) is None]

    @rule(
        base=st.sampled_from(BASES),
        shared=st.integers(0, 24),
        tail=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2).map(tuple),
        logprobs=st.sampled_from([None, 0]),
        depth=st.none() | st.integers(0, 6),
        speculation_summary=st.booleans(),
    )
    def arrive(self, base: list[int], shared: int, tail: list[int], max_tokens: int, **params: object):
        prompt_ids = [*base[:shared], *tail]
        request = make_request(f"r{len(self.driver.requests)}", prompt_ids, max_tokens, **params)
        fits = 0 < len(prompt_ids) < 30 and min(len(prompt_ids) + max_tokens, 30) - 1 <= self.capacity
        try:
            self.driver.add(request)
        except RequestError:
            assert not fits
        except QueueFullError:
            assert len(self.open_ids()) == self.num_open_most
        else:
            assert fits
            assert len(self.open_ids()) <= self.num_open_most

    @precondition(lambda self: self.open_ids())
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject):
        self.driver.abort(data.draw(st.sampled_from(self.open_ids())))

    @rule()
    def lose_the_drafter(self):
        self.driver.worker.drafter_error = "RuntimeError: gone"

    @rule(num=st.integers(1, 6))
    def run(self, num: int):
        for _ in range(num):
            self.driver.step()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()


Interleavings.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
