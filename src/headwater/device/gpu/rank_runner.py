"""The runner of a rank other than the first, on a GPU."""

import torch

from headwater.device.gpu.runner import CudaRunner
from headwater.device.gpu.submitted import SubmittedStep
from headwater.device.parallel.messages import WarmPhase
from headwater.scheduler.batch import ScheduledBatch


class FollowingCudaRunner(CudaRunner):
    """Computes this rank's part of each step, and takes the sampled tokens from rank 0."""

    def prepare(self, phase: WarmPhase) -> None:
        """Capture graphs, or forget the warm-up steps, as rank 0 does."""
        if phase is WarmPhase.CAPTURE:
            self.capture()
        else:
            self.clear()

    def follow(self, batch: ScheduledBatch) -> None:
        """Queue this rank's part of a step. Rank 0 has at most two steps in flight, and every step
        waits for all ranks, so no more than two are queued here."""
        with torch.inference_mode():
            _, places, scores = self.compute(batch)
            self.share_chosen(places)
        self._last = SubmittedStep(
            batch=batch,
            places=places,
            host=self._host[0],
            logprobs=None,
            masks=None,
            carried={},
            scores=scores,
        )
