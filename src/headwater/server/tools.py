"""The fields that offer tools to the model, and which of them it must call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headwater.server.errors import RequestRefused
from headwater.server.parsing.base import ToolSpec
from headwater.server.schema import ChatRequest, FunctionFields, NamedToolChoice, ToolFields

ToolMode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What the model may call, and whether it must."""

    offered: Sequence[ToolSpec] = ()
    """In the prompt, in the client's order: a fixed order keeps the prefix cached."""

    callable: Sequence[ToolSpec] = ()
    """Those that the answer may call: one, where the client names it."""

    mode: ToolMode = "none"
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode == "required"

    @property
    def is_used(self) -> bool:
        """Whether the answer may have calls."""
        return self.mode != "none"

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates take them."""
        return [_template_tool(tool) for tool in self.offered] or None


def tool_use(body: ChatRequest) -> ToolUse:
    """The tools of a chat request. Raises RequestRefused where its fields disagree."""
    tools = [spec_of(tool.function) for tool in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        return use_of(tools, "required", choice.function.name, body.parallel_tool_calls)
    return use_of(tools, choice, None, body.parallel_tool_calls)


def use_of(
    tools: Sequence[ToolSpec], mode: ToolMode | None, name: str | None, parallel: bool | None
) -> ToolUse:
    """The use of `tools`; `name` is the one that must be called."""
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestRefused("two tools have the same name", param="tools")
    if not tools:
        if mode == "required" or name is not None:
            raise RequestRefused("tool_choice needs tools", param="tool_choice")
        return ToolUse()
    named = [tool for tool in tools if name is None or tool.name == name]
    if not named:
        raise RequestRefused(
            f"tool_choice names {name!r}, which is not in tools", param="tools"
        )
    return ToolUse(
        offered=tools,
        callable=named,
        mode=mode or "auto",
        is_parallel=parallel is not False and name is None,
    )


def spec_of(function: FunctionFields) -> ToolSpec:
    """A function of the request as the parsers take it."""
    return ToolSpec(
        name=function.name,
        description=function.description or "",
        parameters=function.parameters or {},
    )


def template_tools(tools: Sequence[ToolFields] | None) -> list[dict[str, Any]] | None:
    """The tools of a request as chat templates take them."""
    return [_template_tool(spec_of(tool.function)) for tool in tools or ()] or None


def _template_tool(tool: ToolSpec) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = dict(tool.parameters)
    return {"type": "function", "function": function}
