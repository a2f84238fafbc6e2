"""The text of one sequence: outputs in, certain text out, ended by a stop string if one comes."""

from collections.abc import Sequence
from typing import NamedTuple

from headwater.engine.detokenizer import Detokenizer, StopFilter
from headwater.engine.tokenizer import Tokenizer
from headwater.scheduler.output import SequenceOutput


class TextDelta(NamedTuple):
    """What one output added."""

    text: str
    finish_reason: str | None
    """Set once; the sequence may still run where a stop string ended its text."""

    stop_reason: int | str | None
    """The stop string or the stop token that ended it, where one did."""


class TextStream:
    """Detokenises one sequence and looks for its stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._text = Detokenizer(
            tokenizer, prompt=prompt, skip_special_tokens=skip_special_tokens
        )
        self._stop = StopFilter(stops, include_stop=include_stop)

    def land(self, output: SequenceOutput) -> TextDelta:
        """The text that this output made certain."""
        self.num_tokens += len(output.tokens)
        shown = output.tokens
        if output.stop_token is not None and not self._include_stop:
            shown = shown[:-1]  # a stop token ends the text, and is not part of it
        text, stop = self._show(self._text.push(shown))
        if stop is None and output.finish_reason is not None:
            rest, stop = self._show(self._text.flush())
            text += rest if stop is not None else rest + self._stop.flush()
        if stop is not None:
            return TextDelta(text, "stop", stop)
        return TextDelta(text, output.finish_reason, output.stop_token)

    def _show(self, text: str) -> tuple[str, str | None]:
        if self.num_tokens < self._min_tokens:
            return text, None
        return self._stop.push(text)
