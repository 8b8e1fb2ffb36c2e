"""Passes through the model: the outputs of a batch, their losses, and what these are divided by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from woodbury import _random
from woodbury._batch import BadSamplesError, Batch
from woodbury.curvature import Curvature
from woodbury.device.scalars import Scalar, is_known, scalar
from woodbury.losses.rules import LossRule, check_term_count, prepare
from woodbury.model.capture import GraphCapture, capture
from woodbury.model.chain import Chain
from woodbury.model.fallback import Forward
from woodbury.model.independence import check_part, check_samples_apart
from woodbury.model.plan import Plan
from woodbury.model.terms import Capture, capture_terms, terms_of
from woodbury.parallel.group import ALONE, Group
from woodbury.products import loss_of

Batches = Iterable[tuple[Any, "Tensor | None"]]


class NonFiniteLossError(ValueError):
    """The loss at the current parameters, before any step, is not a finite number."""


class NonFiniteSampleError(BadSamplesError, NonFiniteLossError):
    """The loss or the gradient of some samples of the batch is not finite at the current parameters."""


@dataclass
class Piece:
    """Part of a batch as the loss saw it at theta."""

    inputs: Any
    outputs: Tensor  # (n, C), detached
    targets: Tensor  # as the loss rule prepared them
    losses: Tensor  # of each sample, or their sum (see `Passes.losses`), float64
    term_count: Scalar  # M, what f divides by: f = sum of losses / M; 1 where the loss is a sum
    capture: Capture


def mean_of(losses: Sequence[Tensor], term_count: Scalar) -> Scalar:
    """Sum of all losses / M."""
    joined = losses[0] if len(losses) == 1 else torch.cat([part.reshape(-1) for part in losses])
    return scalar(joined if joined.dim() == 0 else joined.sum()) / term_count


def check_loss(loss: Scalar) -> Scalar:
    """f(theta); raises if it is not finite. Elsewhere than on the CPU the step is rejected instead."""
    if is_known(loss) and not math.isfinite(loss):
        raise NonFiniteLossError(
            f"the loss at the current parameters is {loss}: nothing was changed. "
            "Check the model's parameters for nan or inf"
        )
    return loss


@dataclass(eq=False)
class Passes:
    """How a batch goes through the model and the loss in this step."""

    plan: Plan
    chain: Chain | None  # what is run by hand, if that
    forward: Forward
    autocast: torch.dtype | None
    loss: nn.Module
    rule: LossRule
    group: Group = ALONE  # of processes whose samples are one batch
    samples_count: bool = True  # whether those of this process do; not where it has borrowed one, having none

    def __post_init__(self) -> None:
        self.is_sum = self.rule.is_sum(self.loss)  # whether f is a sum over samples instead of a mean

    def term_count(self, pieces: Sequence[Piece]) -> Scalar:
        """M, what f over all pieces of this process divides by; 1 where the loss is a sum."""
        if self.is_sum:
            return 1.0
        counts = [piece.term_count for piece in pieces]
        return check_term_count(counts[0] if len(counts) == 1 else sum(counts))

    def sum(self, number: Scalar) -> Scalar:
        """The sum of a number over all processes."""
        return number if self.group.size == 1 else self.group.sums(float(number))[0]

    def share_of(self, samples: int) -> float:
        """The share of so many samples of this process in those of all processes."""
        counted = float(samples) if self.samples_count else 0.0
        return counted / self.group.sums(counted)[0]

    def divisor(self, curvature: Curvature, term_count: Scalar, samples: int, of: int) -> Scalar:
        """D of N2 curvature samples of all processes with M = term_count, where f is that of N1 = `of` samples."""
        if self.is_sum:
            return samples / of  # B is the Hessian, or the Fisher matrix, of such a sum
        return curvature.divisor(check_term_count(term_count, "the curvature samples"), samples)

    def totals(self, pieces: Sequence[Piece], curvature: Curvature, batch: Batch) -> tuple[Scalar, Scalar, Scalar]:
        """M, f(theta) and D of a batch whose first piece has S2 in front; of all processes, in one collective."""
        first, losses = pieces[0].term_count, [piece.losses for piece in pieces]
        if pieces[0].targets.shape[0] > batch.curvature and not self.is_sum:
            first = self.rule.count_of_first(self.loss, pieces[0].targets, batch.curvature)
        if self.group.size == 1:
            term_count = self.term_count(pieces)
            loss = check_loss(mean_of(losses, term_count))
            return term_count, loss, self.divisor(curvature, first, batch.curvature, batch.samples)
        share = 1.0 if self.samples_count else 0.0
        local = (sum(float(piece.term_count) for piece in pieces), float(mean_of(losses, 1.0)), float(first))
        terms, total, first, *counts = self.group.sums(*local, share * batch.curvature, share * batch.samples)
        term_count = 1.0 if self.is_sum else check_term_count(terms)
        return term_count, check_loss(total / term_count), self.divisor(curvature, first, *map(round, counts))

    def capture(self, inputs: Any, samples: int) -> Capture:
        """A pass over a batch, or part of it, at theta."""
        if self.chain is not None:
            return self.chain.run(inputs)
        terms, number = terms_of(inputs), self.plan.findings.passes + 1
        if terms is None:
            captured: Capture = self._capture(number, inputs, samples)
        else:
            captured = capture_terms(terms, partial(self._capture, number))
        if samples > 1:
            self.plan.findings.passes = number  # after an error the next step looks again
        return captured

    def _capture(self, number: int, inputs: Any, samples: int) -> GraphCapture:
        """A pass over a batch or one of its terms, in the pass of this number through the model."""
        captured = capture(self.plan, self.forward, inputs, samples, self.autocast)
        if samples > 1 and self._is_due(number, 2):
            check_samples_apart(captured, number, alone=self._is_due(number, 4))
        return captured

    def _is_due(self, passes: int, factor: int) -> bool:
        """Whether to look again, at powers of a factor: what a model does may depend on the data.

        Only at the first on a device, which would have to wait for it.
        """
        if passes > 1 and self.plan.device.type != "cpu":
            return False
        while passes % factor == 0:
            passes //= factor
        return passes == 1

    def check_parts(self, batch: Batch) -> None:
        """Raise if the model gives other outputs for the curvature samples than for the batch they belong to."""
        if batch.curvature < batch.samples:
            findings = self.plan.findings
            parts = findings.parts + 1
            if self._is_due(parts, 4):
                check_part(self.plan, self.forward, batch, self.autocast, parts)
            findings.parts = parts

    def evaluate(self, inputs: Any, targets: Tensor | None, samples: int) -> Piece:
        """Run the model at theta on part of the batch."""
        captured = self.capture(inputs, samples)
        outputs = captured.outputs
        if outputs.requires_grad:
            outputs = outputs.detach()
        prepared = prepare(self.rule, self.loss, captured.raw, targets)
        term_count = 1.0 if self.is_sum else self.rule.count(self.loss, prepared)
        piece = Piece(inputs, outputs, prepared, self.losses(outputs, prepared), term_count, captured)
        if not self.plan.findings.compared_loss and not type(self.rule).__module__.startswith("woodbury."):
            self._check_rule(piece, captured.raw, targets)
        self.plan.findings.compared_loss = True
        return piece

    def _check_rule(self, piece: Piece, raw: Tensor, targets: Tensor | None) -> None:
        """Raise if a rule of someone's own has other values than its loss, where that can be called."""
        try:
            with torch.no_grad(), _random.kept(raw.device) as random:
                stated = float(loss_of(self.loss, raw.double(), targets))
                drawn = _random.drawn_since(random)
        except Exception:  # it only stands for its rule
            return
        found = float(mean_of([piece.losses], piece.term_count))
        if not drawn and abs(found - stated) > torch.finfo(raw.dtype).eps ** 0.5 * max(abs(found), abs(stated)):
            raise ValueError(
                f"the mean of {type(self.rule).__name__}.values is {found:.6g}, and {type(self.loss).__name__}"
                f"(outputs, targets) is {stated:.6g}: a rule must have the values of its loss"
            )

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample in float64, for differences of nearly equal losses: rho is one.

        Their sum alone where the outputs have fewer digits than it.
        """
        if outputs.dtype == torch.float64:
            return self.rule.terms(self.loss, outputs, targets)
        return self.rule.total(self.loss, outputs.double(), targets)

    def residual(self, piece: Piece) -> Tensor:
        """The gradient of each sample's loss at its outputs."""
        return self.rule.residual(self.loss, piece.outputs, piece.targets)
