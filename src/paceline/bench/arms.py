"""What is compared. An arm is a word on the command line; the registry is one function, `arm_of`.

    plain      an engine launched with `--draft none`
    0, 1, …    an engine with its drafter loaded, every request at this depth
    auto       an engine that chooses the depth itself
    any other  an engine launched with `--policy WORD`
    a URL      whatever serves OpenAI's API there

Says what an arm needs, not how it is had: `local` launches engines, `client` talks to servers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from paceline.config import MAX_DEPTH, is_whole
from paceline.errors import ConfigError

# In the verdict, every adaptive arm is held against the best of plain and fixed ones.
Role: TypeAlias = Literal["plain", "fixed", "adaptive", "other"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve."""

    name: str
    role: Role
    launch: tuple[tuple[str, str], ...] = ()  # engine settings that it needs beyond those given
    depth: int | None = None  # asked for by every request
    url: str | None = None  # of its server; None: an engine in this process

    @property
    def needs_drafter(self) -> bool:
        """Whether its engine must have a drafter loaded."""
        return self.url is None and self.role != "plain"


def arm_of(word: str) -> Arm:
    """The arm of a word.

    Raises:
        ConfigError: it cannot be one.
    """
    if word == "plain":
        return Arm(word, "plain", (("draft", "none"),))
    if is_whole(word):
        if int(word) > MAX_DEPTH:
            raise ConfigError(f"--arms: depth must be at most {MAX_DEPTH}, got {word}")
        # Requests say how deep. A policy on the same engine would learn from them what it would not try.
        return Arm(f"depth {int(word)}", "fixed", (("depth", "0"),), depth=int(word))
    if word == "auto":
        return Arm(word, "adaptive", (("depth", "auto"),))
    if not re.fullmatch(r"[a-z][a-z0-9_-]*(:[0-9=:,]+)?", word):
        raise ConfigError(f"--arms: plain, a depth, auto or the name of a policy, got {word!r}")
    return Arm(word, "adaptive", (("policy", word),))


def arm_at(text: str) -> Arm:
    """The arm of `URL` or `NAME=URL`. The names plain, auto and depths have their meaning in the verdict.

    Raises:
        ConfigError: it is no http or https address.
    """
    name, separator, url = text.partition("=")
    if not separator or "/" in name:
        name, url = "", text
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, or beyond 65535
        fits = False
    if not fits:
        raise ConfigError(f"--url must be http://… or https://…, with NAME= before it or not, got {text!r}")
    url = url.rstrip("/").removesuffix("/v1")
    depth = re.fullmatch(r"(?:depth )?(\d+)", name)
    if depth:
        return Arm(f"depth {int(depth[1])}", "fixed", url=url)
    roles: dict[str, Role] = {"plain": "plain", "auto": "adaptive"}
    return Arm(name or parts.netloc, roles.get(name, "other"), url=url)


def parse_arms(text: str, urls: Sequence[str]) -> list[Arm]:
    """All arms, in the order given: words with commas between them, of which `table:4=3,16=1` is one.

    Raises:
        ConfigError: one cannot be, is there twice, or there is none.
    """
    words = [word.strip() for word in re.split(r",(?!\s*\d+\s*=)", text)]
    arms = [arm_of("".join(word.split())) for word in words if word] + [arm_at(url) for url in urls]
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--arms, --url: {name} is there twice")
    if not arms:
        raise ConfigError("--arms: there is nothing to measure")
    return arms
