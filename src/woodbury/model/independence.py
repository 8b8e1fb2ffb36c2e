"""Whether the outputs of a sample depend on that sample alone: rows per sample exist only then."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import combinations, compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from woodbury import _batch, _random
from woodbury._batch import Batch
from woodbury._process import level_of_caller
from woodbury.model.capture import MIXED, GraphCapture, capture, casting
from woodbury.model.fallback import Forward, outputs_agree
from woodbury.model.graph import graph_edges
from woodbury.model.plan import Plan

_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has


def check_samples_apart(captured: GraphCapture, look: int = 1, alone: bool = True) -> None:
    """Raise if outputs of some samples depend on other samples, as far as looks at this batch can show.

    Seeds on parts of the outputs must give no gradient in what layers return for the other samples. Run on their
    own, in another order, the same parts must give the outputs they have in the batch. Where that cannot be told,
    as of a model that draws random numbers, seeds must give no gradient in the inputs either.

    A first axis may only look like the sample axis, where a layer sees as many positions as there are samples:
    such a layer is left to the fallback, or to `bare`, and the part that showed it is run on its own. `look` is
    the number of the look; each takes other parts. alone=False makes no further passes through the model.

    A model that passed the first look is not stopped by a later one: that warns, once.
    """
    for _ in graph_edges(captured.outputs):  # raises where autograd cannot see inside
        pass
    samples = len(captured.outputs)
    if samples < 2:
        return
    captured.check_inputs()
    if alone and look == 1:
        _check_attributes(captured)
    parts, generator = _parts(samples, look)
    late = look > 1 and not captured.reorders  # else every pass is checked
    doubtful = [part for part in parts if _leaves_layers(captured, part, generator, late)]
    run = parts if alone else doubtful
    same = [_same_alone(captured, part.nonzero().flatten().flip(0)) for part in run]
    reason = _mixed_inputs(captured, look) if alone and not all(same) else None
    if False in same:
        reason = reason or _mixed_alone(captured, int(run[same.index(False)].sum()))
    _refuse(captured.plan, reason, look)


def _attributes(model: nn.Module) -> dict[str, str]:
    """The numbers and tensors that modules hold as attributes, by name, in words that change with them."""

    def describe(value: Any) -> str:
        if type(value) is Tensor and value.layout is torch.strided and not value.is_complex():
            own = value.detach().double()
            return f"{own.shape} {float(own.sum())} {float(own.norm())}"
        return repr(value) if type(value) in (bool, int, float) else ""

    return {
        f"{path}.{name}".lstrip("."): str([*map(describe, pytree.tree_leaves(value))])
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.modules.")
        for name, value in vars(module).items()
        if name not in _OF_MODULES
    }


def _check_attributes(captured: GraphCapture) -> None:
    """Warn of attributes that a pass changes, and the same pass once more changes again."""
    plan = captured.plan
    before = _attributes(plan.model)
    changed = list(before)
    for _ in range(2):
        if not changed:
            return
        with _random.kept(plan.device), casting(captured.autocast, plan), torch.enable_grad():
            captured.forward(plan.model, captured.inputs)
        after = _attributes(plan.model)
        before, changed = after, [name for name in after if after[name] != before.get(name)]
    for name in changed:
        warnings.warn(
            f"a pass through the model changes its attribute {name!r}: a step makes several, each goes on from "
            "what the one before left. Ways out: register_buffer, since a step restores buffers, or pass it with "
            "the inputs",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )


def _refuse(plan: Plan, reason: str | None, look: int) -> None:
    """Raise an error with this reason, if there is one; after a first look that found none, warn once instead."""
    if reason is None:
        return
    if look == 1:
        raise ValueError(reason)
    plan.findings.warn_of_mixing(reason)


def _parts(samples: int, look: int) -> tuple[list[Tensor], torch.Generator]:
    """Parts of the samples, as masks, and a generator for seeds: a random half and the others.

    At the first look up to 6 parts, of many samples each about half: of any two of up to 20 samples, each is
    in one without the other. Samples get different sets of k // 2 out of k numbers, none of which holds another
    (Sperner); those with number i are part i.
    """
    generator = torch.Generator(device="cpu").manual_seed(look)  # not torch's own: the pass must be repeatable
    rank = torch.randperm(samples, generator=generator, device="cpu")
    count = next(k for k in range(2, 7) if look > 1 or k == 6 or math.comb(k, k // 2) >= samples)
    own = [[i in chosen for i in range(count)] for chosen in combinations(range(count), count // 2)]
    sets = torch.tensor(own, device="cpu")
    return list(sets[rank % len(sets)].T), generator


def _depends(outputs: Tensor, sources: Sequence[Any], part: Tensor, generator: torch.Generator) -> list[bool]:
    """For each source whether outputs of this part of the samples depend on what it holds for the others.

    By random weights of the outputs, zero but for that part; nan is checked elsewhere.
    """
    kind: Any = {"dtype": torch.float32, "device": "cpu"}
    seed = torch.zeros(outputs.shape, **kind)
    seed[part] = torch.rand(int(part.sum()), *outputs.shape[1:], generator=generator, **kind) + 0.5
    grads = torch.autograd.grad(outputs, sources, seed.to(outputs), retain_graph=True, allow_unused=True)
    others = (~part).nonzero().flatten().to(outputs.device)
    return [grad is not None and bool((grad[others.to(grad.device)].abs() > 0).any()) for grad in grads]


def _leaves_layers(captured: GraphCapture, part: Tensor, generator: torch.Generator, late: bool) -> bool:
    """Leave layers whose outputs for other samples those of a part depend on; whether there are any."""
    edges = [call.edge for call in captured.calls]
    depends = _depends(captured.outputs, edges, part, generator) if edges else []
    return captured.leave(compress(captured.calls, depends), late)


def _mixed_inputs(captured: GraphCapture, look: int) -> str | None:
    """What is wrong if outputs of a part depend on the inputs of others. Random numbers do no harm here."""
    plan, samples = captured.plan, len(captured.outputs)
    parts, generator = _parts(samples, look)
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

        def is_mixed(outputs: Tensor) -> bool:
            return any(any(_depends(outputs, sources, part, generator)) for part in parts)

        mixed = is_mixed(again.outputs)
        names = [own.layer.name for own in again.calls if is_mixed(own.outputs)] if mixed else []
    except Exception:  # what a model does not like about inputs that are differentiated
        return None
    if not mixed:
        return None
    what = f"what layer {names[0]!r} gives for one sample depends" if names else "the outputs of one sample depend"
    return f"{what} on the inputs of another: {MIXED}"


def _same(captured: GraphCapture, inputs: Any, whole: Tensor) -> bool | None:
    """Whether some samples give on their own the outputs `whole`, those they have in the batch.

    None where random numbers are drawn; those are put back. Raises what the model raises.
    """
    plan = captured.plan
    # gradients as in a step: without them a model may take another path, or none
    with _random.kept(plan.device) as random, casting(captured.autocast, plan), torch.enable_grad():
        outputs = captured.forward(plan.model, inputs).reshape(len(whole), -1).detach()
        drawn = _random.drawn_since(random)
    if drawn or not bool(torch.isfinite(whole).all()):  # nan is checked elsewhere
        return None
    # loosely on a GPU, which computes few samples by other kernels than many
    digits = 0.5 if whole.device.type == "cpu" else 0.25
    return outputs_agree(outputs.to(whole.dtype), whole, captured, digits, captured.precision)


def _same_alone(captured: GraphCapture, index: Tensor) -> bool | None:
    """Whether these samples give the same outputs on their own as in the batch; None where it cannot be told."""
    outputs = captured.outputs.detach()
    index = index.to(outputs.device)
    try:
        inputs = _batch.take(captured.inputs, index, len(outputs))
        same = _same(captured, inputs, outputs[index])
    except Exception:  # whatever a model does not like about fewer samples; `check_part` raises where it matters
        return None
    captured.check_inputs()
    return same


def _mixed_alone(captured: GraphCapture, count: int) -> str:
    return (
        f"the outputs of {'one' if count == 1 else count} of {len(captured.outputs)} samples change when run "
        f"apart from the others: {MIXED}, or changes from one run to the next"
    )


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
            same = _same(captured, inputs, whole[start : start + count])
        except Exception as error:
            raise ValueError(
                f"the model cannot be run on {count} of {batch.samples} samples ({error}), so the curvature "
                "cannot be taken from part of the batch: pass curvature_samples=None and no subset"
            ) from error
        _refuse(plan, _mixed_alone(captured, count) if same is False else None, look)
        start += count
