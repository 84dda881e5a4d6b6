"""Which of the prompts the tasks of this folder use. lm-eval calls these; nothing here knows Paceline."""

from __future__ import annotations

from typing import Any

INTRODUCTION = "Translate German to English: "


def spread(dataset: Any) -> Any:
    """40 of the 320 prompts, 10 of each category, which take turns (so that `--limit` has them all)."""
    return dataset.select([88 * i % len(dataset) for i in range(40)])


def translations(dataset: Any) -> Any:
    """20 German sentences, each in a column `sentence`."""
    chosen = dataset.filter(lambda doc: doc["category"] == "translation").select(range(20))
    return chosen.map(lambda doc: {"sentence": doc["turns"][0].removeprefix(INTRODUCTION)})
