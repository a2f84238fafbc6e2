"""The real `openai` client against a live server."""

import asyncio

import openai
import pytest

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "user", "content": "Where does the water come from?"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def test_models(client, model):
    """The list has the one model, with its maximum length."""
    assert model == "headwater-tiny"
    assert client.models.list().data[0].max_model_len == 4096


def test_completion_streamed_and_whole_are_the_same(client, model):
    """Ids and text are the same, and the usage is at the end of the stream."""
    options = {"model": model, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    extra = {"ignore_eos": True, "return_token_ids": True}

    whole = client.completions.create(**options, extra_body=extra)
    chunks = list(
        client.completions.create(
            **options, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
    )

    ids = [token for chunk in chunks if chunk.choices for token in chunk.choices[0].token_ids]
    assert ids == whole.choices[0].token_ids
    assert len(ids) == 24
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def test_chat_streamed_and_whole_are_the_same(client, model):
    """A reply is the same however it is read."""
    options = {"model": model, "messages": MESSAGES, "max_tokens": 24, **GREEDY}

    whole = client.chat.completions.create(**options)
    text = ""
    for chunk in client.chat.completions.create(**options, stream=True):
        text += chunk.choices[0].delta.content or ""

    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"


def test_cached_tokens_are_reported(client, model):
    """Lesson 64: the second turn of a conversation reports what it reused; salts separate
    tenants."""
    long = [{"role": "user", "content": "the same long beginning " * 20}]
    options = {"model": model, "messages": long, "max_tokens": 4, "temperature": 0}

    def cached(salt):
        answer = client.chat.completions.create(**options, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("e2e-a") == 0
    assert cached("e2e-a") == 448  # 480 tokens of text: seven whole blocks of 64
    assert cached("e2e-b") == 0


def test_cached_equals_uncached(client, model):
    """A prompt that is found in the cache gives the tokens it gave when it was computed."""
    prompt = "an old prompt, told again and again " * 10
    options = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0}

    answers = [
        client.completions.create(
            **options,
            extra_body={"return_token_ids": True, "ignore_eos": True, "cache_salt": salt},
        )
        for salt in ("e2e-x", "e2e-x", "e2e-y")
    ]

    assert len({tuple(answer.choices[0].token_ids) for answer in answers}) == 1
    assert answers[1].usage.prompt_tokens_details.cached_tokens == 320


def test_logprobs_in_both_shapes(client, model):
    """The most likely token of a greedy request is the chosen one."""
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=3, **GREEDY
    )
    for entry in chat.choices[0].logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert len(entry.top_logprobs) == 3

    plain = client.completions.create(
        model=model, prompt="a", max_tokens=3, logprobs=2, **GREEDY
    )
    assert len(plain.choices[0].logprobs.tokens) == 3
    assert all(len(top) == 2 for top in plain.choices[0].logprobs.top_logprobs)


def test_seeded_choices_are_reproducible(client, model):
    """The same seed gives the same n choices, whatever else runs."""
    options = {"model": model, "prompt": "x", "max_tokens": 8, "n": 3, "seed": 11}

    first, again = (client.completions.create(**options) for _ in range(2))

    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert len({c.text for c in first.choices}) > 1


def test_errors_are_the_clients_own_types(client, model):
    """A bad request, an unknown model and a prompt that is too long raise the client's own
    exceptions."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            functions=[{"name": "f"}],
        )
    assert bad.value.param == "functions"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="a" * 5000)
    assert long.value.code == "context_length_exceeded"


def test_many_at_once_over_the_async_client(server, model):
    """Each of forty concurrent streams gets what it gets alone."""

    async def scenario():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:

            async def stream(number):
                ids = []
                chunks = await client.completions.create(
                    model=model,
                    prompt=f"prompt number {number % 4}",
                    max_tokens=12,
                    temperature=0,
                    stream=True,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )
                async for chunk in chunks:
                    ids += getattr(chunk.choices[0], "token_ids")  # noqa: B009 -- an extra of ours
                return tuple(ids)

            return await asyncio.gather(*(stream(number) for number in range(40)))

    found = asyncio.run(scenario())

    assert {len(ids) for ids in found} == {12}
    for number in range(4):
        assert len(set(found[number::4])) == 1
    state = server.until_idle()
    assert state["tiers"]["device"]["held"] == 0


def test_prompt_logprobs_and_echo(client, model):
    """vLLM's field in both APIs and OpenAI's `echo` with `logprobs` give the same numbers."""
    options = {"model": model, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
    whole = client.completions.create(**options, extra_body={"prompt_logprobs": 2}).choices[0]
    entries = whole.prompt_logprobs
    assert entries[0] is None
    assert len(entries) == 16
    assert all(2 <= len(entry) <= 3 for entry in entries[1:])
    echoed = client.completions.create(**options, echo=True, logprobs=2).choices[0]
    assert echoed.text == "Once upon a time" + whole.text
    found = echoed.logprobs
    assert found.token_logprobs[0] is None
    assert len(found.tokens) == 20
    for token, value, entry in zip(
        b"nce upon", found.token_logprobs[1:], entries[1:], strict=False
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
    assert found.text_offset == list(range(16)) + found.text_offset[16:]
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=4, extra_body={"prompt_logprobs": 0}
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
