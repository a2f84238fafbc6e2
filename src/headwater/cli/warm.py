"""`headwater warm`: compile everything a model needs on this device, for image builds."""

import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction

from headwater.cli.values import add_command, help_text
from headwater.config import EngineConfig

_ABOUT = """\
Load a model, compile and load all kernels that its requests can need, and exit. The compiled
kernels stay in the cache folder (HEADWATER_CACHE, by default ~/.cache/headwater), in a folder named
after the device, its driver and the versions. Run it in an image build or an init container on the
same kind of machine; servers that find the folder start without compiling.

  headwater warm ./Qwen3-8B --device cuda
"""


def add_warm(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = add_command(commands, "warm [MODEL] [flags]", _ABOUT)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model directory or Hugging Face name (default: built in)",
    )
    parser.add_argument("--device", default="cuda", help=help_text("where the model runs"))
    parser.add_argument("--dtype", default="auto", help=help_text("type of weights and KV"))
    parser.add_argument(
        "--block-size", type=int, default=EngineConfig().block_tokens, metavar="TOKENS",
        help=help_text("tokens per block, as for serve"),
    )  # fmt: skip
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="maximum number of sequences per step, as for serve (default: chosen for the device)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens per step, as for serve (default: chosen for the device)",
    )
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(flags=flags)


def run_warm(options: Namespace) -> int:
    """Prepare everything and return the exit code."""
    # Nothing heavier than the parser is imported before a command is known.
    from headwater.clock import SystemClock
    from headwater.launch.core import build_core
    from headwater.launch.hub import find_model
    from headwater.metrics.logs import set_up_logs
    from headwater.native.folder import cache_folder

    set_up_logs("text")
    clock = SystemClock()
    began_s = clock.now()
    core, info = build_core(
        EngineConfig(
            model=find_model(options.model).folder,
            dtype=options.dtype,
            device=options.device,
            block_tokens=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_batched_tokens=options.max_num_batched_tokens,
            swap_space_gib=0.0,
        )
    )
    core.close()
    sys.stdout.write(
        f"{info.model_name} is prepared on {info.device} after {clock.now() - began_s:.1f} s; "
        f"compiled code is in {cache_folder()}\n"
    )
    return 0
