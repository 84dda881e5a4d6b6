"""What a step costs before it is run: tables made from a calibration's samples.

    T(m, k) = V(m, b, C, p) + D        seconds
    V = G(m + p) + r b + c C + q C m/b + P(p)
    D = sum over drafters and positions j of d_j(n_j)

m tokens of decoding rows go through the target (b rows with one token each, plus drafts to verify), p
prompt tokens beside them; C tokens of context in all; n_j rows draft a j-th token. G is the matrices' time
for a number of tokens, r what a row costs besides (sampling, host), c reading a token of context once, q
attending to it with one more query, P what prompt tokens cost beyond G (less than nothing where they need
no logits). With all rows at depth k, D is the D(b, k) of a calibration: d_j(n) = D(n, j) - D(n, j - 1).

G and d_j are *curves*: staircases up to the largest of the given sizes (captured graphs, the tile of a CPU
kernel), piecewise linear above, never falling, continued by their last slope. What served rounds say of
these numbers is `served.py`'s. Knows nothing of clocks: whoever measures gives samples.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from paceline.policy.checks import MAX_TOKENS, real, whole
from paceline.policy.fit import least_squares_within, rising
from paceline.policy.types import MAX_SECONDS, MIN_SECONDS, Load, PolicyError

SCHEMA = 1
_PRIOR_TARGET = (
    (1, 1.0),
    (4, 1.3),
    (16, 2.4),
    (64, 6.0),
    (256, 20.0),
)  # relative; served rounds set the scale
_PRIOR_DRAFT = ((1, 0.1), (16, 0.2), (256, 1.0))
_PRIOR_SECONDS = 0.01  # a step of one token
_PRIOR_POSITIONS = 4
_T = TypeVar("_T")


class TargetSample(NamedTuple):
    """A timed target step without drafting: `num_tokens` (m) and `num_prompt_tokens` (p) go through it."""

    num_tokens: int
    num_rows: int
    context_len: int  # over all rows
    seconds: float
    num_prompt_tokens: int = 0


class DraftSample(NamedTuple):
    """A timed drafting of `depth` tokens for each of `num_rows` rows."""

    num_rows: int
    depth: int
    seconds: float
    drafter: str = ""


class Curve:
    """Seconds over a size: points joined by lines, a staircase up to the largest of `stairs`.

    Raises:
        PolicyError: there are no points, sizes do not rise, or a size or a time is no sensible number.
    """

    def __init__(self, points: Iterable[tuple[int, float]], stairs: Iterable[int] = ()) -> None:
        self.points = tuple(
            (
                whole("a curve's size", size, 0, MAX_TOKENS),
                real("a curve's time", seconds, -MAX_SECONDS, MAX_SECONDS),
            )
            for size, seconds in points
        )
        self.stairs = tuple(sorted({whole("a curve's stair", size, 0, MAX_TOKENS) for size in stairs}))
        self._sizes = [size for size, _ in self.points]
        if not self.points:
            raise PolicyError("a curve needs a point")
        if any(b <= a for a, b in zip(self._sizes, self._sizes[1:], strict=False)):
            raise PolicyError(f"a curve's sizes must rise, got {self._sizes}")
        self._dense: list[float] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Curve) and (self.points, self.stairs) == (other.points, other.stairs)

    def __hash__(self) -> int:
        return hash((self.points, self.stairs))

    def __call__(self, size: int) -> float:
        """Seconds at a size of 0 or more."""
        step = bisect.bisect_left(self.stairs, size)
        if step < len(self.stairs):
            size = self.stairs[step]
        points = self.points
        i = bisect.bisect_left(self._sizes, size)
        if i == 0 or len(points) == 1:
            return points[0][1]
        (left, low), (right, high) = points[min(i, len(points) - 1) - 1 :][:2]
        slope = (high - low) / (right - left)
        return low + (size - left) * slope

    @property
    def edges(self) -> tuple[int, ...]:
        """Sizes at which the curve may bend, stairs' right ends among them; in order."""
        last = self.stairs[-1] if self.stairs else -1
        return tuple(sorted({*self.stairs, *(size for size in self._sizes if size > last)}))

    def dense(self, num: int) -> list[float]:
        """The values at 0, 1, ..., at least `num` of them. Kept and shared: do not change it."""
        if len(self._dense) < num:
            self._dense += [self(size) for size in range(len(self._dense), max(num, 2 * len(self._dense)))]
        return self._dense

    def to_dict(self) -> dict[str, Any]:
        return {"points": [list(point) for point in self.points], "stairs": list(self.stairs)}


