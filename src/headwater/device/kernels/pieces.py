"""The list that assigns attention of single tokens to programs, on the device."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeWork:
    """What each program attends; all int32 on the device, valid for every layer of a step."""

    contexts: Tensor
    """Per row: tokens to attend, including its own; 0 means an unused row."""

    tables: Tensor
    """Slots of all rows, one after another."""

    table_start: Tensor
    """Per row: the start of its slots in `tables`."""

    piece: Tensor
    """One number: tokens in a piece, a multiple of 64."""

    work_row: Tensor
    work_start: Tensor
    row_work: Tensor
    """Row r has the entries [row_work[r], row_work[r + 1]) of `work_row`."""

    arrived: Tensor
    """`[rows, kv_heads]`: finished pieces, counted by the kernel. Zeros before and after."""

    partial: Tensor
    """`[work, heads, dim]`, float32: memory for partial results."""

    partial_lse: Tensor
    """`[work, heads]`, float32."""

    @property
    def lists(self) -> tuple[Tensor, ...]:
        """What a kernel reads to find its piece, in the order of the kernels' parameters."""
        return (
            self.contexts,
            self.tables,
            self.table_start,
            self.piece,
            self.work_row,
            self.work_start,
            self.row_work,
        )
