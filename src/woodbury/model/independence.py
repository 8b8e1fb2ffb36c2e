"""Whether the outputs of a sample depend on that sample alone: rows per sample exist only then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from woodbury import _batch, _random
from woodbury._batch import Batch
from woodbury.model.capture import GraphCapture, capture, casting
from woodbury.model.fallback import Forward, outputs_agree
from woodbury.model.graph import graph_edges
from woodbury.model.plan import Plan

_MIXED = (
    "rows per sample do not exist where the model mixes the samples of a batch (attention, recurrent layers and "
    "transformers need batch_first=True where samples lie along the first axis)"
)


def check_samples_apart(captured: GraphCapture, look: int = 1, alone: bool = True) -> None:
    """Raise if outputs of some samples depend on other samples, as far as looks at this batch can show.

    Seeds on a random half of the outputs must give no gradient in what layers return, and in the inputs, for the
    other half. Run on their own, the first sample, the last one and the halves, in another order, must give the
    outputs they have in the batch; a model that draws random numbers cannot be compared so.

    A first axis may only look like the sample axis, where a layer sees as many positions as there are samples:
    such a layer is left to the fallback, or to `bare`, and the half that showed it is run on its own. `look` is
    the number of the look; each takes other halves. alone=False makes no further passes through the model.

    A model that passed the first look is not stopped by a later one: that warns, once.
    """
    for _ in graph_edges(captured.outputs):  # raises where autograd cannot see inside
        pass
    samples = len(captured.outputs)
    if samples < 2:
        return
    captured.check_inputs()
    halves, generator = _halves(samples, look)
    doubtful = [pair[0] for pair in halves if _leaves_layers(captured, pair, generator)]
    reason = None
    if alone:
        ends = torch.tensor([[0], [samples - 1]], device="cpu")
        doubtful = [*ends, *(half for half, _ in halves)]
        reason = _mixed_inputs(captured, look)
    for index in doubtful:
        reason = reason or _changed_alone(captured, index.flip(0))
    _refuse(captured.plan, reason, look)


def _refuse(plan: Plan, reason: str | None, look: int) -> None:
    """Raise an error with this reason, if there is one; after a first look that found none, warn once instead."""
    if reason is None:
        return
    if look == 1:
        raise ValueError(reason)
    plan.findings.warn_of_mixing(reason)


def _halves(samples: int, look: int) -> tuple[list[list[Tensor]], torch.Generator]:
    """Pairs of halves of the samples, each also the other way round, and a generator for seeds.

    By the bits of random ranks: at the first look these part any two of up to 16 samples.
    """
    generator = torch.Generator(device="cpu").manual_seed(look)  # not torch's own: the pass must be repeatable
    rank = torch.randperm(samples, generator=generator, device="cpu")
    bits = range(min(4, (samples - 1).bit_length()) if look == 1 else 1)
    halves = [[(rank >> bit & 1 == side).nonzero().flatten() for side in (0, 1)] for bit in bits]
    return halves + [[others, seeded] for seeded, others in halves], generator


def _depends(
    outputs: Tensor, sources: Sequence[Any], halves: Sequence[Tensor], generator: torch.Generator
) -> list[bool]:
    """For each source whether outputs of the first half of samples depend on the second half of it.

    By random weights of the outputs, zero but for that half; nan is checked elsewhere.
    """
    seeded, others = halves
    kind: Any = {"dtype": torch.float32, "device": "cpu"}
    seed = torch.zeros(outputs.shape, **kind)
    seed[seeded] = torch.rand(len(seeded), *outputs.shape[1:], generator=generator, **kind) + 0.5
    grads = torch.autograd.grad(outputs, sources, seed.to(outputs), retain_graph=True, allow_unused=True)
    return [grad is not None and bool((grad[others.to(grad.device)].abs() > 0).any()) for grad in grads]


def _leaves_layers(captured: GraphCapture, halves: Sequence[Tensor], generator: torch.Generator) -> bool:
    """Raise if outputs of one half depend on what a layer gives for the other; or leave it to the fallback.

    Whether it left some.
    """
    edges = [call.edge for call in captured.calls]
    if not edges:
        return False
    depends = _depends(captured.outputs, edges, halves, generator)
    for call in compress(list(captured.calls), depends):
        reason = f"the outputs of one sample depend on what layer {call.layer.name!r} gives for another: {_MIXED}"
        if not captured.plan.has_fallback and not captured.is_bare(call.layer):
            raise ValueError(reason)
        captured.plan.findings.uncapturable[call.layer.name] = reason
        captured.calls = [other for other in captured.calls if other.layer is not call.layer]
    return len(captured.calls) < len(edges)


def _mixed_inputs(captured: GraphCapture, look: int) -> str | None:
    """What is wrong if outputs of one half depend on the inputs of the other. Random numbers do no harm here."""
    plan, samples = captured.plan, len(captured.outputs)
    halves, generator = _halves(samples, look)
    leaves, structure = _batch.leaves_of(captured.inputs, samples)
    sources: list[Tensor] = []
    with torch.enable_grad():
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and _batch.has_samples(leaf, samples):
                sources.append(leaf.detach().clone().requires_grad_())
                leaves[index] = sources[-1] * 1  # not a leaf of the graph: the model may write into it
    if not sources:
        return None
    inputs = pytree.tree_unflatten(leaves, structure)
    try:
        with _random.kept(plan.device):
            again = capture(plan, captured.forward, inputs, samples, captured.autocast)
        mixed = _is_mixed(again.outputs, sources, halves, generator)
        calls = again.calls if mixed else []
        names = [own.layer.name for own in calls if _is_mixed(own.outputs, sources, halves, generator)]
    except Exception:  # what a model does not like about inputs that are differentiated
        return None
    if not mixed:
        return None
    what = f"what layer {names[0]!r} gives for one sample depends" if names else "the outputs of one sample depend"
    return f"{what} on the inputs of another: {_MIXED}"


def _is_mixed(
    outputs: Tensor, sources: list[Tensor], halves: list[list[Tensor]], generator: torch.Generator
) -> bool:
    """Whether outputs of one half of the samples depend on the inputs of the other."""
    return any(any(_depends(outputs, sources, pair, generator)) for pair in halves)


def _changed(captured: GraphCapture, inputs: Any, whole: Tensor) -> str | None:
    """What is wrong if some samples give other outputs on their own than `whole`, those they have in the batch.

    None too where random numbers are drawn; those are put back. Raises what the model raises.
    """
    count, plan = len(whole), captured.plan
    # gradients as in a step: without them a model may take another path, or none
    with _random.kept(plan.device) as random, casting(captured.autocast, plan), torch.enable_grad():
        outputs = captured.forward(plan.model, inputs).reshape(count, -1).detach()
        drawn = _random.drawn_since(random)
    if drawn or not bool(torch.isfinite(whole).all()):  # nan is checked elsewhere
        return None
    # loosely on a GPU, which computes few samples by other kernels than many
    digits = 0.5 if whole.device.type == "cpu" else 0.25
    if outputs_agree(outputs.to(whole.dtype), whole, captured, digits, captured.precision):
        return None
    which = "one" if count == 1 else f"{count}"
    return (
        f"the outputs of {which} of {len(captured.outputs)} samples change when run apart from the others: "
        f"{_MIXED}, or changes from one run to the next"
    )


def _changed_alone(captured: GraphCapture, index: Tensor) -> str | None:
    """What is wrong if these samples give other outputs on their own than in the batch."""
    outputs = captured.outputs.detach()
    index = index.to(outputs.device)
    try:
        inputs = _batch.take(captured.inputs, index, len(outputs))
        reason = _changed(captured, inputs, outputs[index])
    except Exception:  # whatever a model does not like about fewer samples; `check_part` raises where it matters
        return None
    captured.check_inputs()
    return reason


def check_part(plan: Plan, forward: Forward, batch: Batch, autocast: torch.dtype | None, look: int) -> None:
    """Raise unless the curvature samples, and the others, have on their own the outputs they have in the batch.

    Where it draws random numbers, the gradients in the inputs of the whole batch must do. As in
    `check_samples_apart` a later look warns instead.
    """
    with _random.kept(plan.device) as random:
        captured = capture(plan, forward, batch.inputs, batch.samples, autocast)
        drawn = _random.drawn_since(random)
    if drawn:
        _refuse(plan, _mixed_inputs(captured, look), look)
        return
    start, whole = 0, captured.outputs.detach()
    for inputs, _, count in batch.pieces():
        try:
            reason = _changed(captured, inputs, whole[start : start + count])
        except Exception as error:
            raise ValueError(
                f"the model cannot be run on {count} of {batch.samples} samples ({error}), so the curvature "
                "cannot be taken from part of the batch: pass curvature_samples=None and no subset"
            ) from error
        _refuse(plan, reason, look)
        start += count
