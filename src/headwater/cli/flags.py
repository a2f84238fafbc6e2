"""The flags of `serve`, in groups. Help texts state effect, unit and default."""

from argparse import ArgumentParser, BooleanOptionalAction, _SubParsersAction
from pathlib import Path

from headwater.cli.cluster_flags import add_cluster_flags
from headwater.cli.security import add_access_flags
from headwater.cli.values import add_command, help_text, number_value
from headwater.config import (
    CPU_NUM_SEQS,
    CPU_STEP_TOKENS,
    EVICTIONS,
    LOAD_POLICIES,
    LOG_FORMATS,
    WRITE_POLICIES,
    EngineConfig,
)
from headwater.launch.limits import PREFILL_TOKENS
from headwater.server.config import LimitsConfig, ServerConfig

_SERVE = """\
Serve a Hugging Face model, a directory (config, safetensors, tokenizer) or a name, at /v1/completions and
/v1/chat/completions. Without MODEL, the built-in tiny model: random weights, made at first
use, so that everything can be tried offline.

  headwater serve
  headwater serve Qwen/Qwen3-0.6B           # downloaded once, then found in the local cache
  headwater serve ./Llama-3.2-1B --port 8080 --max-model-len 8192
"""

_ENGINE = EngineConfig()
_SERVER = ServerConfig()
_LIMITS = LimitsConfig()


def add_serve(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    serve = add_command(commands, "serve [MODEL] [flags]", _SERVE)
    serve.add_argument(
        "model", nargs="?", metavar="MODEL", help="model directory or Hugging Face name"
    )
    for add in (
        _add_http,
        add_access_flags,
        _add_model,
        _add_memory,
        _add_tiers,
        _add_scheduling,
        add_cluster_flags,
        _add_limits,
    ):
        add(serve)
    flags = [flag for action in serve._actions for flag in action.option_strings]
    serve.set_defaults(flags=flags)


def _add_http(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("http")
    group.add_argument("--host", default=_SERVER.host, help=help_text("address to bind"))
    group.add_argument(
        "--port",
        type=int,
        default=_SERVER.port,
        help=help_text("port to bind; 0 is any free one"),
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="model name for clients (default: the last part of its path)",
    )
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        default=_SERVER.tool_call_parser,
        help=help_text(
            "format of the model's tool calls: auto (that of its chat template), none, "
            "deepseek, glm, harmony, hermes, kimi, llama3, mistral, qwen_coder or module:Class"
        ),
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        default=_SERVER.reasoning_parser,
        help=help_text(
            "tags around the model's reasoning: auto (those of its chat template), none, "
            "think, mistral, kimi or seed"
        ),
    )
    group.add_argument(
        "--drain-timeout",
        type=number_value,
        metavar="S",
        default=_SERVER.drain_timeout_s,
        help=help_text("seconds for running requests to finish when the server is stopped"),
    )
    group.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="record arrival times, lengths and salted block keys (no text) for headwater replay",
    )
    group.add_argument(
        "--api-workers",
        type=int,
        metavar="N",
        help="HTTP worker processes on the port (1 with --device cpu, else a quarter of the cores)",
    )
    group.add_argument(
        "--step-timeout",
        type=number_value,
        metavar="S",
        default=_ENGINE.step_timeout_s,
        help=help_text(
            "longest wait in seconds for a device step; then the engine is restarted"
        ),
    )
    group.add_argument(
        "--max-engine-restarts",
        type=int,
        metavar="N",
        default=_SERVER.max_engine_restarts,
        help=help_text(
            "maximum number of restarts of a dead engine within 10 minutes; then exit with 1"
        ),
    )
    group.add_argument(
        "--exit-with-engine",
        dest="max_engine_restarts",
        action="store_const",
        const=0,
        help="exit with 1 when the engine dies; the same as --max-engine-restarts 0",
    )
    group.add_argument(
        "--vllm-metric-names",
        action="store_true",
        help="also expose some metrics with the prefix vllm:, for routers that read vLLM's names",
    )
    group.add_argument(
        "--key-metrics",
        action="store_true",
        help="count sequences and tokens by the name of their API key in /metrics",
    )
    group.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default=_SERVER.log_format,
        help=help_text("format of log lines; json adds one line per finished request"),
    )


