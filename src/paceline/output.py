"""From the engine's token blocks to text: detokenising, stop strings, and one cut for everything.

A stop string is found in the text, which only this side has, and it may begin in one token and end
in another, or in the middle of a block. When it completes, text, token ids, logprobs and the count
of tokens all end at the token that completed it, and the engine is told to give the row up. Text
that may still turn out to be the beginning of a stop string is held back; tokens never are.

What comes out does not depend on how the tokens were cut into blocks: tokens are looked at one by
one, in order. Knows nothing of HTTP, of processes or of the engine's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from paceline.request import EngineRequest, FinishReason, RequestOutput, SpeculationSummary, TokenLogprobs
from paceline.tokenizer import IncrementalDetokenizer, Tokenizer


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice of one request gained. The last one carries `finish_reason`."""

    request_id: str
    choice: int
    index: int = 0  # among all choices of a reply to several prompts
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None  # one per token, when asked for
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # the next ones, when asked for
    text_offsets: Sequence[int] | None = None  # with logprobs: where each token's text begins, in characters
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = (
        None  # the stop token or stop string that ended it; None for EOS and length
    )
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache had
    speculation: SpeculationSummary | None = None  # so far, when asked for
    error: str | None = None  # with finish_reason "error"
    error_param: str | None = None  # the request's field that is to blame; None: the engine


def merge(deltas: Sequence[Delta]) -> Delta:
    """Join successive deltas of one choice into one."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return msgspec.structs.replace(
        last,
        text="".join(d.text for d in deltas),
        token_ids=[t for d in deltas for t in d.token_ids],
        logprobs=None if last.logprobs is None else [p for d in deltas for p in d.logprobs or ()],
        prompt_logprobs=[p for d in deltas for p in d.prompt_logprobs or ()] or None,
        text_offsets=None if last.text_offsets is None else [o for d in deltas for o in d.text_offsets or ()],
    )


class StopStrings:
    """Finds the first of several strings to end in a text that comes in pieces.

    One Knuth-Morris-Pratt automaton per string: its state is the length of the longest beginning of
    the string that the text now ends with, which is exactly the text that must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, armed: bool = True) -> tuple[int, str] | None:
        """Read on. Returns (characters of `text` read up to the match's end, the stop string).

        Of strings that end at the same character the longest wins. While not `armed`, a complete
        string is text like any other. Nothing may be fed after a match.
        """
        for position, char in enumerate(text, start=1):
            found = ""
            for s, stop in enumerate(self._stops):
                matched, borders = self._matched[s], self._borders[s]
                while matched and stop[matched] != char:
                    matched = borders[matched]
                matched += stop[matched] == char
                if matched == len(stop):
                    if armed and matched > len(found):
                        found = stop
                    matched = borders[matched]
                self._matched[s] = matched
            if found:
                return position, found
        return None


def _borders(stop: str) -> list[int]:
    """`[k]`: the longest proper beginning of `stop[:k]` that also ends it, for k in 0..len(stop)."""
    borders = [0, 0]
    for end in range(1, len(stop)):
        k = borders[end]
        while k and stop[k] != stop[end]:
            k = borders[k]
        borders.append(k + (stop[k] == stop[end]))
    return borders


class _Answer:
    """One choice on its way: the detokeniser's state, the text held back and the counts so far."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._params = request.params
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues=True)
        self._stops = StopStrings(request.params.stop)
        self._token_by_token = bool(request.params.stop) or request.params.logprobs is not None
        self._held = ""
        self._text_len = 0  # characters read so far, held ones included
        self._num_tokens = 0
        self._num_cached_tokens = 0

    def advance(self, output: RequestOutput) -> Delta:
        """Take one block in; the delta's `finish_reason` may be set although the block's is not."""
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        num_silent = int(output.stop_token_id is not None and not self._params.include_stop_str_in_output)
        num_spoken = len(output.token_ids) - num_silent
        if not self._token_by_token:
            self._read(self._detokenizer.push(output.token_ids[:num_spoken]))
            return self._delta(output, len(output.token_ids), None, None)

        offsets: list[int] = []
        for i, token in enumerate(output.token_ids):
            offsets.append(self._text_len)
            self._num_tokens += 1
            if i < num_spoken and (stop := self._read(self._detokenizer.push([token]))):
                return self._delta(output, i + 1, stop, offsets)
        return self._delta(output, len(output.token_ids), None, offsets)

    def _read(self, text: str) -> str | None:
        """Append `text`; when it completes a stop string, cut the held text there and return the string."""
        held_len = len(self._held)
        self._held += text
        self._text_len += len(text)
        # As with stop tokens: min_tokens tokens come first, and only a later one may complete a stop string.
        match = self._stops.feed(text, armed=self._num_tokens > self._params.min_tokens)
        if match is None:
            return None
        num_read, stop = match
        end = held_len + num_read
        self._held = self._held[: end if self._params.include_stop_str_in_output else end - len(stop)]
        return stop

    def _delta(
        self, output: RequestOutput, num_tokens: int, stop: str | None, offsets: list[int] | None
    ) -> Delta:
        finish_reason = output.finish_reason
        stop_reason: int | str | None = self._stop_token(output)
        if stop is None and finish_reason in ("stop", "length"):
            # What the detokeniser still held (half a character, say) belongs to the last token.
            stop = self._read(self._detokenizer.flush())
        if stop is not None:
            finish_reason, stop_reason = "stop", stop
        visible_len = len(self._held) - (self._stops.held if finish_reason is None else 0)
        text, self._held = self._held[:visible_len], self._held[visible_len:]
        wants_logprobs = self._params.logprobs is not None
        return Delta(
            request_id=self._request.request_id,
            choice=self._request.choice,
            index=self._request.index,
            text=text,
            token_ids=output.token_ids[:num_tokens],
            logprobs=(output.logprobs or [])[:num_tokens] if wants_logprobs else None,
            prompt_logprobs=output.prompt_logprobs,
            text_offsets=offsets if wants_logprobs else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self._num_cached_tokens,
            speculation=output.speculation,
            error=output.error,
            error_param=output.error_param,
        )

    def _stop_token(self, output: RequestOutput) -> int | None:
        """The stop token, if it was one of the request's own."""
        return output.stop_token_id if output.stop_token_id in self._params.stop_token_ids else None


class OutputProcessor:
    """Turns the engine's outputs of many requests into deltas. One per tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, _Answer] = {}

    def add(self, request: EngineRequest) -> None:
        """Expect outputs for `request`."""
        self._answers[request.request_id] = _Answer(request, self._tokenizer)

    def drop(self, request_id: str) -> None:
        """Forget a request; outputs that still come for it are ignored."""
        self._answers.pop(request_id, None)

    def process(self, outputs: Iterable[RequestOutput]) -> tuple[list[Delta], list[str]]:
        """Returns the deltas, and the ids whose rows the caller must abort: a stop string ended them.

        Outputs of unknown requests are ignored: their rows were launched before the abort arrived.
        """
        deltas: list[Delta] = []
        to_abort: list[str] = []
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is None:
                continue
            delta = answer.advance(output)
            deltas.append(delta)
            if delta.finish_reason is not None:
                del self._answers[output.request_id]
                if output.finish_reason is None:
                    to_abort.append(output.request_id)
        return deltas, to_abort
