"""Text to token ids and back, and chat messages to a prompt; no torch, no transformers.

Reads `tokenizer.json`, `tokenizer_config.json` and the chat template of a model directory.
Templates come with models, so they run in Jinja's sandbox. A request whose messages make the
template fail is refused. Everything here is safe to call from several threads at once: nothing
is changed after construction.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from headwater.errors import ModelError, PromptTooLong, RequestError
from headwater.types import Tokens


class ChatTemplate:
    """One compiled template. Rendering does not change it."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise ModelError(f"the model's chat template does not compile: {exc}") from exc

    @classmethod
    def find(cls, folder: Path, settings: Mapping[str, Any]) -> "ChatTemplate | None":
        """The template of a model directory, in any of the usual files; None if there is
        none."""
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"))
        source = settings.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source}
            source = named.get("default")
        return cls(source) if isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
        settings: Mapping[str, Any],
    ) -> str:
        """The prompt text. Raises RequestError if the template refuses the messages."""
        names = {
            **settings,
            **special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        names.setdefault("tools", None)
        names.setdefault("documents", None)
        try:
            return self._template.render(names)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as exc:
            raise RequestError(f"the chat template refused these messages: {exc}") from exc
        except (RecursionError, OverflowError, ArithmeticError) as exc:
            raise RequestError(
                f"the chat template failed on these messages ({type(exc).__name__}); send shorter "
                "or less deeply nested messages"
            ) from exc


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; serving prints the body."""

    tags = {"generation"}  # noqa: RUF012 -- declared so by jinja2.ext.Extension

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None) -> str:
    """Plain JSON. Jinja's own filter escapes for HTML, but a prompt is not HTML."""
    if isinstance(value, list) and indent is None:
        # One call for each entry: a call holds the interpreter lock, and a list of tools or
        # messages may have megabytes.
        parts = (json.dumps(entry, ensure_ascii=False) for entry in value)
        return "[" + ", ".join(parts) + "]"
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """The vocabulary of one model directory."""

    def __init__(self, model_dir: str | Path) -> None:
        folder = Path(model_dir)
        self._fast = _load_fast(folder / "tokenizer.json")
        settings = _load_json(folder / "tokenizer_config.json")
        named = {name: _token_text(settings.get(name)) for name in _NAMED_TOKENS}
        self._special = {name: text for name, text in named.items() if text is not None}
        self._template = ChatTemplate.find(folder, settings)
        self._bytes_of_char = _byte_alphabet()
        self._longest = max((len(piece) for piece in self._fast.get_vocab()), default=1)
        added = self._fast.get_added_tokens_decoder()
        self.special_ids = {
            token.content: number for number, token in added.items() if token.special
        }
        """Ids of the special tokens by their text."""
        self.byte_tokens = self._find_byte_tokens()
        """Tokens that stand for one byte each, for text without better tokens. Decoders show a
        run of them as text only if the run consists of complete characters."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> Tokens:
        """Token ids of `text`, as the int32 array that the tree uses.

        Raises PromptTooLong, without encoding, for a text that cannot fit into `max_tokens`
        even with the longest tokens.
        """
        if max_tokens is not None and len(text) > max_tokens * self._longest:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, but the limit of {max_tokens} tokens allows at "
                f"most {max_tokens * self._longest}; shorten the prompt"
            )
        try:
            ids = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            check_text("the prompt", text)  # the tokenizer does not accept such a string
            raise
        return np.array(ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `tokens`. Ids outside the vocabulary have no text."""
        text: str = self._fast.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    @property
    def template_source(self) -> str:
        """The text of the chat template; empty if the model has none."""
        return "" if self._template is None else self._template.source

    def to_json(self) -> str:
        """The vocabulary in the format of `tokenizer.json`."""
        return str(self._fast.to_str())

    def _find_byte_tokens(self) -> dict[int, int]:
        """The byte of each byte token; empty if `<0xE2>` is an ordinary text or missing."""
        named = {byte: self._fast.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        found = {token: byte for byte, token in named.items() if token is not None}
        probe = named[0xE2]
        if probe is None or self.decode([probe], skip_special_tokens=False) != "\ufffd":
            return {}
        return found

    def token_bytes(self, token: int) -> bytes:
        """The bytes of this token, which may be a part of a character."""
        text = self.decode([token], skip_special_tokens=False)
        if "\ufffd" not in text:
            return text.encode()
        piece = self._fast.id_to_token(token) or ""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if all(char in self._bytes_of_char for char in piece):
            return bytes(self._bytes_of_char[char] for char in piece)
        return text.encode()

    def token_text(self, token: int) -> str:
        """A printable name of one token: its text, or its bytes if they are not text."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_piece(self, token: int) -> str:
        """The spelling of a token in the vocabulary."""
        return self._fast.id_to_token(token) or ""

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        settings: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt of a conversation, by the model's own template."""
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions")
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._special,
            settings={**(settings or {}), "tools": tools} if tools else settings or {},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        settings: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> Tokens:
        """Token ids of a conversation. The template writes its special tokens itself."""
        text = self.chat_text(
            messages,
            add_generation_prompt=add_generation_prompt,
            settings=settings,
            tools=tools,
        )
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)


def check_text(field: str, text: str) -> None:
    """Raise RequestError for a string with a lone surrogate: it has no UTF-8 encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise RequestError(
            f"{field} has a lone surrogate, U+{ord(text[exc.start]):04X}, at character "
            f"{exc.start}, which is not valid text; replace it, for example with U+FFFD"
        ) from exc


def _load_fast(path: Path) -> FastTokenizer:
    if not path.is_file():
        raise ModelError(f"{path.parent} has no tokenizer.json; use a complete model folder")
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as exc:
        raise ModelError(f"{path} is not a tokenizer: {exc}") from exc
    # Stored settings for training would truncate or pad the texts of clients.
    fast.no_truncation()
    fast.no_padding()
    return fast


def _load_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ModelError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _token_text(value: object) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level vocabularies use for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(hidden)})
    return alphabet