def _add_model(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit, if MODEL is a Hugging Face name (default: the cached one, "
        "else main)",
    )
    group.add_argument(
        "--dtype", default=_ENGINE.dtype, help=help_text("type of weights and KV")
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default=_ENGINE.kv_cache_dtype,
        help=help_text(
            "type of stored KV on every tier; fp8 takes half the memory of a 16-bit type"
        ),
    )
    group.add_argument(
        "--device",
        default=_ENGINE.device,
        help=help_text(
            "cpu, cuda or cuda:N; with several ranks also a list, one for each rank"
        ),
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        default=_ENGINE.tensor_parallel_size,
        help=help_text("ranks the model is split over: a process and a device each"),
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of each rank (default: cores - 1, divided by the ranks)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="maximum number of tokens of prompt and output together (default: that of the model)",
    )


def _add_memory(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("memory and cache")
    group.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        default=_ENGINE.block_tokens,
        help=help_text("tokens per block, the unit of reuse"),
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=number_value,
        metavar="SHARE",
        help="share of the device's free memory for KV blocks (default: 0.9 of a GPU's, 0.95 of a large one's, else 0.5)",
    )
    group.add_argument(
        "--num-gpu-blocks-override", type=int, metavar="N", help="exact number of device blocks"
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=BooleanOptionalAction,
        default=_ENGINE.prefix_caching,
        help="reuse blocks that earlier requests computed (default: on)",
    )
    group.add_argument(
        "--enable-output-caching",
        action=BooleanOptionalAction,
        default=_ENGINE.output_caching,
        help="keep generated tokens for the next turn (default: on)",
    )
    group.add_argument(
        "--eviction",
        choices=EVICTIONS,
        default=_ENGINE.eviction,
        help=help_text("eviction policy; see docs/eviction.md"),
    )
    group.add_argument(
        "--eviction-weights",
        metavar="none|shipped|FILE",
        default=_ENGINE.eviction_weights,
        help=help_text("initial weights of --eviction session"),
    )
    group.add_argument(
        "--hint-budget",
        type=number_value,
        metavar="SHARE",
        default=_ENGINE.hint_budget,
        help=help_text("share of the device blocks that hints of one tenant may keep"),
    )


def _add_tiers(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("host and storage tiers")
    group.add_argument(
        "--swap-space",
        "--kv-offloading-size",
        type=number_value,
        metavar="GIB",
        default=_ENGINE.swap_space_gib,
        help="main memory of the host tier in GiB; 0 turns it off (default: on a GPU half of the "
        "free main memory divided by the GPUs of the machine, at most 64; on a CPU 0, or up "
        "to 4 with a storage backend)",
    )
    group.add_argument(
        "--write-policy",
        choices=WRITE_POLICIES,
        default=_ENGINE.write_policy,
        help=help_text("when a computed block is written to the host tier"),
    )
    group.add_argument(
        "--save-preempted",
        action=BooleanOptionalAction,
        default=_ENGINE.save_preempted,
        help="write the blocks of preempted sequences to the host tier (default: on)",
    )
    group.add_argument(
        "--prefetch-sessions",
        action=BooleanOptionalAction,
        default=_ENGINE.prefetch_sessions,
        help="load sessions shortly before the return time that was announced (default: on)",
    )
    group.add_argument(
        "--load-policy",
        choices=LOAD_POLICIES,
        default=_ENGINE.load_policy,
        help=help_text("whether blocks of lower tiers are loaded or recomputed"),
    )
    group.add_argument(
        "--load-timeout",
        type=number_value,
        metavar="S",
        default=_ENGINE.load_timeout_s,
        help=help_text("longest wait in seconds of a request for lower tiers"),
    )
    group.add_argument(
        "--kvcache-storage-backend",
        metavar="NAME",
        help="storage below the host tier: file, redis, mooncake, memory or module:Class",
    )
    group.add_argument(
        "--kvcache-storage-config",
        metavar="JSON",
        help="settings of the storage backend as JSON",
    )


def _add_scheduling(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"maximum number of sequences per step (default: {CPU_NUM_SEQS} on a CPU; on a GPU by its memory)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens computed in one step (default: "
        f"{CPU_STEP_TOKENS} on a CPU, {PREFILL_TOKENS} for the prefill role; on a GPU by its memory)",
    )
    group.add_argument(
        "--max-itl-ms",
        type=number_value,
        metavar="MS",
        help="target for the time between tokens while prompts are computed, which bounds the "
        "prompt tokens of a step; 0 means no target (default: four decode steps, at least 30 ms, on a "
        "GPU; none on a CPU)",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default=_ENGINE.scheduling_policy,
        help=help_text("order of the waiting queue"),
    )


def _add_limits(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("limits on one client")
    group.add_argument(
        "--max-body-mib",
        type=number_value,
        metavar="MIB",
        default=_LIMITS.max_body_bytes / (1 << 20),
        help=help_text("longest request body in MiB"),
    )
    group.add_argument(
        "--max-queued-requests",
        type=int,
        metavar="N",
        default=_LIMITS.max_queued,
        help=help_text("maximum number of waiting sequences; more get a 429"),
    )
    group.add_argument(
        "--max-stored-responses",
        type=int,
        metavar="N",
        default=_LIMITS.max_stored_responses,
        help=help_text("responses kept in memory for previous_response_id; 0 keeps none"),
    )
    group.add_argument(
        "--stored-response-lifetime",
        type=number_value,
        metavar="S",
        default=_LIMITS.stored_lifetime_s,
        help=help_text("seconds that each stored response is kept"),
    )