@dataclass(frozen=True, slots=True)
class CostModel:
    """The tables. Make one with `fit` from samples, with `prior` without, or read it with `from_dict`.

    `drafts` has a curve per position for every drafter; deeper positions cost what the last one does, a
    drafter that is not there what `""` costs, or else the first.
    """

    tokens: Curve  # G
    drafts: Mapping[str, tuple[Curve, ...]]  # d_1, d_2, ... by drafter
    row_seconds: float = 0.0  # r
    context_seconds: float = 0.0  # c
    query_seconds: float = 0.0  # q
    prompt: Curve = field(default_factory=lambda: Curve([(0, 0.0)]))  # P
    is_measured: bool = True

    def __post_init__(self) -> None:
        if not self.drafts or not all(self.drafts.values()):
            raise PolicyError("drafts must hold a curve for the first position of a drafter at least")
        _check_times("tokens", self.tokens, MIN_SECONDS)
        for curves in self.drafts.values():
            for curve in curves:
                _check_times("drafts", curve, 0.0)
        for name in ("row_seconds", "context_seconds", "query_seconds"):
            real(name, getattr(self, name), 0.0, MAX_SECONDS)

    @classmethod
    def prior(cls, drafters: Sequence[str] = ("",)) -> CostModel:
        """Rough shapes for a machine that was not measured; served rounds correct them."""
        scale = _PRIOR_SECONDS
        draft = Curve([(size, scale * cost) for size, cost in _PRIOR_DRAFT])
        return cls(
            tokens=Curve([(size, scale * cost) for size, cost in _PRIOR_TARGET]),
            drafts={name: (draft,) * _PRIOR_POSITIONS for name in drafters},
            is_measured=False,
        )

    @classmethod
    def fit(
        cls,
        target: Sequence[TargetSample],
        drafts: Sequence[DraftSample],
        token_stairs: Sequence[int] = (),
        row_stairs: Sequence[int] = (),
    ) -> CostModel:
        """From a calibration. Repeat a sample to have its median taken.

        r, c and q come from samples that agree in m + p and differ in rows, context or queries (least
        squares within such groups, none below zero); without such samples they are 0. G comes from those with
        the shortest context a row at each size: what the fit leaves of a long one is not the tokens'. P comes
        from samples with prompt tokens.

        Args:
            token_stairs: sizes of m + p up to which time is a staircase.
            row_stairs: the same for the rows of a draft step.

        Raises:
            PolicyError: there is no target sample without prompt tokens, or no draft sample; or noise is so
                large that rows and contexts leave nothing for the tokens.
        """
        plain = [sample for sample in target if not sample.num_prompt_tokens]
        if not plain:
            raise PolicyError("a cost model needs target samples without prompt tokens")
        r, c, q = least_squares_within([(s.num_tokens, _features(s), s.seconds) for s in plain])

        def rest(sample: TargetSample) -> float:
            rows, context, queries = _features(sample)
            return sample.seconds - r * rows - c * context - q * queries

        short = _with_shortest_context(plain)
        tokens = Curve(rising(_medians((s.num_tokens, rest(s)) for s in short)), token_stairs)
        over = _medians(
            (s.num_prompt_tokens, rest(s) - tokens(s.num_tokens + s.num_prompt_tokens))
            for s in target
            if s.num_prompt_tokens
        )
        return cls(
            tokens=tokens,
            drafts=_draft_curves(drafts, row_stairs),
            row_seconds=r,
            context_seconds=c,
            query_seconds=q,
            prompt=Curve([(0, 0.0), *over]),
        )

    def positions(self, drafter: str) -> tuple[Curve, ...]:
        """A drafter's curves."""
        found = self.drafts.get(drafter) or self.drafts.get("")
        return found or next(iter(self.drafts.values()))

    def position(self, drafter: str, index: int) -> Curve:
        """The curve of a drafter's position (from 0), the last one for those beyond."""
        curves = self.positions(drafter)
        return curves[min(index, len(curves) - 1)]

    def besides(self, load: Load) -> tuple[float, float]:
        """What a step without prompt tokens takes beside G(m): seconds, and seconds for each of m."""
        rows, context = load.num_rows, load.context_len
        fixed = self.row_seconds * rows + self.context_seconds * context
        return fixed, self.query_seconds * context / rows if rows else 0.0

    def prompt_seconds(self, num_tokens: int, num_prompt_tokens: int) -> float:
        """What so many prompt tokens add to a step of `num_tokens`."""
        more = self.tokens(num_tokens + num_prompt_tokens) - self.tokens(num_tokens)
        return more + self.prompt(num_prompt_tokens)

    def target_seconds(self, num_tokens: int, load: Load) -> float:
        """V(m, b, C, p)."""
        fixed, slope = self.besides(load)
        prompts = load.num_prompt_tokens
        if prompts:
            fixed += self.prompt(prompts)
        return self.tokens(num_tokens + prompts) + fixed + slope * num_tokens

    def draft_seconds(self, rows_by_position: Sequence[int], drafter: str = "") -> float:
        """The time in which `rows_by_position[j]` rows make their draft number j (from 0)."""
        return sum(self.position(drafter, j)(num) for j, num in enumerate(rows_by_position) if num)

    def step_seconds(self, load: Load, depths: Iterable[tuple[str, int]]) -> float:
        """T of a step in which each row, given as (drafter, depth), drafts so deep."""
        num_tokens = load.num_rows
        by_drafter: dict[str, list[int]] = {}
        for drafter, depth in depths:
            num_tokens += depth
            rows = by_drafter.setdefault(drafter, [])
            rows += [0] * (depth - len(rows))
            for j in range(depth):
                rows[j] += 1
        drafting = sum(self.draft_seconds(rows, name) for name, rows in by_drafter.items())
        return self.target_seconds(num_tokens, load) + drafting

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {
            "schema": SCHEMA,
            "tokens": self.tokens.to_dict(),
            "drafts": {name: [c.to_dict() for c in curves] for name, curves in self.drafts.items()},
            "row_seconds": self.row_seconds,
            "context_seconds": self.context_seconds,
            "query_seconds": self.query_seconds,
            "prompt": self.prompt.to_dict(),
            "is_measured": self.is_measured,
        }

    @classmethod
    def from_dict(cls, data: Any) -> CostModel:
        """What `to_dict` gave.

        Raises:
            PolicyError: it is of another schema, or a field is missing or wrong; the message names it.
        """
        if not isinstance(data, dict) or "schema" not in data:
            raise PolicyError("cost model: not a mapping with a schema")
        if data["schema"] != SCHEMA:
            raise PolicyError(f"cost model: schema must be {SCHEMA}, got {data['schema']!r}")
        return cls(
            tokens=_read(data, "tokens", _to_curve),
            drafts=_read(data, "drafts", lambda d: {str(k): tuple(map(_to_curve, v)) for k, v in d.items()}),
            row_seconds=_read(data, "row_seconds", float),
            context_seconds=_read(data, "context_seconds", float),
            query_seconds=_read(data, "query_seconds", float),
            prompt=_read(data, "prompt", _to_curve),
            is_measured=_read(data, "is_measured", bool),
        )


