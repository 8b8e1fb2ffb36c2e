"""Lightning: the optimizers work as they are; `StepMonitor` logs what their steps report.

>>> class Classifier(lightning.LightningModule):
...     def configure_optimizers(self):
...         return woodbury.GaussNewton(self.net, torch.nn.CrossEntropyLoss(), lr=0.3, momentum=0.9)

Lightning hands its training step to the optimizer as a closure, which is where the batch and the loss are seen.
With `accumulate_grad_batches` above 1 pass watch=True. `gradient_clip_val` has no effect on a second-order step,
and a warning says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from woodbury._choice import check_whole_number
from woodbury.optim.optimizer import SecondOrder

FIELDS = ("loss", "damping", "ratio", "step_norm", "accepted")


class StepMonitor(Callback):
    """Logs fields of the last `StepInfo` of each woodbury optimizer, such as woodbury/ratio and woodbury/damping.

    Args:
        fields: which ones.
        every: steps between two entries; reading them waits for a GPU.
    """

    def __init__(self, fields: Sequence[str] = FIELDS, every: int = 1) -> None:
        check_whole_number("every", every, least=1)
        self.fields, self.every = tuple(fields), every

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every:
            return
        own = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, SecondOrder)]
        for index, optimizer in enumerate(own):
            if optimizer.last is None:
                continue
            prefix = "woodbury" if len(own) == 1 else f"woodbury-{index}"
            numbers = optimizer.last.as_dict()
            pl_module.log_dict({f"{prefix}/{name}": float(numbers[name]) for name in self.fields})
