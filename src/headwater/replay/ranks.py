"""A machine whose model is split over several devices.

Weights, tokens, attention and KV reads are divided by the ranks. Work that every rank does in
full is not divided: launches, and the cost of a row beyond its token. Each layer sums its
results over the ranks twice:

    step   + 2 × layers × latency
    token  + 2 × layers × bytes of a token's state × 2 (ranks - 1) / ranks / bandwidth

The second term is that of a ring: each rank sends and receives nearly twice the bytes of the
sum. Every rank has its own link to host memory. Memory for KV is that of one device times the
ranks. Each device has only a part of the weights and so has more free memory; that is not
counted.
"""

from dataclasses import replace

from headwater.errors import ConfigError
from headwater.replay.cost import OWN_LINKS, LinkCost, Machine

_SUMS = 2
"""Sums per layer: after attention and after the MLP."""


def split_over_ranks(machine: Machine, ranks: int, link: LinkCost) -> Machine:
    """`machine` with the model on this many devices, connected by `link`: its latency is that
    of one sum, its bandwidth that of one device."""
    if ranks < 1:
        raise ConfigError(f"--tensor-parallel-size must be at least 1, got {ranks}")
    if ranks == 1:
        return machine
    sums = _SUMS * machine.num_layers
    token_s = sums * machine.state_bytes * 2 * (ranks - 1) / ranks / link.bytes_s
    step = machine.step
    links = {
        name: replace(cost, bytes_s=cost.bytes_s * ranks) if name in OWN_LINKS else cost
        for name, cost in machine.links.items()
    }
    return replace(
        machine,
        name=f"{machine.name} x{ranks}",
        note=f"{machine.note}; split over {ranks} ranks by calculation, not measured",
        step=replace(
            step,
            launch_s=step.launch_s + sums * link.latency_s,
            weights_s=step.weights_s / ranks,
            token_s=step.token_s / ranks + token_s,
            pair_s=step.pair_s / ranks,
            context_token_s=step.context_token_s / ranks,
            experts_s=step.experts_s / ranks,
        ),
        links=links,
        device_gib=machine.device_gib * ranks,
    )
