"""`headwater bench gpu`: the GPU path, compared with the limits of the machine and with
transformers.

Needs an NVIDIA GPU, torch, Triton, transformers and cuda-python, and no library of the
server for the parts that run in this process. `http`, `first_wave` and `mixed` start a server
and clients on this machine. Models are random weights with real shapes.
"""

import json
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headwater.bench._flags import read_flags
from headwater.bench._report import print_report
from headwater.clock import SystemClock
from headwater.errors import ConfigError

PARTS = (
    "copies",
    "handoff",
    "decode",
    "prefill",
    "first_token",
    "start",
    "all_miss",
    "trace",
    "sampling",
    "moe",
    "mla",
    "families",
    "streams",
    "json",
    "http",
    "mixed",
    "first_wave",
    "quant",
    "fp8kv",
    "kernels",
)
_MOE_SHAPES = ("qwen3-30b-a3b", "qwen3-30b-a3b-12")
_MLA_SHAPES = ("deepseek-v2-lite", "deepseek-v2-lite-9")
_FAMILY_SHAPES = ("gemma-3-4b", "phi-4-mini", "olmo-2-7b", "1b")
_BATCHES = (1, 32, 128, 256)


def main(argv: Sequence[str]) -> int:
    """Run the chosen parts and print a table or JSON."""
    options = read_flags(_parser(), argv)
    try:
        from headwater.bench._gpu_engine import require_gpu
    except ModuleNotFoundError as exc:
        raise ConfigError(f"this benchmark needs the package {exc.name!r}, and a GPU") from exc
    require_gpu()
    run = _Run(options)
    with run.closing:
        for part in options.parts.split(","):
            run.attempt(part)
    print_report("headwater bench gpu", run.result, as_json=options.json)
    return 1 if run.result["failed"] else 0


