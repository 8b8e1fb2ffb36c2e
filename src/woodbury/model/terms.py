"""Batches of several terms, each with points and a function of its own: what their passes leave, as one.

The residuals of a system of equations on different points have no common sample axis. Each term goes through the
model by itself, and its numbers are counted one by one: a batch of terms with n_t samples of k_t numbers each
looks like N = sum_t n_t k_t samples with one output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from woodbury._vector import Parts
from woodbury.layers.forms import RowForm, concatenate_forms
from woodbury.model.capture import GraphCapture
from woodbury.model.chain import ChainCapture, MovedForward


@dataclass(frozen=True)
class Term:
    """Part of a batch: the samples of one term."""

    name: str
    inputs: Any  # what `forward` of the optimizer takes for the term alone
    samples: int
    width: int  # numbers per sample

    @property
    def numbers(self) -> int:
        return self.samples * self.width


@dataclass(frozen=True)
class Terms:
    """The terms of a batch; `as_inputs` is the batch that an optimizer takes."""

    terms: tuple[Term, ...]

    def as_inputs(self, like: Tensor) -> tuple[Tensor, Terms]:
        """With the place of each number: the sample axis of the batch, from which a subset can be chosen."""
        return torch.arange(sum(term.numbers for term in self.terms), device=like.device), self


def terms_of(inputs: Any) -> Terms | None:
    """The terms of a batch, if it has some."""
    is_pair = isinstance(inputs, tuple) and len(inputs) == 2
    return inputs[1] if is_pair and isinstance(inputs[1], Terms) else None


def capture_terms(terms: Terms, capture: Callable[[Any, int], GraphCapture]) -> JoinedCapture:
    """The passes of all terms; an error names the term."""
    captures = []
    for term in terms.terms:
        try:
            captures.append(capture(term.inputs, term.samples))
        except (ValueError, TypeError) as error:
            raise ValueError(f"term {term.name!r}: {error}") from error
    return JoinedCapture(captures)


class JoinedCapture:
    """What the passes of several terms leave; its methods are those of `woodbury.model.capture.GraphCapture`."""

    chain = None

    def __init__(self, captures: Sequence[GraphCapture]) -> None:
        self.captures = captures
        self.raw = self.outputs = self._join([own.outputs.detach() for own in captures])  # (N, 1)

    def _join(self, values: Sequence[Tensor]) -> Tensor:
        """(..., n_t, k_t) of each term -> (..., N, 1)."""
        return torch.cat([own.flatten(-2) for own in values], -1).unsqueeze(-1)

    def _split(self, numbers: Tensor) -> list[Tensor]:
        """(N, ...) -> (n_t, k_t, ...) of each term."""
        parts = numbers.split([own.outputs.numel() for own in self.captures])
        return [part.unflatten(0, own.outputs.shape) for part, own in zip(parts, self.captures, strict=True)]

    def call_of(self, layer: str) -> None:
        """A layer is called by every term."""
        return

    def check_inputs(self) -> None:
        for own in self.captures:
            own.check_inputs()

    def rows(self, segments: Sequence[Tensor]) -> Mapping[str, RowForm]:
        (columns,) = segments
        # (n_t, k_t, 1) or (n_t, k_t, 1, 1) -> (n_t, k_t, k_t): a row for each number
        parts = [own.reshape(own.shape[:2]).diag_embed() for own in self._split(columns)]
        pairs = zip(self.captures, parts, strict=True)
        return concatenate_forms([own.rows([part]) for own, part in pairs])

    def run_again(self, changes: Mapping[str, Tensor], forwards: Mapping[str, MovedForward]) -> Tensor:
        results = [own.run_again(changes, forwards).reshape(own.outputs.shape) for own in self.captures]
        return self._join(results)

    def push_forward(self, vectors: Sequence[Parts]) -> Tensor:
        return self._join([own.push_forward(vectors) for own in self.captures])

    def second_derivative(self, vector: Parts) -> Tensor:
        return self._join([own.second_derivative(vector) for own in self.captures])

    def gradient(self, weights: Tensor) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for own, part in zip(self.captures, self._split(weights), strict=True):
            for name, grad in own.gradient(part.squeeze(-1)).items():
                total[name] = total[name] + grad if name in total else grad
        return total


# What a pass over a batch leaves: of terms, or one that autograd followed, or of a chain that was run by hand.
Capture = GraphCapture | ChainCapture | JoinedCapture
