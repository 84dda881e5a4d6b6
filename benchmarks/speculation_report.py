"""The speculation benchmark for people: its bars, and its rows as Markdown tables.

Knows the rows, not how they were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common import Bar, Results, Row
from speculation_accept import DEPTH, WAYS
from speculation_runs import CATEGORIES, MAX_NEW_TOKENS, PARTS, PLAIN
from speculation_speed import ALL_DEPTHS, LOADS, MIN_ANSWER_LEN
from speculation_warm import NUM_STEPS, TOLERANCE

TEMPERATURES = {"greedy": 0.0, "0.8": 0.8}
OFF_LOADS = (1, 16)
MAX_WIDTH = 0.02  # of the interval of a step's time over plain
AGREEMENT = 0.01  # of accept_len served and replayed, both in float32
ORDER = (
    "off-shares",
    *(f"off-{load}" for load in OFF_LOADS),
    *(f"{kind}-{num}" for num in NUM_STEPS for kind in ("warm", "unsettled")),
    *(f"pays-{name}" for name in TEMPERATURES),
    *(f"crossover-{name}" for name in TEMPERATURES),
    "acceptance",
)


def bars(results: Results) -> list[Bar]:
    """One for each figure that was asked for; no value where a part was not measured."""
    shares = results.row("off-shares")
    limit = 1.0 + (shares["published_share"] if shares else 0.0107)
    found = [
        Bar(
            f"off is free, {_requests(load)}: step time over plain, low end of the interval",
            _value(results, f"off-{load}", lambda row: row["step_ratio"]["low"]),
            "<=",
            round(limit, 4),
        )
        for load in OFF_LOADS
    ]
    found += [  # a wide interval would meet the bars above too
        Bar(
            f"off is free, {_requests(load)}: width of that interval",
            _value(results, f"off-{load}", lambda row: row["step_ratio"]["high"] - row["step_ratio"]["low"]),
            "<=",
            MAX_WIDTH,
        )
        for load in OFF_LOADS
    ]
    found.append(
        Bar(
            "off is free: settling's share of a step's FLOPs",
            _value(results, "off-shares"),
            "<=",
            round(limit - 1, 4),
        )
    )
    found.append(
        Bar(
            "off is free: pages with the head less pages of plain",
            _value(results, "off-1", lambda row: float(row["pages"]["head"] - row["pages"][PLAIN])),
            "==",
            0.0,
        )
    )
    for num in NUM_STEPS:
        name = f"{num:,} plain step{'s' if num > 1 else ''}"
        found.append(Bar(f"warm after {name}: prompts that pass", _value(results, f"warm-{num}"), "==", 1.0))
        found.append(
            Bar(
                f"settling skipped for {name}: prompts that pass",
                _value(results, f"unsettled-{num}"),
                "==",
                0.0,
            )
        )
    for name in TEMPERATURES:
        found.append(
            Bar(
                f"it pays, {_temperature(name)}: best fixed depth over plain",
                _value(results, f"pays-{name}"),
                ">=",
                1.2,
            )
        )
    for name in TEMPERATURES:
        num_cells = float(len(LOADS) * len(ALL_DEPTHS))
        found.append(
            Bar(
                f"it stops paying, {_temperature(name)}: cells measured",
                _value(results, f"crossover-{name}"),
                "==",
                num_cells,
            )
        )
    found.append(
        Bar(
            "accept_len in float32: served and replayed, difference",
            _value(results, "acceptance"),
            "<=",
            AGREEMENT,
        )
    )
    return found


def _value(results: Results, part: str, of: Any = lambda row: row["value"]) -> float | None:
    row = results.row(part)
    return None if row is None else float(of(row))


def text(results: Results) -> str:
    """All tables; a part that was not measured has none."""
    pieces = [_bar_table(bars(results))]
    for title, names, make in (
        ("Off is free", ("off-shares", "off-1", "off-16"), _off),
        ("Back on is warm", [name for name in ORDER if name.startswith(("warm", "unsettled"))], _warm),
        ("It pays", [f"pays-{name}" for name in TEMPERATURES], _pays),
        ("It stops paying", [f"crossover-{name}" for name in TEMPERATURES], _crossover),
        ("accept_len, served and replayed", ["acceptance"], _acceptance),
    ):
        rows = {name: row for name in names if (row := results.row(name)) is not None}
        if rows:
            pieces.append(f"## {title}\n\n{make(rows)}")
    return "\n\n".join(pieces) + "\n"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _bar_table(all_bars: Sequence[Bar]) -> str:
    values = ["–" if bar.value is None else f"{bar.value:.4g}" for bar in all_bars]
    return _table(
        ["figure", "value", "bar"],
        [[bar.name, value, bar.show()] for bar, value in zip(all_bars, values, strict=True)],
    )


def _interval(interval: Mapping[str, float], digits: int = 3) -> str:
    low, high = interval["low"], interval["high"]
    return f"{interval['estimate']:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _requests(load: int) -> str:
    return "1 request" if load == 1 else f"{load} requests"


def _temperature(name: str) -> str:
    return name if name == "greedy" else f"temperature {name}"


def _off(rows: Mapping[str, Row]) -> str:
    pieces = []
    steps = [(load, rows[f"off-{load}"]) for load in OFF_LOADS if f"off-{load}" in rows]
    if steps:
        pieces.append(
            _table(
                [
                    "load",
                    "step, head at depth 0, ms",
                    "step, plain, ms",
                    "ratio (95 %)",
                    "settling by itself, over a plain step",
                    "of it, in the caller's time",
                    "pages, both launches",
                ],
                [
                    [
                        _requests(load),
                        f"{row['step_ms']['head']:.2f}",
                        f"{row['step_ms'][PLAIN]:.2f}",
                        _interval(row["step_ratio"], 4),
                        f"{row['settle_share_measured']:.2%}",
                        f"{row['settle_share_of_the_caller']:.2%}",
                        f"{row['pages']['head']}, {row['pages'][PLAIN]}",
                    ]
                    for load, row in steps
                ],
            )
        )
        pieces.append(
            "The engines take turns of a dozen steps, of which the last eight count; the ratio is the median "
            "over pairs of turns, with its bootstrap interval. Settling goes on beside the host's work "
            "between two steps, on the kernel thread that is idle then, and little of it is in the caller's "
            "time. By itself: with both threads at it, and waited for."
        )
    if shares := rows.get("off-shares"):
        pieces.append(
            f"Settling multiplies by {shares['settling_weights']:,} weights, (3D² + 2D·2·kv_dim): "
            f"{shares['published_share']:.2%} of the {shares['parameters']:,} parameters (the published "
            f"share), {shares['flops_share']:.2%} of the FLOPs of a step's matrices, and, in 8 bits where "
            f"the model's layers have 4, {shares['bytes_share']:.2%} of their bytes "
            f"({shares['settling_bytes']:,} of {shares['step_bytes']:,}). K/V takes "
            f"{shares['target_kv_bytes_per_token']:,} bytes a token for the model and "
            f"{shares['draft_kv_bytes_per_token']:,} for the head, in pages of the same number."
        )
    return "\n\n".join(pieces)


def _warm(rows: Mapping[str, Row]) -> str:
    table = _table(
        [
            "plain steps",
            "settled",
            "prompts",
            "K/V close",
            "greatest difference, K / V",
            "equal drafts",
            "same words",
            "pass",
        ],
        [
            [
                f"{row['num_steps']:,}",
                "yes" if row["is_settled"] else "no",
                str(row["num_prompts"]),
                str(row["num_close"]),
                f"{row['max_abs_difference']['keys']:.2g} / {row['max_abs_difference']['values']:.2g}",
                f"{row['num_equal_drafts']} of {row['num_drafts']}",
                str(row["num_same_words"]),
                f"{row['value']:.0%}",
            ]
            for row in rows.values()
        ],
    )
    return (
        f"{table}\n\nAgainst a request that drafts {DEPTH} in every step, at temperature 0.8: the head's K "
        f"and V of all positions (close: within {TOLERANCE:g} of each other, absolute and relative; the "
        f"greatest value is {max(row['largest'] for row in rows.values()):.3g}), the {DEPTH} drafts of the "
        "next round, and the words around it. The head's pages are wiped before each request. Words are "
        "the target's: they stay the same without settling too."
    )


def _pays(rows: Mapping[str, Row]) -> str:
    pieces = []
    for part, row in rows.items():
        name = part.partition("-")[2]
        table = _table(
            [
                "arm",
                "tokens/s",
                "over plain (95 %)",
                "step, over plain (95 %)",
                "tokens a step",
                "accept_len",
                "ms a step: draft + target + settling + rest",
                "same words",
            ],
            [_arm_cells(arm, found, row) for arm, found in row["arms"].items()],
        )
        categories = list(row["num_prompts"])
        by_category = _table(
            ["arm", *categories],
            [
                [arm, *(_category_cell(found["by_category"][category]) for category in categories)]
                for arm, found in row["arms"].items()
                if arm != PLAIN
            ],
        )
        num = sum(row["num_prompts"].values())
        pieces.append(
            f"### {_temperature(name)}\n\n{table}\n\nOver plain = tokens a step / step over plain, by "
            f"category:\n\n{by_category}\n\n{num} prompts, {row['num_left_out']} more left out for answers "
            f"of under {MIN_ANSWER_LEN} tokens."
        )
    pieces.append(
        f"One request, at most {MAX_NEW_TOKENS} new tokens, natural stop, from the first token on; means "
        "over prompts, then over categories; every prompt in every arm one after the other, who begins "
        "changes. Intervals: prompts drawn again within their category. Tokens a step: those delivered; "
        "accept_len: of rounds with drafts, cut off or not. Same words: answers that are plain's, token by "
        "token."
    )
    return "\n\n".join(pieces)


def _arm_cells(arm: str, found: Row, row: Row) -> list[str]:
    parts = [f"{found['parts_ms'][part]:.2f}" for part in (*PARTS, "rest")]
    accept_len = found["accept_len"]
    return [
        arm + (" (best)" if arm == row["best"] else ""),
        f"{found['rate']:.1f}",
        _interval(found["ratio"]),
        _interval(found["cost"]),
        f"{found['step_len']:.2f}",
        "–" if accept_len is None else f"{accept_len:.2f}",
        f"{found['step_ms']:.2f}: {' + '.join(parts)}",
        f"{found['num_same_words']} of {sum(row['num_prompts'].values())}",
    ]


def _category_cell(found: Row) -> str:
    return (
        f"{found['ratio']:.2f} = {found['step_len']:.2f} / {found['cost']:.2f} "
        f"(accept_len {found['accept_len']:.2f})"
    )


def _crossover(rows: Mapping[str, Row]) -> str:
    pieces = []
    for part, row in rows.items():
        cells = {(cell["load"], cell["depth"]): cell for cell in row["cells"]}
        lines = []
        for load in LOADS:
            best = max(ALL_DEPTHS, key=lambda depth, load=load: cells[load, depth]["rate"]["median"])  # type: ignore[misc]
            lines.append(
                [_requests(load), *(_speed_cell(cells[load, depth], depth == best) for depth in ALL_DEPTHS)]
            )
        table = _table(["tokens/s (over depth 0)", *(f"depth {depth}" for depth in ALL_DEPTHS)], lines)
        stops = "; ".join(f"depth {c['depth']} at {c['shown']}" for c in row["crossovers"])
        name = part.partition("-")[2]
        pieces.append(
            f"### {_temperature(name)}\n\n{table}\n\nStops paying, in requests (95 %): {stops}. Rounds: "
            f"{row['num_rounds']}; {row['cached_share']:.0%} of prompt tokens came from the prefix cache."
        )
    pieces.append(
        "So many requests in flight all the time: one that ends is followed by the next. At most "
        f"{MAX_NEW_TOKENS} new tokens, less for the first requests, which would all end at once; natural "
        "stop. Medians over rounds; the ratio is taken within each round, over the same prompts. In bold: "
        "the fastest."
    )
    return "\n\n".join(pieces)


def _speed_cell(cell: Row, is_best: bool) -> str:
    shown = f"{cell['rate']['median']:.0f}"
    if cell["depth"]:
        low, high = cell["ratio"]["low"], cell["ratio"]["high"]
        shown += f" ({cell['ratio']['estimate']:.2f}, {low:.2f}–{high:.2f})"
    return f"**{shown}**" if is_best else shown


_WAY_NAMES = {
    "served": "served",
    "replayed_q8": "replayed, head in Q8_0",
    "replayed": "replayed, head as trained",
    "fp32_served": "float32: served",
    "fp32_replayed": "replayed",
    "acceptance_py": "all rounds, as `acceptance.py` counts",
}


def _acceptance(rows: Mapping[str, Row]) -> str:
    [row] = rows.values()
    same = {name: f"{num} of {of}" for name, (num, of) in row["same_rounds"].items()}
    table = _table(
        ["accept_len", *(_WAY_NAMES[way] for way in WAYS)],
        [[category, *(f"{row['by_category'][category][way]:.3f}" for way in WAYS)] for category in CATEGORIES]
        + [["**mean**", *(f"**{row['means'][way]:.3f}**" for way in WAYS)]],
    )
    return (
        f"{table}\n\n{row['num_prompts']} prompts of each category, depth {DEPTH}, greedy. Rounds with at "
        f"most {DEPTH} tokens left are out, but where all rounds are said. Rounding the head to Q8_0 costs "
        f"{row['cost_of_q8']:.3f}, bfloat16 K/V and the packed kernels {row['cost_of_the_rest']:.3f}. Rounds "
        f"that accept as many as replayed, of those that begin at the same token: float32 {same['fp32']}; "
        f"default, replayed in Q8_0 {same['q8']}, with the head as trained {same['trained']}. "
        f"{row['num_same_answers']} of {row['num_prompts'] * len(CATEGORIES)} answers are float32's, token "
        "by token."
    )
