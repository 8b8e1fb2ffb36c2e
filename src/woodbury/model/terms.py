"""Batches of several terms, each with points and a function of its own: what their passes leave, as one.

The residuals of a system of equations on different points have no common sample axis. Each term goes through the
model by itself, and its numbers are counted one by one: a batch of terms with n_t samples of k_t numbers each
looks like N = sum_t n_t k_t samples with one output.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from woodbury.layers.forms import RowForm, concatenate_forms
from woodbury.model.capture import GraphCapture
from woodbury.model.chain import ChainCapture
from woodbury.model.fallback import Forward


@dataclass(frozen=True)
class Term:
    """Part of a batch: the samples of one term."""

    name: str
    inputs: Any  # what `forward` of the optimizer takes for the term alone
    samples: int
    width: int  # numbers per sample


@dataclass(frozen=True)
class Terms:
    """The terms of a batch; `as_inputs` is the batch that an optimizer takes."""

    terms: tuple[Term, ...]

    def as_inputs(self, like: Tensor) -> tuple[Tensor, Terms]:
        """With the place of each number: the sample axis of the batch, from which a subset can be chosen."""
        return torch.arange(sum(term.samples * term.width for term in self.terms), device=like.device), self


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
    first = captures[0]
    with torch.enable_grad():
        outputs = torch.cat([own.outputs.flatten() for own in captures]).unsqueeze(1)
    forward, inputs = _all_terms(first.forward), [own.inputs for own in captures]
    same: Any = {"autocast": first.autocast, "random": first.random}
    return JoinedCapture(first.plan, forward, inputs, outputs, [], {}, outputs.detach(), captures, **same)


@dataclass
class JoinedCapture(GraphCapture):
    """The passes of several terms as one, whose inputs are theirs in a list and whose outputs are (N, 1)."""

    captures: Sequence[GraphCapture]
    chain = None

    @cached_property
    def _fingerprint(self) -> Hashable:
        return "terms", self.captures[0]._fingerprint

    def check_inputs(self) -> None:
        for own in self.captures:
            own.check_inputs()

    def rows(self, segments: Sequence[Tensor]) -> Mapping[str, RowForm]:
        (columns,) = segments
        parts = columns.reshape(-1).split([own.outputs.numel() for own in self.captures])
        # (n_t k_t,) -> (n_t, k_t, k_t): a row for each number
        pairs = zip(self.captures, parts, strict=True)
        return concatenate_forms([own.rows([part.view(own.outputs.shape).diag_embed()]) for own, part in pairs])


def _all_terms(forward: Forward) -> Forward:
    """The pass over a list of batches, number by number."""

    def run(model: nn.Module, batches: Sequence[Any]) -> Tensor:
        return torch.cat([forward(model, own).reshape(-1) for own in batches]).unsqueeze(1)

    return run


# What a pass over a batch leaves: one that autograd followed, or of a chain that was run by hand.
Capture = GraphCapture | ChainCapture
