"""LLM: generates texts for prompts in this process, without a server.

It runs any `EngineCore`, real or simulated, until every prompt has its answer.
"""

import itertools
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.clock import Clock
from headwater.engine.core import EngineCore
from headwater.engine.detokenizer import TextStream
from headwater.engine.interrupts import Interrupts
from headwater.engine.progress import Progress, SilentProgress, show_progress
from headwater.engine.prompts import (
    Messages,
    Prompt,
    read_conversations,
    read_count,
    read_ids,
    read_params,
    read_prompts,
    read_salt,
    read_stops,
)
from headwater.engine.structured import StructuredOutput
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import HeadwaterError, RequestError
from headwater.scheduler.request import (
    SEED_RANGE,
    Request,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
    Usage,
    params_of_choice,
)
from headwater.types import RequestId, Tokens

_DRAIN_S = 2.0
"""Longest wait for writes to lower tiers at the end."""


@dataclass(slots=True, kw_only=True)
class Completion:
    """An answer to one prompt."""

    prompt_tokens: Tokens
    index: int = 0
    """Index among the `n` answers to its prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt tokens from the second on, if requested."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, because they were cached."""
        return 0 if self.usage is None else self.usage.cached_tokens


class OfflineEngine:
    """Answers batches of prompts for one thread. A call returns when all its prompts are
    answered."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        clock: Clock,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        """`vocab_size` is the model's: a token id that is not below it would end the engine."""
        self._max_model_len = max_model_len
        self.core = core
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._clock = clock
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
        structured: StructuredOutput | None = None,
        show: bool | None = None,
    ) -> list[Completion]:
        """Completions in the order of `prompts`, which are texts or lists of token ids.

        Each prompt gets `n` answers, one after the other, with different seeds. `params` is one
        value for all prompts or one for each; None means the server's default of 16 tokens and
        a random seed. `structured` constrains every answer. `show` turns the progress display
        on or off; None shows it if standard error is a terminal. Raises RequestError for a
        prompt that cannot be served, after the other requests were ended. Ctrl-C also ends them
        all; then the engine can be used again.
        """
        tokens = [self._encode(prompt) for prompt in read_prompts(prompts)]
        if params is None:
            params = [SamplingParams(seed=_random_seed()) for _ in tokens]
        all_params = read_params(params, len(tokens), structured)
        return self._run(tokens, all_params, n=n, stop=stop, cache_salt=cache_salt, show=show)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
        structured: StructuredOutput | None = None,
        show: bool | None = None,
    ) -> list[Completion]:
        """The next turn of each conversation, `n` times, through the model's chat template.
        Without `params`, as in the server: a random seed, and as many tokens as fit."""
        batch = read_conversations(conversations)
        tokens = [self.tokenizer.encode_chat(messages) for messages in batch]
        if params is None:
            rooms = [max(1, self._max_model_len - len(prompt)) for prompt in tokens]
            params = [SamplingParams(max_tokens=room, seed=_random_seed()) for room in rooms]
        all_params = read_params(params, len(tokens), structured)
        return self._run(tokens, all_params, n=n, stop=stop, cache_salt=cache_salt, show=show)

    def close(self) -> None:
        """Finish writes to lower tiers, within bounds, and release the device. Calling it twice
        is safe."""
        self.core.drain(_DRAIN_S)
        self.core.close()

    def _encode(self, prompt: Prompt) -> Tokens:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return read_ids(prompt, self._vocab_size)

    def _run(
        self,
        prompts: list[Tokens],
        params: Sequence[SamplingParams],
        *,
        n: int,
        stop: str | Sequence[str],
        cache_salt: str,
        show: bool | None,
    ) -> list[Completion]:
        stops, salt, choices = read_stops(stop), read_salt(cache_salt), range(read_count(n))
        asked = [
            (Completion(prompt_tokens=tokens, index=choice), params_of_choice(one, choice))
            for tokens, one in zip(prompts, params, strict=True)
            for choice in choices
        ]
        shown = sys.stderr.isatty() if show is None else show
        progress = show_progress("prompts", len(asked)) if shown else SilentProgress()
        pending: dict[RequestId, _Pending] = {}
        with Interrupts() as interrupts:
            try:
                for answer, one in asked:
                    request = self._request(answer.prompt_tokens, one, salt)
                    self.core.add(request)
                    pending[request.request_id] = _Pending(answer, one, stops, self.tokenizer)
                with progress:
                    self._turn(pending, progress, interrupts)
            except (HeadwaterError, KeyboardInterrupt, SystemExit):
                self._end(pending)
                raise
            self._end(pending)
        return [answer for answer, _ in asked]

    def _request(self, tokens: Tokens, params: SamplingParams, cache_salt: str) -> Request:
        if len(tokens) == 0:
            raise RequestError("a prompt is empty; give at least one token")
        return Request(
            request_id=RequestId(f"offline-{next(self._numbers)}"),
            tokens=tokens,
            params=params,
            arrival_s=self._clock.now(),
            cache_salt=cache_salt,
        )

    def _turn(
        self, pending: dict[RequestId, "_Pending"], progress: Progress, interrupts: Interrupts
    ) -> None:
        while pending:
            with interrupts.open():
                self.core.wait()
            for output in self.core.step():
                entry = pending.get(output.request_id)
                if entry is not None and entry.append_output(output):
                    del pending[output.request_id]
                    progress.advance()
                    # a stop string ended the text; the engine still runs the request
                    if output.finish_reason is None:
                        self.core.abort(output.request_id)

    def _end(self, pending: dict[RequestId, "_Pending"]) -> None:
        """Abort everything that still runs: the rest of a batch, and sequences that a stop
        string ended."""
        for request_id in pending:
            self.core.abort(request_id)
        while self.core.has_work:
            self.core.step()


class _Pending:
    """An answer that is being generated."""

    def __init__(
        self,
        answer: Completion,
        params: SamplingParams,
        stop: Sequence[str],
        tokenizer: Tokenizer,
    ) -> None:
        self._answer = answer
        self._stream = TextStream(
            tokenizer,
            prompt=answer.prompt_tokens.tolist(),
            stops=stop,
            min_tokens=params.min_tokens,
        )

    def append_output(self, output: SequenceOutput) -> bool:
        """Add one output and return whether the answer is complete. Raises RequestError if its
        grammar cannot be followed."""
        if output.finish_reason == "failed":
            raise RequestError(output.detail)
        answer, piece = self._answer, self._stream.append_output(output)
        answer.text += piece.text
        answer.tokens += output.tokens[: piece.num_tokens]
        answer.logprobs += output.logprobs[: piece.num_tokens]
        answer.usage = answer.usage or output.usage
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = output.prompt_logprobs
        answer.finish_reason, answer.stop_reason = piece.finish_reason, piece.stop_reason
        return piece.finish_reason is not None


def _random_seed() -> int:
    return secrets.randbelow(SEED_RANGE)
