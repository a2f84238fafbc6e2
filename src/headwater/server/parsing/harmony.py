"""GPT-OSS's harmony format: channels for reasoning, the answer and tool calls.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The prompt ends with `<|start|>assistant`, so an answer begins with a header.
"""

import re
from collections.abc import Container, Sequence

from headwater.server.parsing.base import (
    OutputParser,
    ParsedOutput,
    Terminal,
    ToolSpec,
    named_call,
    openai_id,
)
from headwater.server.parsing.call_stream import JsonCallStream, OpenCall
from headwater.server.parsing.lark import arguments_rule, calls_grammar, quoted
from headwater.server.parsing.scanner import MarkerScanner

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_OBJECT = re.compile(r"\s*\{")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


class HarmonyFormat:
    """Reads channels, and forces calls in the commentary channel."""

    markers: Sequence[str] = _MARKERS
    writes_reasoning = True

    def parser(self, tools: Sequence[ToolSpec]) -> OutputParser:
        return HarmonyParser(frozenset(tool.name for tool in tools))

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
    """Emits reasoning, content and the arguments of calls as soon as they are certain."""

    def __init__(self, names: Container[str]) -> None:
        """`names` are the request's tools. A call of another name is emitted when it is complete."""
        self._names = names
        self._scanner = MarkerScanner(_MARKERS)
        self._header: list[str] | None = []
        """Pieces of the header being read; None inside a message."""
        self._channel = "final"
        self._call: OpenCall | None = None
        self._recipient = ""
        self._arguments: list[str] = []
        """Pieces of the arguments of the open call."""
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
            self._recipient, self._arguments = recipient.group(1), []
            stream = JsonCallStream((_OBJECT,), self._names, name=self._recipient)
            self._call = OpenCall(stream)

    def _take_text(self, text: str, out: ParsedOutput) -> None:
        if not text:
            return
        if self._header is not None:
            self._header.append(text)
        elif self._call is not None:
            self._arguments.append(text)
            self._call.feed(text, out)
        elif self._channel == "analysis":
            out.add_reasoning(text)
        else:
            out.add_content(text)

    def _give_up_header(self, out: ParsedOutput) -> None:
        """Emit a header without a message as content: the model wrote text without channels."""
        text = "".join(self._header or ())
        self._header = None
        if text.strip() and text.strip() != "assistant":
            self._num_malformed += 1
            out.add_content(text)

    def _close_message(self, out: ParsedOutput) -> None:
        opened, self._call = self._call, None
        if opened is None:
            return
        text = "".join(self._arguments)
        call = named_call(self._recipient, text)
        self._num_malformed += not opened.end(call, text, out)
