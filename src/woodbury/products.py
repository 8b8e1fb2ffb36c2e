"""Curvature products in parameter space: the twin of `row_matrix`, with no code in common.

Everything here is plain autograd on the model: no layer rule, no row, no Gram matrix. `relative_residual`, with
which `verify` checks a step, uses no loss rule either: it differentiates the loss module itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from woodbury._batch import Batch
from woodbury._vector import Parts, Space, Vector, norm
from woodbury.device.scalars import Scalar
from woodbury.losses.factors import Factor

OFF = 0.05  # of a product that is computed in two ways: more than bfloat16 inside a model makes


def jacobian_products(
    outputs: Tensor, parameters: Mapping[str, Tensor]
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """v -> J v for outputs attached to the graph, by differentiating J^T u in u; what v lacks counts as zero.

    Raises an error if <u, J v> is not <J^T u, v>, for the first v that is not 0, on a CPU: then something in the
    model has a gradient that autograd cannot follow back to u.
    """
    with torch.enable_grad():
        u = torch.arange(1.0, outputs.numel() + 1, dtype=outputs.dtype, device=outputs.device).cos()
        u = u.view_as(outputs).requires_grad_()
        transposed = torch.autograd.grad(
            outputs, list(parameters.values()), u, create_graph=True, materialize_grads=True
        )
    images = dict(zip(parameters, transposed, strict=True))
    # without a grad_fn: zeros, for a parameter that the outputs do not depend on
    used = {name: image for name, image in images.items() if image.grad_fn is not None}
    is_checked = outputs.is_cuda

    def product(vector: Mapping[str, Tensor]) -> Tensor:
        nonlocal is_checked
        names = [name for name in used if name in vector]
        result = torch.zeros_like(outputs)
        if names:
            along = [vector[name] for name in names]
            (result,) = torch.autograd.grad([used[name] for name in names], u, along, retain_graph=True)
        is_checked = is_checked or _check_adjoint(u, result, images, vector)
        return result

    return product


def _check_adjoint(u: Tensor, result: Tensor, images: Mapping[str, Tensor], vector: Mapping[str, Tensor]) -> bool:
    """Whether the vector, which may be 0, could tell."""
    pairs = [(images[name].detach(), own.to(images[name].dtype)) for name, own in vector.items() if name in images]
    ours = float((u.detach() * result).sum())
    theirs = sum(float(torch.dot(image.flatten(), own.flatten())) for image, own in pairs)
    gap, share = abs(ours - theirs), torch.finfo(u.dtype).eps ** 0.5
    if gap > OFF * max(abs(ours), abs(theirs)) and gap > share * sum(float(a.norm() * b.norm()) for a, b in pairs):
        raise ValueError(
            "the model cannot be differentiated twice: a torch.autograd.Function in it has a backward that "
            "autograd does not follow (once_differentiable, or NumPy inside). Write it with torch's own "
            "functions, or take steps that form rows, GaussNewton(..., solver='cholesky') without held-out samples"
        )
    return theirs != 0


def transposed_jacobian_product(outputs: Tensor, parameters: Mapping[str, Tensor], weights: Tensor) -> Parts:
    """J^T w for outputs attached to the graph."""
    own = list(parameters.values())
    grads = torch.autograd.grad(outputs, own, weights, retain_graph=True, materialize_grads=True)
    return dict(zip(parameters, grads, strict=True))


class FactorProducts:
    """The factor rows Z = S^T J of a batch through products alone: no row is stored.

    Z_b has the columns of block b only; for the full curvature matrix there is one block of all parameters.
    """

    def __init__(
        self, outputs: Tensor, parameters: Mapping[str, Tensor], factor: Factor, blocks: Sequence[Sequence[str]]
    ) -> None:
        """outputs (n, m) are attached to the graph."""
        self._outputs, self._factor, self._space = outputs, factor, Space.of(parameters)
        self.row_count = factor.e.numel()
        self.blocks = [{name: parameters[name] for name in block} for block in blocks]
        self._jacobian = jacobian_products(outputs, parameters)

    def matvec(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Z_b v_b = S^T (J_b v_b) for every block, (b, n k)."""
        images = [self._jacobian({name: vector[name] for name in block}) for block in self.blocks]
        return torch.stack([self._factor.rmatvec(image).flatten() for image in images])

    def rmatvec(self, coefficients: Tensor) -> Vector:
        """Z_b^T c_b = J_b^T (S c_b) over all parameters for coefficients (b, n k), or (n k,) for every block."""
        result: Parts = {}
        for block, own in zip(self.blocks, coefficients.expand(len(self.blocks), -1), strict=True):
            weights = self._factor.matvec(own.view(len(self._outputs), -1))
            result |= transposed_jacobian_product(self._outputs, block, weights)
        return self._space.pack(result)


