"""The list that shares attention of single tokens out among programs, on the device."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeWork:
    """Which program attends what; all int32 on the device, good for every layer of a step."""

    contexts: Tensor
    """Per row: tokens to attend, its own included; 0 is a row that is not there."""

    tables: Tensor
    """Slots of all rows, one after another."""

    table_start: Tensor
    """Per row: where its slots begin in `tables`."""

    piece: Tensor
    """One number: tokens in a piece, a multiple of 64."""

    work_row: Tensor
    work_start: Tensor
    row_work: Tensor
    """Row r has the entries [row_work[r], row_work[r + 1]) of `work_row`."""

    arrived: Tensor
    """`[rows, kv_heads]`: pieces that are done, counted by the kernel. Zeros before and after."""

    partial: Tensor
    """`[work, heads, dim]`, float32: room for partial results."""

    partial_lse: Tensor
    """`[work, heads]`, float32."""
