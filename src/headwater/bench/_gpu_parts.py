"""What each part of `headwater bench gpu` measures, with which model and engine."""

import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

_MOE_SHAPES = ("qwen3-30b-a3b", "qwen3-30b-a3b-12")
_MLA_SHAPES = ("deepseek-v2-lite", "deepseek-v2-lite-9")
_FAMILY_SHAPES = ("gemma-3-4b", "phi-4-mini", "olmo-2-7b", "1b")
_BATCHES = (1, 32, 128, 256)


class GpuParts:
    """The parts, each measured when it is called; a part may use models and results of earlier
    parts."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._made: Any = None
        self._made_folder: Path | None = None
        self.closing = ExitStack()
        """Closes, at the end of the benchmark, what later parts shared: the model folder."""
        self.result: dict[str, Any] = {"model": options.model, "ceilings": {}, "failed": []}

    @property
    def _ceilings(self) -> dict[str, float]:
        """The limits of the machine, measured before the first part that compares with them."""
        from headwater.bench import _gpu_ceilings

        ceilings: dict[str, float] = self.result["ceilings"]
        if not ceilings:
            ceilings |= _gpu_ceilings.measure()
        return ceilings

    @property
    def _model(self) -> Any:  # noqa: ANN401 -- a LoadedModel, which needs torch
        """The model of most parts; made when the first of them runs."""
        from headwater.bench import _gpu_engine

        if self._made is None:
            self._made = _gpu_engine.make_model(self._options.model)
        return self._made

    def _release_model(self) -> None:
        """Make room for another model."""
        if self._made is not None:
            from headwater.bench import _gpu_engine

            self._made = None
            _gpu_engine.release_memory()

    def measures(self) -> dict[str, Callable[[], dict[str, Any] | None]]:
        """The function of each part, by name. It returns figures, or None after it has put them
        into `result`."""
        return {
            "copies": self._copies,
            "handoff": self._handoff,
            "decode": self._decode,
            "prefill": self._prefill,
            "first_token": self._first_token,
            "start": self._start,
            "all_miss": self._all_miss,
            "trace": self._trace,
            "sampling": self._sampling,
            "moe": lambda: self._experts("moe", _MOE_SHAPES),
            "mla": lambda: self._experts("mla", _MLA_SHAPES),
            "families": self._families,
            "streams": self._streams,
            "json": self._json,
            "model_files": self._model_files,
            "http": self._http,
            "first_wave": self._first_wave,
            "mixed": self._mixed,
            "sessions": self._sessions,
            "quant": self._quant,
            "mxfp4": self._mxfp4,
            "fp8moe": self._fp8moe,
            "fp8kv": self._fp8kv,
            "fp8mla": self._fp8mla,
            "kernels": self._kernels,
        }

    def _found(self, part: str) -> dict[str, Any]:
        """Where a part puts one figure after another, so that none is lost if it is stopped."""
        found: dict[str, Any] = {}
        self.result[part] = found
        return found

    def _copies(self) -> dict[str, Any]:
        from headwater.bench import _gpu_decode, _gpu_engine

        batch, rounds = (32, 1) if self._options.quick else (128, 10)
        engine = _gpu_engine.GpuEngine(
            self._model, num_blocks=_gpu_decode.blocks_for(batch), max_num_seqs=batch
        )
        found = _gpu_decode.measure_copies(engine, self._ceilings, batch=batch, rounds=rounds)
        engine.close()
        return found

    def _handoff(self) -> None:
        from headwater.bench import _gpu_handoff

        _gpu_handoff.measure_handoff(
            lambda: self._model,
            self._options.model,
            self._found("handoff"),
            is_quick=self._options.quick,
        )

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

    def _sampling(self) -> None:
        from headwater.bench import _gpu_engine, _gpu_sampling

        found = self._found("sampling")
        for batch in (32,) if self._options.quick else (128, 512):
            engine = _gpu_engine.GpuEngine(
                self._model, num_blocks=_gpu_sampling.blocks_for(batch), max_num_seqs=batch
            )
            found[str(batch)] = _gpu_sampling.measure_sampling(engine, batch)
            engine.close()

    def _experts(self, part: str, shapes: tuple[str, str]) -> None:
        """Measure a complete shape and the same shape with fewer layers; `--quick` measures
        only the second one."""
        from headwater.bench import _gpu_decode, _gpu_engine, _gpu_moe

        self._release_model()
        found = self._found(part)
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
            _gpu_engine.release_memory()

    def _families(self) -> None:
        from headwater.bench import _gpu_decode, _gpu_engine

        self._release_model()
        found = self._found("families")
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
            _gpu_engine.release_memory()

    def _streams(self) -> None:
        from headwater.bench import _gpu_engine, _gpu_streams

        found = self._found("streams")
        for clients in (32,) if self._options.quick else (128, 512, 1024):
            engine = _gpu_engine.GpuEngine(
                self._model, num_blocks=_gpu_streams.blocks_for(clients), max_num_seqs=clients
            )
            found[str(clients)] = _gpu_streams.measure_streams(
                self._model, engine, clients, self._ceilings
            )
            engine.close()

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
    def _served(self) -> Any:  # noqa: ANN401 -- a ServedModel
        """The model as a folder, for servers; this process releases the device for them."""
        from headwater.bench import _gpu_http

        options = self._options
        if options.device == "cpu":
            from headwater.device import builtin

            return _gpu_http.served_model(builtin.ensure(), "cpu", is_quick=options.quick)
        self._model_files()
        assert self._made_folder is not None, "just made"
        return _gpu_http.served_model(self._made_folder, options.device, is_quick=options.quick)

    def _model_files(self) -> dict[str, Any]:
        """The model's files: made once if `--model-folder` names where they are kept."""
        from headwater.bench import _gpu_model_folder

        self._release_model()
        if self._made_folder is None:
            folder = _gpu_model_folder.model_folder(
                self._options.model, self._options.model_folder
            )
            self._made_folder = self.closing.enter_context(folder)
        files = [file for file in self._made_folder.iterdir() if file.is_file()]
        return {"gib": sum(file.stat().st_size for file in files) / (1 << 30)}

    def _http(self) -> None:
        from headwater.bench import _gpu_http

        _gpu_http.measure_http(self._served, self._found("http"))

    def _mixed(self) -> None:
        from headwater.bench import _gpu_http

        budgets = (2048,) if self._options.quick else self._options.budgets
        _gpu_http.measure_mixed(self._served, budgets, self._found("mixed"))

    def _first_wave(self) -> None:
        from headwater.bench import _gpu_http

        _gpu_http.measure_first_waves(self._served, self._found("first_wave"))

    def _sessions(self) -> None:
        from headwater.bench import _gpu_sessions

        served, rounds = self._served, 1 if self._options.quick else self._options.rounds
        spec = _gpu_sessions.spec_for(served.device, rounds=rounds)
        _gpu_sessions.measure_sessions(served, spec, self._found("sessions"))

    def _quant(self) -> None:
        from headwater.bench import _gpu_quant

        self._release_model()
        _gpu_quant.measure_quantized(
            self._options.model, self._found("quant"), is_quick=self._options.quick
        )

    def _mxfp4(self) -> dict[str, Any]:
        from headwater.bench import _gpu_quant

        self._release_model()
        return _gpu_quant.measure_mxfp4(self._ceilings, is_quick=self._options.quick)

    def _fp8moe(self) -> None:
        from headwater.bench import _gpu_quant

        self._release_model()
        _gpu_quant.measure_fp8_experts(
            _MOE_SHAPES[self._options.quick],
            self._ceilings,
            self._found("fp8moe"),
            is_quick=self._options.quick,
        )

    def _fp8mla(self) -> None:
        from headwater.bench import _gpu_fp8kv

        self._release_model()
        shape = _MLA_SHAPES[self._options.quick]
        _gpu_fp8kv.measure_fp8_latents(shape, self._found("fp8mla"))

    def _fp8kv(self) -> dict[str, Any]:
        from headwater.bench import _gpu_fp8kv

        return _gpu_fp8kv.measure_fp8_kv(self._model, is_quick=self._options.quick)

    def _kernels(self) -> dict[str, Any]:
        from headwater.bench import _gpu_kernels

        found = _gpu_kernels.measure_kernels(is_quick=self._options.quick)
        if found["failed"]:
            self.result["failed"].append("kernels")
        return found
