"""GPT-OSS's harmony format: channels for reasoning, the answer and tool calls.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The prompt ends with `<|start|>assistant`, so an answer begins with a header.
"""

import re
from collections.abc import Sequence

from headwater.server.parsing.base import (
    OutputParser,
    ParsedOutput,
    Terminal,
    ToolCall,
    ToolSpec,
    openai_id,
    read_json,
    write_json,
)
from headwater.server.parsing.lark import arguments_rule, calls_grammar, quoted
from headwater.server.parsing.scanner import MarkerScanner

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


class HarmonyFormat:
    """Reads channels, and forces calls in the commentary channel."""

    markers: Sequence[str] = _MARKERS
    writes_reasoning = True

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        return HarmonyParser()

    def grammar(
        self, tools: Sequence[ToolSpec], *, parallel: bool, terminal: Terminal
    ) -> str | None:
        channel, message = terminal(_CHANNEL), terminal(_MESSAGE)
        constrain = terminal(_CONSTRAIN)

        def write(index: int, tool: ToolSpec) -> tuple[str, list[str]]:
            head = quoted(f"commentary to=functions.{tool.name} ")
            rule = arguments_rule(f"args_{index}", tool.parameters)
            return f'{channel} {head} {constrain} "json" {message} args_{index}', [rule]

        # A call ends the turn, so there is one.
        rules = calls_grammar(tools, write, parallel=False, around=("analysis?", ""))
        return f"{rules}\n{_analysis(terminal)}"

    def answer_prefix(self, terminal: Terminal) -> tuple[str, str]:
        channel, message = terminal(_CHANNEL), terminal(_MESSAGE)
        return f'analysis? {channel} "final" {message}', _analysis(terminal)

    def new_id(self, random_hex: str) -> str:
        return openai_id(random_hex)


def _analysis(terminal: Terminal) -> str:
    """The rule of a reasoning message before the answer."""
    head = f'{terminal(_CHANNEL)} "analysis" {terminal(_MESSAGE)}'
    end = f'{terminal("<|end|>")} {terminal(_START)} "assistant"'
    return f"analysis: {head} thought {end}\nthought: /[^<]*/"


class HarmonyParser:
    """Emits reasoning and content as they come, and a call when it is complete."""

    def __init__(self) -> None:
        self._scanner = MarkerScanner(_MARKERS)
        self._header: list[str] | None = []
        """Pieces of the header being read; None inside a message."""
        self._channel = "final"
        self._call: list[str] | None = None
        """Pieces of the arguments of the call being read."""
        self._recipient = ""
        self._num_malformed = 0

    @property
    def num_malformed(self) -> int:
        return self._num_malformed

    @property
    def is_reasoning(self) -> bool:
        return self._header is None and self._call is None and self._channel == "analysis"

    def feed(self, text: str) -> ParsedOutput:
        out = ParsedOutput()
        for piece, is_marker in self._scanner.feed(text):
            if is_marker:
                self._take_marker(piece, out)
            else:
                self._take_text(piece, out)
        return out

    def end(self) -> ParsedOutput:
        out = ParsedOutput()
        self._take_text(self._scanner.end(), out)
        if self._header is not None:
            self._give_up_header(out)
        self._close_message(out)
        return out

    def _take_marker(self, marker: str, out: ParsedOutput) -> None:
        if marker == _START or marker in _ENDS:
            self._close_message(out)
            self._header = []
        elif self._header is None:
            self._take_text(marker, out)
        elif marker == _MESSAGE:
            self._open_message("".join(self._header))
        else:
            self._header.append(marker)

    def _open_message(self, header: str) -> None:
        self._header = None
        _, _, channel = header.partition(_CHANNEL)
        words = channel.split()
        self._channel = words[0] if words else "final"
        recipient = _RECIPIENT.search(header)
        self._call = None
        if recipient is not None and self._channel != "analysis":
            self._recipient, self._call = recipient.group(1), []

    def _take_text(self, text: str, out: ParsedOutput) -> None:
        if not text:
            return
        if self._header is not None:
            self._header.append(text)
        elif self._call is not None:
            self._call.append(text)
        elif self._channel == "analysis":
            out.reasoning += text
        else:
            out.content += text

    def _give_up_header(self, out: ParsedOutput) -> None:
        """A header without a message is text of a model that writes no channels."""
        text = "".join(self._header or ())
        self._header = None
        if text.strip() and text.strip() != "assistant":
            self._num_malformed += 1
            out.content += text

    def _close_message(self, out: ParsedOutput) -> None:
        if self._call is None:
            return
        text, self._call = "".join(self._call), None
        try:
            value = read_json(text)
        except ValueError:
            value = None
        if isinstance(value, dict):
            call = ToolCall(name=self._recipient, arguments=write_json(value))
            out.calls.append(call)
        else:
            self._num_malformed += 1
            out.content += text
