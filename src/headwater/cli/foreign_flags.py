"""Flags of vLLM, SGLang and FastDeploy that `serve` does not have, with one sentence each.

For these flags a suggestion of a similar name would be wrong: the user meant this flag.
"""

FOREIGN_FLAGS: dict[str, str] = {
    # weights and numbers
    "--quantization": "the format of quantised weights is read from config.json; leave the flag out",
    "--load-format": "weights are read from safetensors files; leave the flag out",
    "--trust-remote-code": "no code from a model directory is ever run; the supported model families are built in",
    "--tokenizer": "the tokenizer is read from the model directory; put its files there",
    "--tokenizer-mode": "tokenizers are fast ones from tokenizer.json; leave the flag out",
    "--download-dir": "models of the hub are stored in the cache of Hugging Face; set HF_HOME to move it",
    "--hf-overrides": "config.json of the model directory is used as it is; edit a copy of it",
    "--chat-template": "the chat template is read from the model directory; put yours in tokenizer_config.json there",
    "--seed": "the seed belongs to a request: send `seed`",
    "--generation-config": "sampling defaults are the same for every model; send the values with the request",
    "--override-generation-config": "sampling defaults are the same for every model; send the values with the request",
    "--enable-lora": "adapters (LoRA) are not supported; merge the adapter into the weights",
    "--lora-modules": "adapters (LoRA) are not supported; merge the adapter into the weights",
    "--lora-paths": "adapters (LoRA) are not supported; merge the adapter into the weights",
    "--limit-mm-per-prompt": "only text is served; models with images are not supported",
    # compute
    "--enforce-eager": "nothing is compiled by torch, so there is nothing to turn off; leave the flag out",
    "--compilation-config": "nothing is compiled by torch; leave the flag out",
    "--disable-cuda-graph": "CUDA graphs are always captured for decode steps on a GPU; leave the flag out",
    "--cuda-graph-max-bs": "batch sizes of CUDA graphs follow --max-num-seqs; leave the flag out",
    "--use-cudagraph": "CUDA graphs are always captured for decode steps on a GPU; leave the flag out",
    "--graph-optimization-config": "CUDA graphs are always captured for decode steps on a GPU; leave the flag out",
    "--attention-backend": "the attention kernel is chosen for the device; leave the flag out",
    "--speculative-config": "speculative decoding is not supported; leave the flag out",
    "--speculative-algorithm": "speculative decoding is not supported; leave the flag out",
    "--num-speculative-tokens": "speculative decoding is not supported; leave the flag out",
    "--cpu-offload-gb": "weights stay on the device; --swap-space offloads KV blocks to host memory",
    # parallelism
    "--pipeline-parallel-size": "layers are not split over devices; use --tensor-parallel-size, or start several behind `headwater route`",
    "--data-parallel-size": "an instance computes each request once; `headwater up --mixed N` starts several behind a router",
    "--enable-expert-parallel": "every expert is split over all ranks of --tensor-parallel-size; leave the flag out",
    "--tp": "use --tensor-parallel-size",
    "--tp-size": "use --tensor-parallel-size",
    "--dp-size": "an instance computes each request once; `headwater up --mixed N` starts several behind a router",
    "--distributed-executor-backend": "one instance is one engine process; leave the flag out",
    # names of other servers
    "--model": "give the model directory without a flag: headwater serve DIR",
    "--model-path": "give the model directory without a flag: headwater serve DIR",
    "--context-length": "use --max-model-len",
    "--max-running-requests": "use --max-num-seqs",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--enable-chunked-prefill": "prefill is always chunked; --max-num-batched-tokens is the size of a chunk",
    "--page-size": "use --block-size",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--max-total-tokens": "use --num-gpu-blocks-override, in blocks of --block-size tokens",
    "--disable-radix-cache": "use --no-enable-prefix-caching",
    "--no-prefix-caching": "use --no-enable-prefix-caching",
    "--enable-hierarchical-cache": "use --swap-space GIB, which adds the host tier",
    "--hicache-size": "use --swap-space GIB",
    "--hicache-ratio": "use --swap-space GIB",
    "--hicache-write-policy": "use --write-policy",
    "--hicache-storage-backend": "use --kvcache-storage-backend",
    "--radix-eviction-policy": "use --eviction",
    "--schedule-policy": "use --scheduling-policy",
    "--preemption-mode": "preempted requests resume from the cache; --swap-space keeps their blocks in host memory",
    "--disaggregation-mode": "use --splitwise-role",
    "--disaggregation-transfer-backend": "use --cache-transfer-protocol",
    "--kv-transfer-config": "use --splitwise-role and --cache-transfer-protocol, or --kvcache-storage-backend",
    "--guided-decoding-backend": "structured output always uses llguidance; leave the flag out",
    "--enable-auto-tool-choice": "tool calls are always parsed; --tool-call-parser overrides the format",
    "--enable-reasoning": "reasoning is always parsed; --reasoning-parser overrides the tags",
    "--disable-log-requests": "requests are logged only with --log-format json; leave the flag out",
    "--disable-log-stats": "statistics are at /metrics and /dashboard, not in the log; leave the flag out",
    "--enable-metrics": "metrics are always at /metrics; leave the flag out",
    "--metrics-port": "metrics are at /metrics of the same port; leave the flag out",
    "--uvicorn-log-level": "use --log-format; uvicorn writes no log here",
    "--engine-worker-queue-port": "the engine process uses a private socket; leave the flag out",
    "--cache-queue-port": "the engine process uses a private socket; leave the flag out",
}
"""For each flag, why it does not exist here and what to do instead."""


def explain(flag: str) -> str | None:
    """The sentence for a flag of another server; None if there is none."""
    return FOREIGN_FLAGS.get(flag.replace("_", "-").partition("=")[0])
