"""Which HTTP worker owns each live request, and a step's outputs packed for each worker."""

from headwater.engine import wire
from headwater.scheduler.results import StepOutputs
from headwater.types import RequestId


class RequestOwners:
    """The live requests of all workers. Used by the engine loop's thread only."""

    def __init__(self) -> None:
        self._workers: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, request_id: str, worker: bytes) -> None:
        """Let `worker` get the outputs of this request."""
        self._workers[request_id] = worker

    def remove(self, request_id: str) -> None:
        """Send nothing more for this request. Unknown requests are ignored."""
        self._workers.pop(request_id, None)

    def remove_worker(self, worker: bytes) -> list[str]:
        """A worker is gone: return the requests that it had."""
        lost = [request_id for request_id, owner in self._workers.items() if owner == worker]
        for request_id in lost:
            del self._workers[request_id]
        return lost

    def pack(self, outputs: StepOutputs) -> list[tuple[bytes, bytes]]:
        """One message for each worker that has outputs in this step. Each output is packed once,
        so the cost does not depend on the number of workers."""
        parts: dict[bytes, list[wire.Output]] = {}
        workers = self._workers
        for output in outputs.others:
            if output.finish_reason is None:
                worker = workers.get(output.request_id)
            else:
                worker = workers.pop(output.request_id, None)
            if worker is not None:  # else it was aborted meanwhile
                parts.setdefault(worker, []).append(wire.pack_output(output))
        rows = self._rows_by_worker(outputs.request_ids)
        messages = []
        for worker in parts.keys() | rows.keys():
            mine = rows.get(worker, [])
            message = wire.Outputs(
                parts.get(worker, []),
                [outputs.request_ids[row] for row in mine],
                wire.pack_tokens(outputs.tokens[mine]),
            )
            messages.append((worker, wire.encode(message)))
        return messages

    def _rows_by_worker(self, request_ids: list[RequestId]) -> dict[bytes, list[int]]:
        """Which of `request_ids` each worker owns. Those of aborted requests are left out."""
        rows: dict[bytes, list[int]] = {}
        for row, worker in enumerate(map(self._workers.get, request_ids)):
            if worker in rows:
                rows[worker].append(row)
            elif worker is not None:
                rows[worker] = [row]
        return rows
