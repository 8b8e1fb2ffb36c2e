"""What a step is judged by: f(theta) and its decrease at theta + p, weight decay included."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from woodbury import _batch, _random
from woodbury._vector import Space, Vector
from woodbury.device.scalars import Scalar, scalar
from woodbury.losses.rules import check_term_count, prepare
from woodbury.model.capture import casting, trial_needs_gradients
from woodbury.quadratic.decay import Decay
from woodbury.quadratic.displacement import Displacement
from woodbury.quadratic.passes import Batches, Passes, Piece, check_loss, mean_of


@dataclass
class Objective(ABC):
    """f on some samples. Passes at theta + p repeat the random numbers of the pass at theta."""

    passes: Passes
    loss: Scalar  # f(theta) of the loss alone, float64
    decay: Decay | None
    random: _random.Snapshot | None  # before the pass at theta, if the model may draw random numbers

    def decrease(self, displacement: Displacement) -> Scalar:
        """f(theta) - f(theta + p), float64."""
        with self.passes.group.together(), _random.replayed(self.random):
            decrease = self._decrease(displacement)
        decrease = self.passes.sum(decrease)
        return decrease if self.decay is None else decrease + self.decay.decrease(displacement.dense())

    @abstractmethod
    def _decrease(self, displacement: Displacement) -> Scalar:
        """That of the loss alone, on the samples of this process."""


@dataclass
class OnPieces(Objective):
    """f on pieces of a batch that have gone through the model at theta."""

    pieces: Sequence[Piece]
    term_count: Scalar  # M

    def _decrease(self, displacement: Displacement) -> Scalar:
        differences = []
        for index, piece in enumerate(self.pieces):
            outputs = displacement.outputs_on(piece.capture, index)
            piece.capture.check_inputs()  # the update still needs them
            if outputs.dim() != 2:
                outputs = outputs.reshape(outputs.shape[0], -1)
            differences.append(piece.losses - self.passes.losses(outputs, piece.targets))
        return mean_of(differences, self.term_count)


def on_samples(passes: Passes, inputs: Any, targets: Tensor | None, decay: Decay | None) -> OnPieces:
    """f on other samples than those of the batch, by a pass over them."""
    random = None if passes.chain is not None else _random.snapshot(passes.plan.device)
    piece = passes.evaluate(inputs, targets, _batch.sample_count(inputs))
    term_count = float(passes.term_count([piece]))
    loss = check_loss(mean_of([piece.losses], term_count))
    return OnPieces(passes, loss, decay, random, [piece], term_count)


@dataclass
class OverLoader(Objective):
    """f over all batches of a loader, and its gradient."""

    batches: Batches
    total: Tensor  # the sum of all losses
    term_count: Scalar  # M
    gradient: Vector  # of the loss alone
    samples: int  # N1

    def _decrease(self, displacement: Displacement) -> Scalar:
        passes, after = self.passes, torch.zeros_like(self.total)
        by_autograd = trial_needs_gradients(passes.plan, passes.forward)
        with displacement.applied(passes.plan), torch.set_grad_enabled(by_autograd):
            for inputs, targets in self.batches:
                with casting(passes.autocast, passes.plan):
                    raw = passes.forward(passes.plan.model, inputs).detach()
                prepared = prepare(passes.rule, passes.loss, raw, targets)
                after = after + passes.losses(raw.reshape(raw.shape[0], -1), prepared).sum()
        return scalar(self.total - after) / self.term_count


def over_loader(
    passes: Passes, batches: Batches, decay: Decay | None, random: _random.Snapshot | None
) -> OverLoader:
    """f and its gradient by a pass over every batch of a loader."""
    if isinstance(batches, Iterator) or not isinstance(batches, Iterable):
        raise TypeError(
            "full= must be re-iterable (a DataLoader or a list of batches), as it is read twice, got "
            f"{type(batches).__name__}"
        )
    space = Space.of(passes.plan.parameters)
    total: Tensor | None = None
    gradient: Vector | None = None
    term_count: Scalar = 0
    sample_count = 0
    for entry in batches:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise TypeError(f"full= must hold batches (inputs, targets), got {type(entry).__name__}")
        inputs, targets = entry
        samples = _batch.check_batch(inputs, targets)
        piece = passes.evaluate(inputs, targets, samples)
        part = space.pack(piece.capture.gradient(passes.residual(piece)))
        gradient = part if gradient is None else gradient + part
        total = piece.losses.sum() if total is None else total + piece.losses.sum()
        sample_count += samples
        term_count = term_count + piece.term_count
    if total is None or gradient is None:
        raise ValueError("full= holds no batch")
    term_count = 1.0 if passes.is_sum else check_term_count(passes.sum(term_count), "full=")
    loss = check_loss(passes.sum(scalar(total)) / term_count)
    gradient = passes.group.sum_vector(gradient) / term_count
    return OverLoader(passes, loss, decay, random, batches, total, term_count, gradient, sample_count)
