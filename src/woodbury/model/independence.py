"""Whether the outputs of a sample depend on that sample alone: rows per sample exist only then."""

from __future__ import annotations

import torch

from woodbury import _batch, _random
from woodbury.model.capture import GraphCapture
from woodbury.model.fallback import outputs_agree
from woodbury.model.graph import graph_edges


def check_samples_apart(capture: GraphCapture, first: bool = True) -> None:
    """Raise if the outputs of the first or the last sample depend on another sample's activations.

    A first axis may only look like the sample axis, where a layer sees as many positions as there are samples:
    with a fallback such a layer is left to it. Then, and if `first`, the first sample is also run on its own, as
    samples may be mixed outside every layer.
    """
    for _ in graph_edges(capture.outputs):  # raises where autograd cannot see inside
        pass
    samples = len(capture.outputs)
    if samples < 2:
        return
    capture.check_inputs()
    for sample, others in ((0, slice(1, None)), (samples - 1, slice(0, samples - 1))):
        seed = torch.zeros_like(capture.outputs)
        seed[sample] = torch.linspace(0.5, 1.5, seed.shape[1])  # not random: the pass must be repeatable
        edges = [call.edge for call in capture.calls]
        if not edges:
            break
        grads = torch.autograd.grad(capture.outputs, edges, seed, retain_graph=True, allow_unused=True)
        for call, grad in zip(list(capture.calls), grads, strict=True):
            if grad is None or not bool((grad[others].abs() > 0).any()):  # nan is checked elsewhere
                continue
            if not capture.plan.has_fallback:
                raise ValueError(
                    f"the outputs of one sample depend on what layer {call.layer.name!r} gives for another: rows "
                    "per sample do not exist where the model mixes the samples of a batch"
                )
            capture.plan.findings.uncapturable.add(call.layer.name)
            capture.calls = [other for other in capture.calls if other.layer is not call.layer]
            first = True
    if first:
        _check_first_alone(capture)


def _check_first_alone(capture: GraphCapture) -> None:
    """Raise if the first sample gives other outputs on its own than in the batch."""
    samples = len(capture.outputs)
    random = _random.snapshot(capture.outputs.device)
    try:
        with torch.enable_grad():  # as in the pass itself: without gradients a model may take another path
            alone = capture.forward(capture.model, _batch.part(capture.inputs, slice(0, 1), samples))
        drawn = _random.drawn_since(random)
    except Exception:  # whatever a model does not like about one sample
        return
    finally:
        _random.restore(random)
    capture.check_inputs()
    first = capture.outputs[:1].detach()
    if drawn or not bool(torch.isfinite(first).all()):  # nan is checked elsewhere
        return
    # loosely: a GPU computes one sample by other kernels than many
    if not outputs_agree(alone.detach().reshape(1, -1), first, digits=0.25):
        raise ValueError(
            f"the outputs of the first sample of {samples} change when it is run on its own: rows per sample do "
            "not exist where the model mixes the samples of a batch, or changes from one run to the next (as "
            "spectral_norm does in training mode; call .eval() on it)"
        )
