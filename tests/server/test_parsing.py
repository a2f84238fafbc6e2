"""Parsers of model output: golden transcripts, any split of the stream, damaged calls."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.server.parsing.base import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    OutputParser,
    ParsedAnswer,
    ParsedOutput,
    ToolSpec,
    write_json,
)
from headwater.server.parsing.model_output import AnswerParsing, AnswerReader
from headwater.server.parsing.registry import (
    REASONING_TAGS,
    TOOL_FORMATS,
    detect_format,
    reasoning_tags,
    tool_format,
)
from headwater.server.parsing.scanner import MarkerScanner
from headwater.server.parsing.thinking import PlainParser, ThinkingParser

WEATHER = ToolSpec(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    },
)
CLOCK = ToolSpec(name="get-time", parameters={"type": "object", "properties": {}})
TOOLS = (WEATHER, CLOCK)
CITY = '{"city": "Zürich", "days": 2}'


@dataclass(frozen=True)
class Golden:
    """The text that a model writes, and the parts that a parser must find in it."""

    format: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    content: str = ""
    reasoning: str = ""
    ids: tuple[str, ...] = ()
    num_malformed: int = 0


GOLDEN = {
    "hermes one": Golden(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>',
        (("get_weather", CITY),),
    ),
    "hermes text and two": Golden(
        "hermes",
        'I look it up.\n<tool_call>\n{"name": "get_weather", "arguments": {"city":"Zürich","days":2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>\n',
        (("get_weather", '{"city":"Zürich","days":2}'), ("get-time", "{}")),
        content="I look it up.",
    ),
    "hermes plain": Golden(
        "hermes",
        " 2 < 3, and <tool> is no marker \n",
        content=" 2 < 3, and <tool> is no marker \n",
    ),
    "hermes damaged": Golden(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": }}\n</tool_call>',
        content='<tool_call>\n{"name": "get_weather", "arguments": {"city": }}\n</tool_call>',
        num_malformed=1,
    ),
    "hermes cut": Golden(
        "hermes",
        'Well <tool_call>\n{"name": "get_wea',
        content='Well <tool_call>\n{"name": "get_wea',
        num_malformed=1,
    ),
    "hermes good after damaged": Golden(
        "hermes",
        '<tool_call>[1]</tool_call><tool_call>{"name": "get-time", "arguments": {}}</tool_call>',
        (("get-time", "{}"),),
        content="<tool_call>[1]</tool_call>",
        num_malformed=1,
    ),
    "llama3 one": Golden(
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}',
        (("get_weather", CITY),),
    ),
    "llama3 tag and two": Golden(
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}; '
        '{"name": "get-time", "parameters": {}}',
        (("get_weather", CITY), ("get-time", "{}")),
    ),
    "llama3 text after a call": Golden(
        "llama3",
        '{"name": "get-time", "parameters": {}}\nDone.',
        (("get-time", "{}"),),
        content="Done.",
    ),
    "llama3 arguments as text": Golden(
        "llama3",
        '{"name": "get_weather", "parameters": "{\\"city\\": 1}"}',
        (("get_weather", '{"city": 1}'),),
    ),
    "llama3 object": Golden("llama3", ' {"a": 1}', content=' {"a": 1}', num_malformed=1),
    "llama3 plain": Golden("llama3", 'As {"name": 1} shows', content='As {"name": 1} shows'),
    "mistral list": Golden(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}, "id": "abc123def"},'
        ' {"name": "get-time", "arguments": {}}]',
        (("get_weather", CITY), ("get-time", "{}")),
        ids=("", ""),
    ),
    "mistral id first": Golden(
        "mistral",
        '[TOOL_CALLS][{"id": "abc123def", "name": "get-time", "arguments": {}}] Well.',
        (("get-time", "{}"),),
        content=" Well.",
        ids=("abc123def",),
    ),
    "mistral second damaged": Golden(
        "mistral",
        '[TOOL_CALLS][{"name": "get-time", "arguments": {}}, {"name": 1}] {}',
        (("get-time", "{}"),),
        content='{"name": 1}] {}',
        num_malformed=1,
    ),
    "mistral no list": Golden(
        "mistral", "[TOOL_CALLS] no", content="[TOOL_CALLS] no", num_malformed=1
    ),
    "mistral named": Golden(
        "mistral",
        'Yes.[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Zürich", "days": 2}'
        "[TOOL_CALLS]get-time[ARGS]{}",
        (("get_weather", CITY), ("get-time", "{}")),
        content="Yes.",
        ids=("abc123def", ""),
    ),
    "mistral cut": Golden(
        "mistral", '[TOOL_CALLS] [{"name":', content='[TOOL_CALLS] [{"name":', num_malformed=1
    ),
    "deepseek fenced": Golden(
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Zürich", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>get-time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("get_weather", CITY), ("get-time", "{}")),
    ),
    "deepseek bare": Golden(
        "deepseek",
        'Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich", "days": 2}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("get_weather", CITY),),
        content="Let me see.",
    ),
    "kimi": Golden(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Zürich", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.get-time:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        (("get_weather", CITY), ("get-time", "{}")),
        ids=("functions.get_weather:0", "functions.get-time:1"),
    ),
    "glm": Golden(
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get-time\n</tool_call>",
        (("get_weather", CITY), ("get-time", "{}")),
    ),
    "glm text that is a number": Golden(
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>12</arg_value></tool_call>",
        (("get_weather", '{"city": "12"}'),),
    ),
    "glm damaged": Golden(
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n</tool_call>",
        content="<tool_call>get_weather\n<arg_key>city</arg_key>\n</tool_call>",
        num_malformed=1,
    ),
    "qwen coder": Golden(
        "qwen_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        (("get_weather", CITY),),
    ),
    "harmony": Golden(
        "harmony",
        "<|channel|>analysis<|message|>The user wants weather.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Zürich", "days": 2}<|call|>',
        (("get_weather", CITY),),
        reasoning="The user wants weather.",
    ),
    "harmony answer": Golden(
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
        content="It is 4.",
        reasoning="Easy.",
    ),
    "harmony recipient first": Golden(
        "harmony",
        "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant to=functions.get-time<|channel|>commentary"
        " json<|message|>{}",
        (("get-time", "{}"),),
        content="One moment.",
    ),
    "harmony damaged": Golden(
        "harmony",
        '<|channel|>commentary to=functions.get-time<|message|>{"a',
        content='{"a',
        num_malformed=1,
    ),
    "harmony plain": Golden("harmony", "Hello there", content="Hello there", num_malformed=1),
}


def streamed(parser: OutputParser, pieces: list[str]) -> ParsedOutput:
    """The parts that are emitted before the stream ends."""
    out = ParsedOutput()
    for piece in pieces:
        out.add(parser.feed(piece))
    return out


def parse(parser: OutputParser, pieces: list[str]) -> tuple[ParsedAnswer, int]:
    answer = ParsedAnswer()
    for piece in pieces:
        answer.add(parser.feed(piece))
    answer.add(parser.end())
    return answer, parser.num_malformed


def cut(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_transcript_means_what_its_format_says(name):
    """Whole and character by character, each transcript gives its calls and its text."""
    golden = GOLDEN[name]
    for pieces in ([golden.text], list(golden.text)):
        out, num_malformed = parse(TOOL_FORMATS[golden.format]().parser(TOOLS), pieces)
        assert tuple((call.name, call.arguments) for call in out.calls) == golden.calls
        assert out.content == golden.content
        assert out.reasoning == golden.reasoning
        assert num_malformed == golden.num_malformed
        if golden.ids:
            assert tuple(call.id for call in out.calls) == golden.ids


LONG = {"city": 'a "b" \\ \n{}é', "days": -2, "tags": ["x", "{"]}
LONG_TEXT = json.dumps(LONG, ensure_ascii=False)
STREAMED = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {LONG_TEXT}}}\n</tool_call>',
    "llama3": f'{{"name": "get_weather", "parameters": {LONG_TEXT}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {LONG_TEXT}}}]',
    "mistral named": f"[TOOL_CALLS]get_weather[ARGS]{LONG_TEXT}",
    "deepseek": f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{LONG_TEXT}<｜tool▁call▁end｜>",
    "deepseek fenced": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{LONG_TEXT}\n```<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{LONG_TEXT}<|tool_call_end|>",
    "glm": f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{LONG['city']}</arg_value>"
    "<arg_key>days</arg_key><arg_value>-2</arg_value>"
    '<arg_key>tags</arg_key><arg_value>["x", "{"]</arg_value></tool_call>',
    "qwen_coder": f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{LONG['city']}\n</parameter>\n"
    "<parameter=days>-2</parameter><parameter=tags>\n"
    '["x", "{"]\n</parameter>\n</function>\n</tool_call>',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{LONG_TEXT}<|call|>",
}


TRANSCRIPTS = [(golden.format, golden.text) for golden in GOLDEN.values()] + [
    (name.split()[0], text) for name, text in STREAMED.items()
]


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_a_split_of_the_stream_changes_nothing(data):
    """Any division of any transcript gives the result of the whole text; none raises."""
    name, whole = data.draw(st.sampled_from(TRANSCRIPTS))
    text = whole[: data.draw(st.integers(0, len(whole)))]
    one, many = TOOL_FORMATS[name]().parser(TOOLS), TOOL_FORMATS[name]().parser(TOOLS)
    assert streamed(many, cut(data, text)) == streamed(one, [text])
    assert many.end() == one.end()
    assert many.num_malformed == one.num_malformed


@pytest.mark.parametrize("name", STREAMED)
def test_arguments_are_given_out_while_they_are_written(name):
    """The name comes first, then the JSON text in pieces, which join to exactly the
    arguments."""
    parser = TOOL_FORMATS[name.split()[0]]().parser(TOOLS)
    deltas = [delta for sign in STREAMED[name] for delta in parser.feed(sign).deltas]
    deltas += parser.end().deltas
    start, *pieces, end = deltas
    assert isinstance(start, CallStart)
    assert start.name == "get_weather"
    assert end == CallEnd()
    texts = [piece.text for piece in pieces if isinstance(piece, ArgumentsDelta)]
    assert len(texts) == len(pieces) >= 10
    whole, _ = parse(TOOL_FORMATS[name.split()[0]]().parser(TOOLS), [STREAMED[name]])
    assert "".join(texts) == whole.calls[0].arguments == LONG_TEXT


@pytest.mark.parametrize("name", STREAMED)
def test_a_call_cut_after_it_began_is_text_with_a_flag(name):
    """The stream ends the call as malformed; the whole answer has its text, nothing is lost."""
    text = STREAMED[name][: STREAMED[name].index('"b') + 4]
    parser = TOOL_FORMATS[name.split()[0]]().parser(TOOLS)
    deltas = [*streamed(parser, list(text)).deltas, *parser.end().deltas]
    assert isinstance(deltas[0], CallStart)
    assert isinstance(deltas[-1], CallEnd)
    assert deltas[-1].malformed
    assert parser.num_malformed == 1
    whole, num_malformed = parse(TOOL_FORMATS[name.split()[0]]().parser(TOOLS), [text])
    assert num_malformed == 1
    assert not whole.calls
    assert whole.content == (text if name != "harmony" else text.split("<|message|>")[1])


def test_a_call_of_an_unknown_tool_is_not_given_out_early():
    """The text of such a call may still become content, so it is kept until it is complete."""
    text = '<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>'
    parser = TOOL_FORMATS["hermes"]().parser(TOOLS)
    for sign in text[:-1]:
        assert parser.feed(sign).deltas == []
    assert parse(TOOL_FORMATS["hermes"]().parser(TOOLS), [text])[0].calls[0].name == "other"


def test_a_call_with_a_second_name_or_arguments_is_malformed():
    """With a second name or second arguments, the emitted part is not the call."""
    for end in (', "name": "get-time"}', ', "arguments": {"city": "Rome"}}'):
        text = '<tool_call>{"name": "get_weather", "arguments": {"city": "x"}' + end
        answer, num_malformed = parse(
            TOOL_FORMATS["hermes"]().parser(TOOLS), [text + "</tool_call>"]
        )
        assert (answer.calls, num_malformed) == ([], 1)
        assert answer.content == text + "</tool_call>"


def test_the_search_for_a_call_is_bounded():
    """A block that never opens its arguments costs no more with every further token."""
    parser = TOOL_FORMATS["hermes"]().parser(TOOLS)
    far = '<tool_call>{"name": "get_weather",' + " " * 2000 + '"arguments": {"city": "x"}}'
    assert streamed(parser, [far]).deltas == streamed(parser, []).deltas == []
    assert parser.feed("</tool_call>").deltas[-1] == CallEnd()
    for text in ("<tool_call>get_weather", "<tool_call>get_weather<arg_key>"):
        glm = TOOL_FORMATS["glm"]().parser(TOOLS)
        streamed(glm, [text, *["x" * 100] * 100])
        assert len(glm._block.call._stream._held) <= 1200  # type: ignore[attr-defined]


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_more_calls_than_asked_for(data):
    """With `parallel_tool_calls` false there is one complete call, however the stream is cut;
    the text of a malformed call after it is not lost."""
    one = '<tool_call>{"name": "get-time", "arguments": {}}</tool_call>'
    text = one + one + '<tool_call>{"name": "get-time", "arguments": {</tool_call>'
    parsing = AnswerParsing(make=lambda: TOOL_FORMATS["hermes"]().parser(TOOLS), max_calls=1)
    reader, answer = AnswerReader(parsing, "a"), ParsedAnswer()
    for piece in cut(data, text):
        answer.add(reader.read(piece, 1, is_end=False))
    answer.add(reader.read("", 0, is_end=True))
    assert [call.name for call in answer.calls] == ["get-time"]
    assert answer.content == text[2 * len(one) :]


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_text_never_raises_and_is_never_lost_in_silence(data):
    """With markers and JSON in any order there is no exception, and text that is not a call is
    content."""
    name = data.draw(st.sampled_from(sorted(TOOL_FORMATS)))
    made = TOOL_FORMATS[name]()
    parts = st.sampled_from(
        [
            *made.markers,
            '{"name": "f", "arguments": {}}',
            "f",
            "{",
            "[",
            "]",
            "}",
            "a b",
            "\n",
            '"',
        ]
    )
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    whole, num_malformed = parse(made.parser(TOOLS), [text])
    assert (whole, num_malformed) == parse(made.parser(TOOLS), list(text))
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", REASONING_TAGS)
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_is_split_from_the_answer(name, is_open):
    """The opening tag may be in the prompt or in the answer, in one piece or in many."""
    tags = REASONING_TAGS[name]
    text = f"\nOne {tags.opening[0]} two.\n{tags.closing}\n\nSo {tags.opening} is three. "
    if not is_open:
        text = tags.opening + text
    for pieces in ([text], list(text)):
        parser = ThinkingParser(tags, PlainParser(), is_open=is_open)
        out, _ = parse(parser, pieces)
        assert out.reasoning == f"One {tags.opening[0]} two."
        assert out.content == f"So {tags.opening} is three. "


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_reasoning_before_calls_survives_any_split(data):
    """Reasoning and then a call give the same parts, however the stream is cut."""
    call = '<tool_call>{"name": "get-time", "arguments": {}}</tool_call>'
    whole = data.draw(
        st.sampled_from(
            ["<think>a\nb</think>\n" + call, "  " + call, " <think>x", "no", "</think>"]
        )
    )
    text = whole[: data.draw(st.integers(0, len(whole)))]
    pieces = cut(data, text)

    def make() -> ThinkingParser:
        inner = TOOL_FORMATS["hermes"]().parser(TOOLS)
        return ThinkingParser(REASONING_TAGS["think"], inner, is_open=False)

    assert parse(make(), pieces) == parse(make(), [text])


def test_an_answer_without_reasoning_is_all_content():
    """A model that does not reason keeps its text, including white space."""
    parser = ThinkingParser(REASONING_TAGS["think"], PlainParser(), is_open=False)
    assert parse(parser, list(" hi <think> there\n"))[0].content == " hi <think> there\n"


def test_reasoning_without_an_end_is_reasoning():
    """An answer that is cut off during reasoning has no content."""
    parser = ThinkingParser(REASONING_TAGS["think"], PlainParser(), is_open=True)
    assert parse(parser, ["I wonder ", "</thi"])[0] == ParsedAnswer(reasoning="I wonder </thi")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}<tool_call><arg_key>", "glm"),
        ("{{ tools }}<tool_call><function=", "qwen_coder"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama3"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi"),
        ("{{ tools }}<|start|><|channel|>", "harmony"),
        ("{{ messages }}<tool_call>", None),
    ],
)
def test_the_template_names_its_format(template, name):
    """`auto` chooses by texts in the template; without tools there is no format."""
    assert detect_format(template) == name


def test_formats_and_tags_are_chosen_by_name():
    """The setting is a name, `none`, or a class of the user; anything else is a configuration
    error."""
    assert isinstance(tool_format("mistral", ""), TOOL_FORMATS["mistral"])  # type: ignore[arg-type]
    assert tool_format("none", "tools <tool_call>") is None
    own = tool_format("headwater.server.parsing.formats:HermesFormat", "")
    assert own is not None
    assert reasoning_tags("auto", "… </think> …") is REASONING_TAGS["think"]
    assert reasoning_tags("none", "… </think> …") is None
    for bad in ("sesame", "json:loads", "headwater.nowhere:Class"):
        with pytest.raises(ConfigError):
            tool_format(bad, "")
    with pytest.raises(ConfigError):
        reasoning_tags("sesame", "")


def test_half_a_surrogate_pair_is_written_as_an_escape():
    """Arguments can always be sent as UTF-8."""
    write_json({"a": json.loads('"\\ud800"')}).encode()
    assert write_json({"a": "é"}) == '{"a": "é"}'


def test_the_scanner_holds_back_no_more_than_a_marker():
    """Text that cannot begin a marker is emitted at once."""
    scanner = MarkerScanner(["<end>"])
    assert list(scanner.feed("abc<e")) == [("abc", False)]
    assert list(scanner.feed("f")) == [("<ef", False)]
    assert scanner.end() == ""