class _Run:
    """The parts, in the given order; a part may use what an earlier one left."""

    def __init__(self, options: Namespace) -> None:
        from headwater.bench import _gpu_ceilings

        self._options = options
        self._clock = SystemClock()
        self._made: Any = None
        self._made_folder: Path | None = None
        self.closing = ExitStack()
        """What a part has left running for later parts; it is closed at the end of the
        benchmark."""
        self._ceilings = _gpu_ceilings.measure()
        self.result: dict[str, Any] = {
            "model": options.model,
            "ceilings": self._ceilings,
            "failed": [],
        }

    @property
    def _model(self) -> Any:  # noqa: ANN401 -- a LoadedModel, which needs torch
        """The model of most parts; made when the first of them runs."""
        from headwater.bench import _gpu_engine

        if self._made is None:
            self._made = _gpu_engine.make_model(self._options.model)
        return self._made

    def _release_model(self) -> None:
        """Make room for another model."""
        from headwater.bench import _gpu_engine

        self._made = None
        _gpu_engine.release_memory()

    def attempt(self, part: str) -> None:
        """Run one part; a failure is reported and does not stop the others."""
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "copies": self._copies,
            "handoff": self._handoff,
            "decode": self._decode,
            "prefill": self._prefill,
            "first_token": self._first_token,
            "start": self._start,
            "all_miss": self._all_miss,
            "trace": self._trace,
            "sampling": self._sampling,
            "moe": lambda: self._experts(_MOE_SHAPES),
            "mla": lambda: self._experts(_MLA_SHAPES),
            "families": self._families,
            "streams": self._streams,
            "json": self._json,
            "http": self._http,
            "first_wave": self._first_wave,
            "mixed": self._mixed,
            "quant": self._quant,
            "fp8kv": self._fp8kv,
            "kernels": self._kernels,
        }
        if part not in parts:
            raise ConfigError(f"no part {part!r}; known: {', '.join(PARTS)}")
        began_s = self._clock.now()
        try:
            self.result[part] = parts[part]()
        except Exception:  # noqa: BLE001 -- told, and the other parts are run
            traceback.print_exc()
            self.result["failed"].append(part)
        seconds = self._clock.now() - began_s
        shown = json.dumps(self.result.get(part), default=float)
        print(f"{part}: {seconds:.1f} s {shown}", file=sys.stderr, flush=True)

    def _copies(self) -> dict[str, Any]:
        from headwater.bench import _gpu_decode, _gpu_engine

        batch, rounds = (32, 1) if self._options.quick else (128, 10)
        engine = _gpu_engine.GpuEngine(
            self._model, num_blocks=_gpu_decode.blocks_for(batch), max_num_seqs=batch
        )
        found = _gpu_decode.measure_copies(engine, self._ceilings, batch=batch, rounds=rounds)
        engine.close()
        return found

    def _handoff(self) -> dict[str, Any]:
        from headwater.bench import _gpu_handoff

        found: dict[str, Any] = {}
        self.result["handoff"] = found  # printed even if a link fails
        _gpu_handoff.measure_handoff(
            lambda: self._model, self._options.model, found, is_quick=self._options.quick
        )
        return found

    def _decode(self) -> dict[str, Any]:
        from headwater.bench import _gpu_continuous, _gpu_decode, _gpu_engine, _gpu_peers

        batches = [1, 32] if self._options.quick else list(_BATCHES)
        engine = _gpu_engine.GpuEngine(
            self._model,
            num_blocks=_gpu_decode.blocks_for(batches[-1]),
            max_num_seqs=batches[-1],
        )
        ceiling = self._ceilings["memory_gb_s"]
        found = _gpu_decode.measure_decode(self._model, engine, batches, ceiling)
        if self._options.quick:
            engine.close()
            return found
        ours = _gpu_continuous.serve_ours(engine)
        engine.close()
        self.result["decode"] = found  # printed even if the code of the other engine fails
        found["transformers_generate_tokens_s"] = {
            str(batch): _gpu_peers.generate_tokens_s(self._model, batch, prompt=976, output=24)
            for batch in (1, 32)
        }
        found["continuous_128"] = _gpu_continuous.compare(self._model, engine, ours)
        return found

    def _prefill(self) -> dict[str, Any]:
        from headwater.bench import _gpu_engine, _gpu_prompts

        lengths = _gpu_prompts.LENGTHS[:2] if self._options.quick else _gpu_prompts.LENGTHS
        engine = _gpu_engine.GpuEngine(
            self._model, num_blocks=2200, max_num_seqs=8, max_batched_tokens=lengths[-1]
        )
        found = _gpu_prompts.measure_prefill(self._model, engine, lengths)
        engine.close()
        return found

    def _first_token(self) -> dict[str, Any]:
        from headwater.bench import _gpu_peers, _gpu_prompts

        long = _gpu_prompts.LONG
        known = self.result.get("prefill", {}).get(str(long))
        theirs = (
            long / known["transformers_tokens_s"]
            if known
            else _gpu_peers.prefill_s(self._model, long)
        )
        with tempfile.TemporaryDirectory(dir=self._options.folder) as folder:
            return _gpu_prompts.measure_first_token(
                self._model, Path(folder), self._ceilings["host_to_device_gb_s"], theirs
            )

    def _start(self) -> dict[str, Any]:
        from headwater.bench import _gpu_start

        return _gpu_start.measure_start(self._model, slab_gib=8 if self._options.quick else 64)

    def _all_miss(self) -> dict[str, Any]:
        from headwater.bench import _gpu_traffic

        return _gpu_traffic.measure_all_miss(
            self._model, pairs=3 if self._options.quick else self._options.pairs
        )

    def _trace(self) -> dict[str, Any]:
        from headwater.bench import _gpu_traffic

        if self._options.trace is None:
            return {"skipped": "no --trace was given"}
        return _gpu_traffic.measure_trace(
            self._model,
            self._options.trace,
            requests=40 if self._options.quick else 160,
            scale=4,
            clients=32,
            blocks=2400,
        )

    def _sampling(self) -> dict[str, Any]:
        from headwater.bench import _gpu_engine, _gpu_sampling

        found = {}
        for batch in (32,) if self._options.quick else (128, 512):
            engine = _gpu_engine.GpuEngine(
                self._model, num_blocks=_gpu_sampling.blocks_for(batch), max_num_seqs=batch
            )
            found[str(batch)] = _gpu_sampling.measure_sampling(engine, batch)
            engine.close()
        return found

    def _experts(self, shapes: tuple[str, str]) -> dict[str, Any]:
        """Measure a complete shape and the same shape with fewer layers; `--quick` measures
        only the second one."""
        from headwater.bench import _gpu_decode, _gpu_engine, _gpu_moe

        self._release_model()
        found = {}
        for shape in shapes[1:] if self._options.quick else shapes:
            model = _gpu_engine.make_model(shape)
            engine = _gpu_engine.GpuEngine(
                model, num_blocks=_gpu_decode.blocks_for(128) + 256, max_num_seqs=128
            )
            found[shape] = _gpu_moe.measure_moe(model, engine, [1, 32, 128], self._ceilings)
            found[shape]["is_fused"] = engine.runner.is_fused
            found[shape]["kv_token_bytes"] = model.token_bytes
            engine.close()
            del engine, model
            self._release_model()
        return found

    def _families(self) -> dict[str, Any]:
        from headwater.bench import _gpu_decode, _gpu_engine

        self._release_model()
        found = {}
        for shape in _FAMILY_SHAPES:
            model = _gpu_engine.make_model(shape)
            engine = _gpu_engine.GpuEngine(
                model, num_blocks=_gpu_decode.blocks_for(32), max_num_seqs=32
            )
            ceiling = self._ceilings["memory_gb_s"]
            found[shape] = _gpu_decode.measure_decode(model, engine, [1, 32], ceiling)
            found[shape]["is_fused"] = engine.runner.is_fused
            engine.close()
            del engine, model
            self._release_model()
        return found

    def _streams(self) -> dict[str, Any]:
        from headwater.bench import _gpu_engine, _gpu_streams

        found = {}
        for clients in (32,) if self._options.quick else (128, 512, 1024):
            engine = _gpu_engine.GpuEngine(
                self._model, num_blocks=_gpu_streams.blocks_for(clients), max_num_seqs=clients
            )
            found[str(clients)] = _gpu_streams.measure_streams(
                self._model, engine, clients, self._ceilings
            )
            engine.close()
        return found

    def _json(self) -> dict[str, Any]:
        from headwater.bench import _gpu_engine, _gpu_json

        batch = 32 if self._options.quick else 128
        engine = _gpu_engine.GpuEngine(
            self._model,
            num_blocks=_gpu_json.blocks_for(batch),
            max_num_seqs=batch,
            masks=_gpu_json.make_masks(self._model.vocab_size, batch),
        )
        found = _gpu_json.measure_json(engine, batch)
        engine.close()
        return found

    @property
    def _folder(self) -> Path:
        """The model as a folder, for servers; this process releases the device for them."""
        from headwater.bench import _gpu_http

        self._release_model()
        if self._made_folder is None:
            folder = _gpu_http.model_folder(self._options.model)
            self._made_folder = self.closing.enter_context(folder)
        return self._made_folder

    def _http(self) -> dict[str, Any]:
        from headwater.bench import _gpu_http

        clients = (32,) if self._options.quick else (128, 512, 1024)
        found = _gpu_http.measure_http(self._folder, clients)
        for count, inside in self.result.get("streams", {}).items():
            outside = found.get(f"greedy_{count}")
            if outside:
                in_process = inside["closed_loop_tokens_s"]
                outside["of_in_process"] = outside["tokens_s"] / in_process
        return found

    def _mixed(self) -> dict[str, Any]:
        from headwater.bench import _gpu_http

        budgets = (2048,) if self._options.quick else self._options.budgets
        return _gpu_http.measure_mixed(self._folder, budgets)

    def _first_wave(self) -> dict[str, Any]:
        """Servers of `http` and `mixed` get the same waves first, so their results are used."""
        from headwater.bench import _gpu_http

        with_host, without = self.result.get("http"), self.result.get("mixed")
        return _gpu_http.compare_waves(
            with_host or _gpu_http.first_waves(self._folder),
            without["adaptive"]
            if without
            else _gpu_http.first_waves(self._folder, "--swap-space", "0"),
        )

    def _quant(self) -> dict[str, Any]:
        from headwater.bench import _gpu_quant

        self._release_model()
        is_quick = self._options.quick
        found = _gpu_quant.measure_quantized(self._options.model, is_quick=is_quick)
        self.result["quant"] = found  # printed even if the other shape fails
        found["gpt-oss-20b-mxfp4"] = _gpu_quant.measure_mxfp4(self._ceilings, is_quick=is_quick)
        return found

    def _fp8kv(self) -> dict[str, Any]:
        from headwater.bench import _gpu_fp8kv

        return _gpu_fp8kv.measure_fp8_kv(self._model, is_quick=self._options.quick)

    def _kernels(self) -> dict[str, Any]:
        from headwater.bench import _gpu_kernels

        found = _gpu_kernels.measure_kernels(is_quick=self._options.quick)
        if found["failed"]:
            self.result["failed"].append("kernels")
        return found


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="headwater bench gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="parts to measure, separated by commas (all)"
    )
    parser.add_argument(
        "--model", default="8b", help="shape of the model, such as 8b, 1b or qwen3-8b (8b)"
    )
    parser.add_argument("--trace", type=Path, help="a trace in the Mooncake format")
    parser.add_argument("--folder", type=Path, help="where files are written (temporary)")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of the all-miss runs (6)")
    parser.add_argument(
        "--budgets",
        type=lambda text: tuple(int(part) for part in text.split(",")),
        default=(1024, 2048, 8192),
        metavar="N,N",
        help="fixed tokens per step that `mixed` is compared with (1024,2048,8192)",
    )
    parser.add_argument("--quick", action="store_true", help="smaller batches, fewer repeats")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
