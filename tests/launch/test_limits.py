"""Default limits of a step, chosen from device and model."""

import pytest

from headwater.config import EngineConfig, PeersConfig
from headwater.errors import ConfigError
from headwater.launch.limits import choose_limits

GIB = 1 << 30
TOKEN = 131_072
"""KV bytes of a token of an 8B model."""


def choose(device="cuda", free_gib=120, **settings):
    return choose_limits(
        EngineConfig(**settings),
        device_type=device,
        free_bytes=free_gib * GIB,
        token_bytes=TOKEN,
    )


def test_a_cpu_gets_small_steps():
    """A prefill instance on a CPU gets smaller steps than other instances."""
    assert choose("cpu")[:2] == (64, 2048)
    prefill = PeersConfig(role="prefill")
    assert choose("cpu", peers=prefill)[:2] == (64, 512)
    assert choose("cpu", peers=prefill, max_num_seqs=600)[:2] == (600, 600)
    assert choose("cpu", peers=PeersConfig(role="decode"))[:2] == (64, 2048)


@pytest.mark.parametrize(
    ("free_gib", "expected"),
    [(120, (1024, 8192)), (60, (512, 8192)), (10, (128, 4096)), (2, (32, 2048))],
)
def test_a_gpu_gets_steps_by_its_free_memory(free_gib, expected):
    """A GPU gets as many sequences as the pool holds with 512 tokens each, in powers of two."""
    assert choose(free_gib=free_gib)[:2] == expected


def test_the_values_of_the_operator_win():
    """The limit that the operator leaves out follows the given one, so that both fit each
    other."""
    assert choose(max_batched_tokens=256) == (256, 256, True)
    assert choose(max_num_seqs=9000) == (9000, 9000, True)
    assert choose(max_num_seqs=16, max_batched_tokens=512) == (16, 512, False)


def test_limits_that_contradict_each_other_are_refused():
    """The message has both flags and both values."""
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 8 .*--max-num-seqs 16"):
        choose(max_num_seqs=16, max_batched_tokens=8)
