"""Grammars through llguidance: its own spelling of ours, and the limits they must keep.

Both processes use it: the server to refuse a grammar before anything runs, the engine to compile it.
The limits are counted in work, not in seconds, so a grammar that one machine takes every machine takes;
at full use they come to half a second to compile and 20 ms for a mask. Compiling lets other threads
run.

llguidance is imported when the first grammar comes: most servers never see one. Knows nothing of
tokens, rows or HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import RequestError
from paceline.request import Grammar

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_SOURCE = 64 * 1024  # characters
MAX_SYMBOLS = 100_000  # of the compiled productions: a schema of 10,000 properties has about 80,000
MAX_COMPLAINT = 300  # characters: some quote the whole source
MAX_NESTING = 200  # of brackets: deeper, and the compilers' own recursion is what decides


def limits() -> LLParserLimits:
    """What compiling may cost, and each mask after it."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=200_000,  # 15 ms
        step_max_items=50_000,  # 3 ms
        max_lexer_states=50_000,  # 100 MB
        max_grammar_size=MAX_SYMBOLS,
        verbose_errors=False,
    )


def spelled(grammar: Grammar) -> str:
    """The grammar as llguidance takes it.

    Raises:
        ValueError: the source of a `json` grammar is not a JSON object.
    """
    from llguidance import LLMatcher

    match grammar.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(grammar.source)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)


def validate(grammar: Grammar) -> None:
    """Refuse what cannot be compiled within the limits. May take a quarter of a second.

    Raises:
        RequestError: `param` is "grammar"; the message is the compiler's own first line.
    """
    from llguidance import LLMatcher

    if len(grammar.source) > MAX_SOURCE:
        raise RequestError(
            "grammar", f"grammar has {len(grammar.source)} characters, the limit is {MAX_SOURCE}"
        )
    if _nesting(grammar.source) > MAX_NESTING:
        raise RequestError("grammar", f"grammar nests brackets more than {MAX_NESTING} deep")
    try:
        complaint = LLMatcher.validate_grammar(spelled(grammar), limits=limits())
    except ValueError as error:
        complaint = str(error)
    if complaint and not complaint.startswith("WARNING"):
        raise RequestError("grammar", f"grammar cannot be used: {first_line(complaint)}")


def first_line(complaint: str) -> str:
    """llguidance's messages go on with a drawing of the place, and those of regex end in the reason."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    reasons = [line for line in lines[1:] if line.startswith("error: ")]
    line = " ".join([*(text[:MAX_COMPLAINT] for text in lines[:1]), *reasons[:1]])
    return line or "unknown error"


def _nesting(source: str) -> int:
    """Deepest nesting of brackets, whatever they mean there; an upper bound is enough."""
    depth = deepest = 0
    for char in source:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}" and depth:
            depth -= 1
    return deepest
