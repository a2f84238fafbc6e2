"""Reads the weights of a quantised model: each linear layer as a `QuantizedMatrix`.

Names, types and shapes are compared with the configuration before any weight is read, so that a
folder that does not fit is refused with the name of the tensor.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from headwater.device.model_files import StoredTensor, stored_tensors, weight_files
from headwater.device.quantization.matrices import Fp8Matrix, Int4Matrix, QuantizedMatrix
from headwater.device.quantization.schemes import (
    BESIDE_SUFFIXES,
    MAIN_SUFFIXES,
    Quantization,
    Scheme,
    Storage,
)
from headwater.device.quantization.unpack import awq_nibbles, nibbles
from headwater.errors import ModelError

_PLAIN = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One quantised layer of the files."""

    name: str
    scheme: Scheme
    main: str
    outputs: int
    inputs: int
    scales: str


class QuantizedCheckpoint:
    """The files of a quantised model. Raises ModelError if they do not fit their
    configuration."""

    def __init__(self, folder: Path, quantization: Quantization) -> None:
        self._file_of: dict[str, Path] = {}
        self._tensors: dict[str, StoredTensor] = {}
        for path in weight_files(folder):
            for tensor in stored_tensors(path):
                self._file_of[tensor.name] = path
                self._tensors[tensor.name] = tensor
        self._quantization = quantization
        self._layers = {layer.name: layer for layer in self._find_layers()}
        self._check_rest()

    @property
    def layers(self) -> list[str]:
        """Names of the quantised layers."""
        return list(self._layers)

    def shape(self, layer: str) -> tuple[int, int]:
        """Outputs and inputs of a layer."""
        return self._layers[layer].outputs, self._layers[layer].inputs

    def plain(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are not quantised."""
        taken = {layer.main for layer in self._layers.values()}
        for name in self._tensors:
            if name not in taken and not name.endswith(BESIDE_SUFFIXES):
                yield name, self._read(name)

    def matrix(self, layer: str) -> QuantizedMatrix:
        """One quantised layer."""
        found = self._layers[layer]
        readers: dict[Storage, Callable[[_Layer], QuantizedMatrix]] = {
            Storage.FP8: self._fp8,
            Storage.PACKED: self._packed,
            Storage.GPTQ: self._gptq,
            Storage.AWQ: self._awq,
        }
        return readers[found.scheme.storage](found)

    def _find_layers(self) -> Iterator[_Layer]:
        for name, tensor in self._tensors.items():
            storage = next(
                (s for suffix, s in MAIN_SUFFIXES.items() if name.endswith(suffix)), None
            )
            if name.endswith(".weight") and tensor.kind.startswith("F8"):
                storage = Storage.FP8
            if storage is Storage.GPTQ and self._quantization.method == "awq":
                storage = Storage.AWQ
            if storage is None:
                continue
            module = name.rpartition(".")[0]
            scheme = self._quantization.scheme_of(module, storage)
            if scheme is None:
                raise ModelError(
                    f"{name} is stored as '{storage}', but quantization_config "
                    f"('{self._quantization.method}') does not describe this format"
                )
            yield self._layer(module, scheme, tensor)

    def _layer(self, module: str, scheme: Scheme, main: StoredTensor) -> _Layer:
        if len(main.shape) != 2:
            raise ModelError(
                f"{main.name} must have two dimensions, got the shape {_shape(main)}"
            )
        if scheme.storage is Storage.FP8:
            return self._fp8_layer(module, scheme, main)
        if main.kind != "I32":
            raise ModelError(f"{main.name} must be of type I32, got {main.kind}")
        rows, columns = main.shape
        outputs, inputs = {
            Storage.PACKED: (rows, 8 * columns),
            Storage.GPTQ: (columns, 8 * rows),
            Storage.AWQ: (8 * columns, rows),
        }[scheme.storage]
        group = scheme.group_size or inputs
        if inputs % group:
            raise ModelError(
                f"{main.name} has {inputs} inputs, which is not a multiple of the group size {group}"
            )
        groups = inputs // group
        is_packed = scheme.storage is Storage.PACKED
        scales = f"{module}.weight_scale" if is_packed else f"{module}.scales"
        self._want(scales, (outputs, groups) if is_packed else (groups, outputs), main.name)
        if is_packed and scheme.has_zeros:
            zeros = -(-outputs // 8), groups
            self._want(f"{module}.weight_zero_point", zeros, main.name, kinds=("I32",))
        if not is_packed:
            self._want(f"{module}.qzeros", (groups, outputs // 8), main.name, kinds=("I32",))
        index = f"{module}.weight_g_idx" if is_packed else f"{module}.g_idx"
        if index in self._tensors:
            self._want(index, (inputs,), main.name, kinds=("I32", "I64"))
        return _Layer(
            name=module, scheme=scheme, main=main.name, outputs=outputs, inputs=inputs,
            scales=scales,
        )  # fmt: skip

    def _fp8_layer(self, module: str, scheme: Scheme, main: StoredTensor) -> _Layer:
        if main.kind != "F8_E4M3":
            raise ModelError(f"{main.name} is of type {main.kind}; only F8_E4M3 is supported")
        outputs, inputs = main.shape
        names = [f"{module}.weight_scale_inv", f"{module}.weight_scale"]
        scales = next((name for name in names if name in self._tensors), None)
        if scales is None:
            raise ModelError(
                f"{main.name} has no scales: the files have no {' and no '.join(names)}"
            )
        stored = self._tensors[scales]
        allowed: list[tuple[int, ...]]
        if scheme.block is not None:
            down, across = scheme.block
            allowed = [(-(-outputs // down), -(-inputs // across))]
        else:
            allowed = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
        if stored.shape not in allowed or stored.kind not in _PLAIN:
            raise ModelError(
                f"{scales} has the shape {_shape(stored)} and type {stored.kind}, which does not fit "
                f"{main.name} of {_shape(main)}"
            )
        return _Layer(
            name=module, scheme=scheme, main=main.name, outputs=outputs, inputs=inputs,
            scales=scales,
        )  # fmt: skip

    def _want(
        self,
        name: str,
        shape: tuple[int, ...],
        main: str,
        kinds: tuple[str, ...] = _PLAIN,
    ) -> None:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{main} needs {name}, which the files do not have")
        if tensor.shape != shape or tensor.kind not in kinds:
            wanted = "x".join(map(str, shape))
            raise ModelError(
                f"{name} has the shape {_shape(tensor)} and type {tensor.kind}; {main} needs "
                f"{wanted} of {' or '.join(kinds)}"
            )

    def _check_rest(self) -> None:
        """Raise ModelError unless every other tensor is plain or belongs to an existing
        layer."""
        for name, tensor in self._tensors.items():
            module = name.rpartition(".")[0]
            if name.endswith(BESIDE_SUFFIXES):
                if module not in self._layers and name.endswith((".weight_scale", ".scales")):
                    raise ModelError(f"{name} has scales for a weight that is not quantised")
            elif module not in self._layers and tensor.kind not in _PLAIN:
                raise ModelError(
                    f"{name} is of type {tensor.kind}, but quantization_config "
                    f"('{self._quantization.method}') does not describe this type"
                )

    def _read(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def _fp8(self, layer: _Layer) -> Fp8Matrix:
        scales = self._read(layer.scales).float()
        block = layer.scheme.block
        if block is None:
            is_whole = scales.numel() == 1 and layer.outputs != 1
            block = (layer.outputs if is_whole else 1, layer.inputs)
            scales = scales.reshape(-1, 1)
        _check_numbers(layer.scales, scales)
        return Fp8Matrix(codes=self._read(layer.main), scales=scales, block=block)

    def _packed(self, layer: _Layer) -> Int4Matrix:
        inputs = self._true_inputs(layer)
        zeros = None
        if layer.scheme.has_zeros:
            packed = self._read(f"{layer.name}.weight_zero_point")
            zeros = nibbles(packed, 0)[: layer.outputs]
        return self._int4(
            layer,
            codes=nibbles(self._read(layer.main), 1)[:, :inputs],
            scales=self._read(layer.scales),
            zeros=zeros,
            index=f"{layer.name}.weight_g_idx",
        )

    def _true_inputs(self, layer: _Layer) -> int:
        """Inputs of the layer from the file; they must match those of the packed integers."""
        name = f"{layer.name}.weight_shape"
        if name in self._tensors:
            told = self._read(name).tolist()
            if told != [layer.outputs, layer.inputs]:
                raise ModelError(
                    f"{name} gives the shape {told}, but {layer.main} has "
                    f"{[layer.outputs, layer.inputs]}"
                )
        return layer.inputs

    def _gptq(self, layer: _Layer) -> Int4Matrix:
        zeros = nibbles(self._read(f"{layer.name}.qzeros"), 1) + layer.scheme.zero_offset
        return self._int4(
            layer,
            codes=nibbles(self._read(layer.main), 0).T,
            scales=self._read(layer.scales).T,
            zeros=zeros.T,
            index=f"{layer.name}.g_idx",
        )

    def _awq(self, layer: _Layer) -> Int4Matrix:
        return self._int4(
            layer,
            codes=awq_nibbles(self._read(layer.main)).T,
            scales=self._read(layer.scales).T,
            zeros=awq_nibbles(self._read(f"{layer.name}.qzeros")).T,
            index="",
        )

    def _int4(
        self, layer: _Layer, *, codes: Tensor, scales: Tensor, zeros: Tensor | None, index: str
    ) -> Int4Matrix:
        _check_numbers(layer.scales, scales)
        groups = None
        if index in self._tensors:
            groups = self._read(index).long()
            size = layer.inputs // scales.shape[1]
            if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[1]:
                raise ModelError(f"{index} refers to groups that {layer.scales} does not have")
            if torch.equal(groups, torch.arange(layer.inputs) // size):
                groups = None
        return Int4Matrix(
            codes=codes.contiguous(),
            scales=scales.float().contiguous(),
            zeros=None if zeros is None else zeros.contiguous(),
            groups=groups,
        )


def check_plain(folder: Path) -> None:
    """Refuse quantised weights in a folder whose config does not mention them."""
    for path in weight_files(folder):
        for tensor in stored_tensors(path):
            if tensor.kind.startswith("F8") or tensor.name.endswith(tuple(MAIN_SUFFIXES)):
                raise ModelError(
                    f"{tensor.name} is of type {tensor.kind}, but config.json has no "
                    "quantization_config that describes it"
                )


def _shape(tensor: StoredTensor) -> str:
    return "x".join(map(str, tensor.shape)) or "()"


def _check_numbers(name: str, scales: Tensor) -> None:
    if not bool(torch.isfinite(scales).all()):
        raise ModelError(f"{name} has scales that are not finite numbers")
