"""The page pool against a plain model of it, and `check` against each kind of corruption."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.pages import InvariantError, PagePool
from paceline.engine.prefix import PrefixHasher
from paceline.errors import ConfigError


def test_never_hands_out_the_trash_page():
    pool = PagePool(4, 16)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_available == 0


def test_refuses_a_pool_without_pages():
    with pytest.raises(ConfigError, match="at least 2 pages, got 1"):
        PagePool(1, 16)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(num_tokens: int, num_pages: int):
    assert PagePool(8, 16).pages_for(num_tokens) == num_pages


def test_shared_page_outlives_its_first_holder():
    pool = PagePool(4, 16)
    (page,) = pool.allocate(1)
    pool.publish(page, b"a")
    pool.share([page])
    pool.release([page])
    pool.check([[page]])
    assert pool.allocate(2) != (page,)
    assert pool.num_available == 0, "the shared page is not for others"
    pool.release([page])
    assert pool.match([b"a"]) == [page], "idle, and still cached"


def test_evicts_least_recently_used_and_a_prefix_from_its_end():
    pool = PagePool(5, 16)
    old, new = pool.allocate(2), pool.allocate(2)
    for page, digest in zip([*old, *new], [b"o1", b"o2", b"n1", b"n2"], strict=True):
        pool.publish(page, digest)
    pool.release(new)
    pool.release(old)
    pool.share(pool.match([b"o1", b"o2"]))
    pool.release(old)  # used again, so the other prefix goes first
    evicted = [pool.allocate(1)[0] for _ in range(4)]
    assert evicted == [new[1], new[0], old[1], old[0]]


def test_free_pages_go_before_cached_ones():
    pool = PagePool(3, 16)
    cached, plain = pool.allocate(2)
    pool.publish(cached, b"a")
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == (plain,)
    assert pool.match([b"a"]) == [cached]


def test_second_copy_of_a_page_stays_private():
    pool = PagePool(4, 16)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.match([b"a"]) == [first]
    pool.check([[first], [second]])
    pool.release([second])
    pool.release([first])
    pool.check([])
    assert pool.num_cached == 1


def test_match_stops_at_the_first_miss():
    pool = PagePool(4, 16)
    first, third = pool.allocate(2)
    pool.publish(first, b"1")
    pool.publish(third, b"3")
    assert pool.match([b"1", b"2", b"3"]) == [first]


@st.composite
def actions(draw: st.DrawFn) -> list[tuple[str, int]]:
    kind = st.sampled_from(["allocate", "publish", "share", "release"])
    return draw(st.lists(st.tuples(kind, st.integers(0, 7)), max_size=80))


@given(actions())
@settings(max_examples=200, deadline=None)
def test_every_page_is_held_free_or_idle(steps: list[tuple[str, int]]):
    pool, tables, published = PagePool(8, 16), [], set()
    for kind, number in steps:
        table = tables[number % len(tables)] if tables else None
        if kind == "allocate" and pool.num_available >= number:
            tables.append(list(pool.allocate(number)))
            published -= set(tables[-1])
        elif kind == "publish" and table:
            page = table[number % len(table)]
            if page not in published:
                pool.publish(page, bytes([number]))
                published.add(page)
        elif kind == "share":
            tables.append(pool.match([bytes([number])]))
            idle = pool.num_idle(tables[-1])
            before = pool.num_available
            pool.share(tables[-1])
            assert pool.num_available == before - idle
        elif kind == "release" and table is not None:
            tables.remove(table)
            pool.release(table)
        pool.check(tables)
        assert pool.num_used == len({page for table in tables for page in table})


CORRUPTIONS: dict[str, tuple[Callable[[PagePool, list[list[int]]], object], str]] = {
    "lost": (lambda pool, tables: tables.pop(), r"page \d counts 1 holders, block tables hold it 0 times"),
    "given twice": (lambda pool, tables: tables[0].append(tables[1][0]), r"counts 1 holders, .* 2 times"),
    "held and free": (lambda pool, tables: pool._free.append(tables[0][0]), r"is 1 times on the free list"),
    "vanished": (lambda pool, tables: pool._free.pop(), r"is 0 times on the free list"),
    "freed twice": (lambda pool, tables: pool._free.append(pool._free[0]), r"is 2 times on the free list"),
    "idle while held": (lambda pool, tables: pool._idle.update({tables[1][0]: None}), r"wrongly in or out"),
    "digest moved": (lambda pool, tables: pool._index.update({b"a": 5}), r"page \d is not under its digest"),
    "stale digest": (lambda pool, tables: pool._index.update({b"x": 5}), r"2 digests lead to 1 pages"),
    "trash": (lambda pool, tables: tables[0].append(0), r"pages outside 1..6: \[0\]"),
    "trash freed": (lambda pool, tables: pool._free.append(0), r"the trash page is on a list"),
    "twice in a row": (lambda pool, tables: tables[0].append(tables[0][0]), r"holds a page twice"),
    "shared, unpublished": (
        lambda pool, tables: (pool.share([tables[1][0]]), tables.append([tables[1][0]])),
        r"has 2 holders but no digest",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_finds(name: str):
    pool = PagePool(7, 16)
    tables = [list(pool.allocate(2)), list(pool.allocate(1))]
    pool.publish(tables[0][0], b"a")
    pool.check(tables)
    corrupt, message = CORRUPTIONS[name]
    corrupt(pool, tables)
    with pytest.raises(InvariantError, match=message):
        pool.check(tables)


tokens = st.lists(st.integers(0, 3), max_size=24)


@given(tokens, tokens)
def test_digests_are_equal_where_prefixes_are(left: list[int], right: list[int]):
    hasher, chains = PrefixHasher(4), ([], [])
    for chain, token_ids in zip(chains, (left, right), strict=True):
        hasher.extend(chain, token_ids, len(token_ids) // 4)
    for page, (a, b) in enumerate(zip(*chains, strict=False), start=1):
        assert (a == b) == (left[: page * 4] == right[: page * 4])


@given(st.lists(st.integers(0, 2**31), min_size=12, max_size=12), st.integers(0, 3))
def test_a_chain_grows_as_if_made_at_once(token_ids: list[int], first: int):
    hasher, grown, whole = PrefixHasher(4), [], []
    hasher.extend(grown, token_ids[: first * 4], first)
    hasher.extend(grown, token_ids, 3)
    hasher.extend(whole, token_ids, 3)
    assert grown == whole
    other: list[bytes] = []
    PrefixHasher(4).extend(other, token_ids, 3)
    assert other[0] != whole[0], "the key is each hasher's own"