def loss_of(loss: Callable[..., Tensor], outputs: Tensor, targets: Tensor | None) -> Tensor:
    """The loss module's own value; targets None means zeros, and those of GaussianNLLLoss hold its variances."""
    if targets is None:
        return loss(outputs, torch.zeros_like(outputs))
    # torch's losses accept one type only: numbers in that of the outputs, or class indices
    is_of_user = isinstance(loss, nn.Module) and type(loss).__module__ != nn.modules.loss.__name__
    weight = None if is_of_user else getattr(loss, "weight", None)
    if weight is not None and weight.dtype != outputs.dtype:  # of classes, in one type too
        loss = copy.deepcopy(loss).to(outputs.dtype)  # type: ignore[attr-defined]
    if targets.is_floating_point() or (targets.shape == outputs.shape and not is_of_user):
        targets = targets.to(outputs.dtype)
    elif targets.dtype != torch.bool or not is_of_user:  # a mask for a loss of the user's stays one
        targets = targets.long()
    return loss(outputs, *targets.unbind(1)) if isinstance(loss, nn.GaussianNLLLoss) else loss(outputs, targets)


def is_sum(loss: nn.Module) -> bool:
    """Whether a loss is a sum over samples instead of a mean."""
    return getattr(loss, "reduction", "mean") == "sum"


def relative_residual(
    outputs: Tensor,
    loss: nn.Module,
    batch: Batch,
    parameters: Mapping[str, Tensor],
    vector: Mapping[str, Tensor],
    *,
    damping: Scalar,
    decay: Mapping[str, float],
    previous: Mapping[str, Tensor] | None,
    blocks: Sequence[Sequence[str]],
    at_outputs: Callable[[nn.Module, Tensor, Tensor | None, Tensor], Tensor],  # that of a `Curvature`
    metric: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """|(B + W + lambda D) p - (lambda D q - g - W theta)| over the norm of the right-hand side, D the metric or I.

    outputs are those of the whole batch, attached to the graph; W is the weight decay, q = mu p_prev. Where
    both are zero this is |(B + lambda I) p + g| / |g|, or |(B + lambda I) p| where g is zero. B is block-diagonal
    with these blocks of parameters. Of a loss that is a sum, it is N1/N2 times that of the curvature samples.
    """
    targets = batch.targets
    scale = batch.samples / batch.curvature if is_sum(loss) else 1.0
    with torch.enable_grad():
        value = loss_of(loss, outputs, targets)
        grads = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, materialize_grads=True)
        curved = outputs[: batch.curvature]
    push = jacobian_products(curved, parameters)
    if targets is not None:
        targets = targets[: batch.curvature]
    image: Parts = {}
    for block in blocks:
        weights = at_outputs(loss, curved, targets, push({name: vector[name] for name in block}))
        product = transposed_jacobian_product(curved, {name: parameters[name] for name in block}, weights)
        image |= {name: scale * part for name, part in product.items()}
    rhs: Parts = {}
    for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
        pull = damping if metric is None else damping * metric[name]
        image[name] = image[name] + (decay[name] + pull) * vector[name]
        rhs[name] = -grad - decay[name] * parameter.detach()
        if previous is not None:
            rhs[name] = rhs[name] + pull * previous[name]
    error, size = norm({name: image[name] - own for name, own in rhs.items()}), norm(rhs)
    return error / torch.where(size > 0, size, 1.0)