def _check_times(name: str, curve: Curve, least: float) -> None:
    times = [seconds for _, seconds in curve.points]
    real(f"{name}: a time", min(times), least, MAX_SECONDS)
    if times[-1] < times[-2:][0]:  # it goes on like this, to less than nothing
        raise PolicyError(f"{name}: the largest size must not take less than the one before, got {times}")


def _features(sample: TargetSample) -> tuple[float, float, float]:
    """What r, c and q are multiplied by."""
    queries = sample.context_len * sample.num_tokens / sample.num_rows if sample.num_rows else 0.0
    return float(sample.num_rows), float(sample.context_len), queries


def _with_shortest_context(samples: Sequence[TargetSample]) -> list[TargetSample]:
    """Of each size, the samples whose rows have the shortest context."""
    shortest: dict[int, float] = {}
    for s in samples:
        context = s.context_len / max(1, s.num_rows)
        shortest[s.num_tokens] = min(context, shortest.get(s.num_tokens, context))
    return [s for s in samples if s.context_len / max(1, s.num_rows) <= shortest[s.num_tokens]]


def _medians(samples: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    by_size: dict[int, list[float]] = {}
    for size, seconds in samples:
        by_size.setdefault(size, []).append(seconds)
    return [(size, statistics.median(by_size[size])) for size in sorted(by_size)]


def _draft_curves(samples: Sequence[DraftSample], stairs: Sequence[int]) -> dict[str, tuple[Curve, ...]]:
    """d_j from D: between two measured depths every position costs the same."""
    if not samples:
        raise PolicyError("a cost model needs draft samples")
    curves = {}
    for drafter in dict.fromkeys(sample.drafter for sample in samples):
        by_rows: dict[int, list[tuple[int, float]]] = {}
        for s in samples:
            if s.drafter == drafter:
                by_rows.setdefault(s.num_rows, []).append((s.depth, s.seconds))
        whole = {rows: Curve([(0, 0.0), *_medians(by_depth)]) for rows, by_depth in by_rows.items()}
        deepest = max(s.depth for s in samples if s.drafter == drafter)
        curves[drafter] = tuple(
            Curve(rising([(n, max(0.0, whole[n](j + 1) - whole[n](j))) for n in sorted(whole)]), stairs)
            for j in range(deepest)
        )
    return curves


def _read(data: Mapping[str, Any], name: str, convert: Callable[[Any], _T]) -> _T:
    try:
        return convert(data[name])
    except KeyError:
        raise PolicyError(f"cost model: {name} is missing") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise PolicyError(f"cost model: {name}: {error}") from None


def _to_curve(data: Any) -> Curve:
    if not isinstance(data, dict) or data.keys() != {"points", "stairs"}:
        raise PolicyError("a curve has points and stairs")
    return Curve(((size, seconds) for size, seconds in data["points"]), data["stairs"])
