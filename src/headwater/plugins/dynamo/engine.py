"""Implements Dynamo's `LLMEngine` with a Headwater server: passes on requests, tokens, KV
events and load.

Dynamo's frontend tokenizes, routes and detokenizes. The worker forwards token ids to its server and
hands the server's KV events to Dynamo, whose KV router then knows which blocks this worker has.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.backend.worker import WorkerConfig
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from headwater.errors import EngineDead, QueueFull, RequestError
from headwater.plugins.dynamo.server import OwnServer
from headwater.plugins.versions import require_tested

log = logging.getLogger(__name__)

_LOAD_EVERY_S = 0.1

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed",
    "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
_CONSTRAINTS = ("json", "regex", "choice", "grammar")
"""Kinds of guided decoding that have the same name in Headwater's `structured_outputs`."""

_FINISHED = {"stop": "stop", "length": "length", "abort": "cancelled"}


class HeadwaterEngine(LLMEngine):
    """One Headwater server as one Dynamo worker."""

    def __init__(self, model: str | None, served_name: str, server: OwnServer) -> None:
        self._model = model
        self._name = served_name
        self._server = server
        self._context_length = 0
        self._publisher: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def from_args(
        cls, argv: list[str] | None = None
    ) -> tuple["HeadwaterEngine", WorkerConfig]:
        given = list(sys.argv[1:] if argv is None else argv)
        at = given.index("--") if "--" in given else len(given)
        options, flags = _parser().parse_args(given[:at]), given[at + 1 :]
        require_tested("ai-dynamo", allow_untested=options.allow_untested)
        name = options.served_model_name or options.model
        engine = cls(options.model, name, OwnServer(options.model, flags))
        config = WorkerConfig(
            namespace=options.namespace,
            component=options.component,
            model_name=options.model,
            served_model_name=name,
            discovery_backend=options.discovery_backend,
            request_plane=options.request_plane,
            event_plane=options.event_plane,
        )
        return engine, config

    async def start(self, worker_id: int) -> EngineConfig:
        info = (await self._server.start())["engine"]
        self._context_length = info["max_model_len"]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._publish_load()), loop.create_task(self._watch())]
        return EngineConfig(
            model=str(self._model),
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=self._context_length,
                kv_cache_block_size=info.get("block_tokens"),
                total_kv_blocks=info.get("num_device_blocks"),
                max_num_seqs=info.get("max_num_seqs"),
            ),
        )

    async def generate(
        self,
        request: Any,  # noqa: ANN401 - Dynamo's
        context: Any,  # noqa: ANN401 - Dynamo's
    ) -> AsyncGenerator[Any, None]:
        """Chunks of one answer. Dynamo tries another worker after EngineShutdown, and tells the
        client what is wrong after InvalidArgument."""
        try:
            async for chunk in self._chunks(request, context):
                yield chunk
        except QueueFull:
            raise
        except RequestError as error:
            raise InvalidArgument(str(error)) from error
        except EngineDead as error:
            raise EngineShutdown(str(error)) from error

    async def _chunks(
        self,
        request: Any,  # noqa: ANN401 - Dynamo's
        context: Any,  # noqa: ANN401 - Dynamo's
    ) -> AsyncGenerator[Any, None]:
        prompt_tokens, generated = len(request["token_ids"]), 0
        cached = 0
        body = _body(request, context, self._context_length)
        async for event in self._server.stream("/v1/completions", body):
            usage = event.get("usage")
            if usage is not None:
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
            for choice in event.get("choices", ()):
                tokens = choice.get("token_ids") or []
                generated += len(tokens)
                chunk: dict[str, Any] = {"token_ids": tokens, "index": choice["index"]}
                reason = choice.get("finish_reason")
                if reason is not None:
                    chunk["finish_reason"] = _FINISHED.get(reason, reason)
                    chunk["completion_usage"] = {
                        "prompt_tokens": prompt_tokens,
                        "completion_tokens": generated,
                        "total_tokens": prompt_tokens + generated,
                        "prompt_tokens_details": {"cached_tokens": cached},
                    }
                yield chunk

    async def abort(self, context: Any) -> None:  # noqa: ANN401 - Dynamo's
        """Nothing to do: Dynamo ends `generate`, which closes the stream of the request, and so
        aborts it."""

    async def kv_event_sources(self) -> list[Any]:
        return [ZmqSource(endpoint=self._server.events_endpoint, topic="", dp_rank=0)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:  # noqa: ANN401 - Dynamo's
        self._publisher = publisher

    async def cleanup(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._server.stop()

    async def _publish_load(self) -> None:
        """Report the use of the device to Dynamo's router while the worker serves."""
        while True:
            await asyncio.sleep(_LOAD_EVERY_S)
            if self._publisher is not None:
                with suppress(EngineDead, RequestError):  # while the engine restarts
                    self._publisher.publish(0, _snapshot(await self._server.get("/cache")))

    async def _watch(self) -> None:
        """End the worker when its server has ended: Dynamo must not send it requests any more."""
        code = await self._server.wait_end()
        log.error("headwater serve ended with %d; this worker stops", code)
        signal.raise_signal(signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headwater.plugins.dynamo",
        description="A Headwater engine as a Dynamo worker.",
        epilog="Flags of `headwater serve` follow after `--`.",
    )
    parser.add_argument("model", help="model directory; it must have a tokenizer")
    parser.add_argument("--served-model-name")
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--component", default="headwater")
    parser.add_argument("--discovery-backend", default="file")
    parser.add_argument("--request-plane", default="tcp")
    parser.add_argument("--event-plane", default="zmq")
    parser.add_argument("--allow-untested", action="store_true")
    return parser


def _body(request: Any, context: Any, context_length: int) -> dict[str, Any]:  # noqa: ANN401 - Dynamo's
    """Dynamo's request as a request of Headwater's completions API. Without a token limit, an
    answer may fill the context. Raises RequestError for what is not supported."""
    _require_supported(request)
    sampling = request.get("sampling_options") or {}
    stops = request.get("stop_conditions") or {}
    body = {name: sampling[name] for name in _SAMPLING if sampling.get(name) is not None}
    if body.get("top_k", 0) < 0:
        del body["top_k"]  # Dynamo's value for "no limit"
    ending = {
        "max_tokens": stops.get("max_tokens")
        or max(context_length - len(request["token_ids"]), 1),
        "min_tokens": stops.get("min_tokens"),
        "ignore_eos": stops.get("ignore_eos"),
        "stop_token_ids": sorted(
            {*(stops.get("stop_token_ids_hidden") or ()), *(stops.get("stop_token_ids") or ())}
        ),
        "n": sampling.get("n"),
        "structured_outputs": _constraint(sampling.get("guided_decoding") or {}),
    }
    return {
        "prompt": list(request["token_ids"]),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "request_id": context.id(),
        **body,
        **{name: value for name, value in ending.items() if value},
    }


def _require_supported(request: Any) -> None:  # noqa: ANN401 - Dynamo's
    """Raise RequestError for fields of the request that the answer would ignore."""
    asked = {**(request.get("output_options") or {}), **(request.get("stop_conditions") or {})}
    names = ("logprobs", "prompt_logprobs", "max_thinking_tokens")
    lacking = [name for name in names if asked.get(name) is not None]
    lacking += [name for name in ("multi_modal_data", "prefill_result") if request.get(name)]
    if lacking:
        raise RequestError(
            f"a Headwater worker behind Dynamo does not support {', '.join(lacking)}; leave it "
            "out, or send the request to `headwater serve`"
        )


def _constraint(guided: dict[str, Any]) -> dict[str, Any]:
    """Dynamo's guided decoding as `structured_outputs`."""
    given = {name: value for name, value in guided.items() if value is not None}
    given.pop("backend", None)
    unknown = set(given) - set(_CONSTRAINTS)
    if unknown:
        raise RequestError(
            f"guided decoding by {', '.join(sorted(unknown))} is not supported; send one of "
            f"{', '.join(_CONSTRAINTS)}"
        )
    return given


def _snapshot(cache: dict[str, Any]) -> ComponentSnapshot:
    """Use of the device tier, from `GET /cache`. Like vLLM's, it counts the blocks of running
    requests only: a worker whose blocks are all cached is not busy."""
    device = cache["tiers"]["device"]
    total = device["num_blocks"]
    used = total - device["free"] - device["evictable"]
    return ComponentSnapshot(
        kv_used_blocks=used,
        kv_total_blocks=total,
        gpu_cache_usage=used / max(total, 1),
        dp_rank=0,
    )
