"""Packed modules compute what the modules they replace compute."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headwater.device import linear
from headwater.device.builtin import LlamaShape, make_llama
from headwater.device.gemm import load_gemm
from headwater.device.linear import FusedNorm, GatedMLP, PackedLinear, TiledLinear
from headwater.device.model import load
from headwater.device.packing import pack
from tests.device.driver import Driver
from tests.device.families import prompt


class Gated(nn.Module):
    """A gated MLP, written as in the model families."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=512)
        self.gate_proj = nn.Linear(512, 640, bias=False)
        self.up_proj = nn.Linear(512, 640, bias=False)
        self.down_proj: nn.Module = nn.Linear(640, 512)
        self.act_fn = activation

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OddRMSNorm(nn.Module):
    """Named like the others but different: it must not be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> Any:
        return x * 3 + self.weight


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm = OddRMSNorm()
        self.mlp = Gated(activation)
        self.small = nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.small(self.mlp(self.norm(x)))


@pytest.fixture(params=["compiled", "onednn"])
def packed_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of packed layers: with a C compiler, and on a machine without one."""
    if request.param == "compiled":
        assert load_gemm() is not None, "the tests need a C compiler"
        return TiledLinear
    monkeypatch.setattr(linear, "load_gemm", lambda: None)
    return PackedLinear


@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_a_packed_block_gives_the_same_numbers(num_rows: int, packed_class: type) -> None:
    """Results are equal with bias and without, for any number of rows."""
    torch.manual_seed(0)
    block = Block(nn.SiLU())
    x = torch.randn(1, num_rows, 512)
    expected = block(x)

    assert pack(block)

    assert isinstance(block.mlp, GatedMLP)
    assert isinstance(block.mlp.down, packed_class)
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)


def test_layers_that_packing_would_change_are_not_packed(packed_class: type) -> None:
    """An unknown norm, an unknown activation, and a matrix too small to gain are not packed."""
    block = Block(nn.ReLU())

    pack(block)

    assert isinstance(block.norm, OddRMSNorm)
    assert isinstance(block.mlp, Gated)
    assert isinstance(block.mlp.down_proj, packed_class)
    assert isinstance(block.small, nn.Linear)


def test_other_dtypes_are_left_alone() -> None:
    """Only measured dtypes are replaced."""
    assert not pack(nn.Sequential(nn.Linear(600, 600)).to(torch.bfloat16))


@pytest.mark.slow
def test_a_packed_model_gives_the_same_tokens(tmp_path: Path, packed_class: type) -> None:
    """A packed and fused model is compared with the original model of transformers. With
    oneDNN, its steps are also padded to four rows."""
    shape = LlamaShape(layers=2, hidden=512, ffn=1024, heads=8, kv_heads=2, head_dim=64)
    folder = make_llama(tmp_path, shape)
    outputs = []
    for packed in (True, False):
        model = load(folder, packed=packed)
        assert model.min_rows == (4 if packed and packed_class is PackedLinear else 1)
        assert packed == any(isinstance(m, FusedNorm) for m in model.module.modules())
        driver = Driver(model)
        rows = [driver.add(prompt(n, seed=n), name=str(n)) for n in (19, 40)]
        driver.finish(rows[0], count=6)
        driver.finish(*rows, count=12)
        outputs.append([row.output for row in rows])

    assert outputs[0] == outputs[1]


def test_the_last_layer_computes_only_tokens_that_are_read(tmp_path: Path) -> None:
    """The last layer attends with all tokens, and the rows that are read have the same bits as
    before."""
    model = load(make_llama(tmp_path, LlamaShape(layers=2)))
    first, last = model.module.model.layers  # type: ignore[union-attr, misc]  # a Llama's
    x, read = torch.randn(1, 7, 256), torch.tensor([2, 6])
    rotary = torch.ones(1, 7, 32), torch.zeros(1, 7, 32)

    class Step:
        def attend(self, layer: int, query: torch.Tensor, *_: object) -> torch.Tensor:
            return query

    for layer, is_last in ((first, False), (last, True)):
        given = {"position_embeddings": rotary, "attention_step": Step()}
        whole, some = layer(x, **given), layer(x, tokens_read=read, **given)

        assert torch.equal(some[:, read], whole[:, read])
        assert torch.equal(some, whole) != is_last
