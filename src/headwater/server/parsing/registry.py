"""The known formats, and which of them a model's chat template uses."""

import importlib
from collections.abc import Callable

from headwater.errors import ConfigError
from headwater.server.parsing.base import ToolFormat
from headwater.server.parsing.formats import (
    DeepSeekFormat,
    HermesFormat,
    KimiFormat,
    Llama3Format,
    MistralFormat,
)
from headwater.server.parsing.harmony import HarmonyFormat
from headwater.server.parsing.tagged import GlmFormat, QwenCoderFormat
from headwater.server.parsing.thinking import ReasoningTags

TOOL_FORMATS: dict[str, Callable[[], ToolFormat]] = {
    "deepseek": DeepSeekFormat,
    "glm": GlmFormat,
    "harmony": HarmonyFormat,
    "hermes": HermesFormat,
    "kimi": KimiFormat,
    "llama3": Llama3Format,
    "mistral": MistralFormat,
    "qwen_coder": QwenCoderFormat,
}
"""Tool formats by the value of `--tool-call-parser`."""

_SIGNS = (
    ("<|channel|>", "harmony"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3"),
    ('"parameters":', "llama3"),
)
"""Texts in a template and the format that they indicate; the first match counts."""

REASONING_TAGS: dict[str, ReasoningTags] = {
    "think": ReasoningTags(opening="<think>", closing="</think>"),
    "mistral": ReasoningTags(opening="[THINK]", closing="[/THINK]"),
    "kimi": ReasoningTags(opening="◁think▷", closing="◁/think▷"),
    "seed": ReasoningTags(opening="<seed:think>", closing="</seed:think>"),
}
"""Tags by the value of `--reasoning-parser`; harmony's channels are part of its tool format."""

AUTO, NONE = "auto", "none"


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The format called `name`; `auto` is that of the template, None if it has no tools."""
    if name == AUTO:
        found = detect_format(template)
        return None if found is None else TOOL_FORMATS[found]()
    if name == NONE:
        return None
    if name in TOOL_FORMATS:
        return TOOL_FORMATS[name]()
    if ":" in name:
        return _load(name)
    raise ConfigError(
        f"--tool-call-parser {name} is unknown; use auto, none, {', '.join(TOOL_FORMATS)} "
        "or module:Class"
    )


def reasoning_tags(name: str, template: str) -> ReasoningTags | None:
    """The tags called `name`; `auto` are those of the template, None if it has none."""
    if name == AUTO:
        return next((tags for tags in REASONING_TAGS.values() if _speaks(template, tags)), None)
    if name == NONE:
        return None
    if name in REASONING_TAGS:
        return REASONING_TAGS[name]
    raise ConfigError(
        f"--reasoning-parser {name} is unknown; use auto, none or {', '.join(REASONING_TAGS)}"
    )


def _speaks(template: str, tags: ReasoningTags) -> bool:
    return tags.opening in template or tags.closing in template


def detect_format(template: str) -> str | None:
    """The name of the format that a chat template uses; None for a template without tools."""
    if "tools" not in template:
        return None
    return next((name for sign, name in _SIGNS if sign in template), None)


def _load(name: str) -> ToolFormat:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        made: ToolFormat = found()
    except (ImportError, AttributeError, TypeError) as exc:
        raise ConfigError(f"--tool-call-parser {name} cannot be loaded: {exc}") from exc
    for member in ("markers", "parser", "grammar", "new_id"):
        if not hasattr(made, member):
            raise ConfigError(f"--tool-call-parser {name} has no {member!r}; see ToolFormat")
    return made
