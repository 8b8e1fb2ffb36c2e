"""Loss rules: the values, residuals and curvature of a loss at the outputs.

A mean loss f = (1/M) sum_i l(y_i, t_i) has at each sample a gradient r_i = dl/dy_i and a Hessian H_i = d2l/dy_i2 =
S_i S_i^T. A rule gives the values l, the residuals r, the factor S and M, what the mean divides by: the number of
samples, or of tokens where l is a sum over the tokens of a sample. It also gives e with S e = r, which keeps small
damping accurate (see `woodbury.quadratic.sample_space`), and what of r is not in the range of S.

A loss with reduction="sum" is f = sum_i l(y_i, t_i): what f divides by is 1, and l has no mean over the outputs of
a sample either. Its curvature is a sum over the batch as well, N1/N2 times that of the N2 curvature samples.

Outputs and targets reach a rule with one row per sample: outputs (n, C), C numbers per sample.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from woodbury.device.scalars import Scalar, is_known
from woodbury.losses.factors import DenseFactor, Factor, dense_factor

RuleType = TypeVar("RuleType", bound="type[LossRule]")

_RULES: dict[type[nn.Module], LossRule] = {}

# losses of torch.nn.functional, and the modules that stand for them
FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.l1_loss: nn.L1Loss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.gaussian_nll_loss: nn.GaussianNLLLoss,
}


class LossRule(ABC):
    """One kind of loss. A rule must define `values` only; autograd gives the other methods.

    `factor` is then a square root of the Hessian of each sample by an eigendecomposition (C x C per sample, in
    float64): write one by hand where C is large. Negative eigenvalues count as zero.

    `by_hand` says that a rule draws no random numbers, needs no autograd, and always gives e with its factor: a
    step along a plain chain of layers then runs without a graph. `takes_sum` says that `values` looks at the
    reduction of the loss: with "sum" they are the terms of a sum. Without it such a loss raises an error.
    """

    by_hand: ClassVar[bool] = False
    takes_sum: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.by_hand = bool(vars(cls).get("by_hand", False))  # not inherited: a subclass must set it again
        cls.takes_sum = bool(vars(cls).get("takes_sum", False))

    def check(self, loss: nn.Module) -> None:
        """Raise an error that names the option if an option of this loss is not supported."""
        reduction = getattr(loss, "reduction", "mean")
        if reduction != "mean" and not (reduction == "sum" and self.takes_sum):
            ways = "'mean' or 'sum'" if self.takes_sum else "'mean'"
            raise ValueError(
                f"{type(loss).__name__}(reduction={reduction!r}) is not supported: a step needs one number for "
                f"the batch; use reduction={ways}"
            )

    def is_sum(self, loss: nn.Module) -> bool:
        """Whether f is the sum of all l(y_i, t_i) instead of their mean."""
        return self.takes_sum and getattr(loss, "reduction", "mean") == "sum"

    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Targets checked against the outputs and brought to the form the other methods take.

        outputs are in the model's own shape, (n, ...); here the targets must have the same shape.
        """
        if targets is None:
            return torch.zeros_like(outputs).reshape(outputs.shape[0], -1)
        if targets.shape != outputs.shape:
            shape, instead = (-1, *outputs.shape[1:]), ""
            if targets.numel() == outputs.numel():
                instead = f", as by targets.reshape{shape}"
            elif targets.dim() == 1 and not targets.is_floating_point():
                instead = ". For class indices use CrossEntropyLoss, or a rule of your own that defines prepare"
            raise ValueError(
                f"{type(loss).__name__}: targets of shape {tuple(targets.shape)} do not fit outputs of shape "
                f"{tuple(outputs.shape)}: they must be equal{instead}"
            )
        flat = targets if targets.dim() == 2 else targets.reshape(targets.shape[0], -1)
        return flat if flat.dtype == outputs.dtype else flat.to(outputs.dtype)

    def count(self, loss: nn.Module, targets: Tensor) -> Scalar:
        """M, what the mean divides by: f = sum_i l(y_i, t_i) / M. The number of samples by default."""
        return len(targets)

    def count_of_first(self, loss: nn.Module, targets: Tensor, samples: int) -> Scalar:
        """M of the first samples alone."""
        return samples if type(self).count is LossRule.count else self.count(loss, targets[:samples])

    @abstractmethod
    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """l(y_i, t_i) for each sample, (n,)."""

    def terms(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """`values`; raises if they are not one number per sample."""
        values = self.values(loss, outputs, targets)
        if values.dim() != 1 or values.shape[0] != outputs.shape[0]:
            raise ValueError(
                f"{type(self).__name__}.values, the rule for {type(loss).__name__}, must return one number per "
                f"sample: the shape {tuple(outputs.shape[:1])} for outputs of shape {tuple(outputs.shape)}, "
                f"and not {tuple(values.shape)}"
            )
        return values

    def total(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """sum_i l(y_i, t_i), for callers that do not need the terms."""
        return self.terms(loss, outputs, targets).sum()

    def residual(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """r_i = dl/dy_i, (n, C)."""
        with torch.enable_grad():
            point = outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.terms(loss, point, targets).sum(), point)
        return gradient

    def factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The columns of S_i as rows, (n, k, C), and e (n, k) with S_i e_i = r_i, or None to have it computed."""

        def value(output: Tensor, target: Tensor) -> Tensor:
            return self.terms(loss, output.unsqueeze(0), target.unsqueeze(0)).squeeze(0)

        # eigenvectors of small eigenvalues have few digits in float32
        hessian = torch.func.vmap(torch.func.hessian(value))(outputs.detach().double(), targets)
        eigenvalues, eigenvectors = torch.linalg.eigh(hessian)
        return (eigenvectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)).mT.to(outputs.dtype), None

    def compact_factor(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Factor:
        """S and e in as little memory as the loss allows: what a step asks for. Here what `factor` gives."""
        columns, e = self.factor(loss, outputs, targets)
        if e is None:
            return dense_factor(columns, self.residual(loss, outputs, targets))
        return DenseFactor(e, columns)

    def curved_loss(self, loss: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        """A function of (outputs, targets), reduced as the loss is, whose Hessian in the outputs is H = S S^T.

        The loss itself, unless the rule takes a curvature that is not the Hessian of the loss. For `verify`, which
        differentiates this function by autograd.
        """
        return loss

    def column_count(self, shape: Sequence[int]) -> int:
        """k, or a bound on it, for outputs of the model's own shape (n, ...): known before `factor` is called."""
        return math.prod(shape[1:])


def register_loss(kind: type[nn.Module]) -> Callable[[RuleType], RuleType]:
    """Class decorator that makes a `LossRule` the rule for losses of class `kind`.

    >>> @woodbury.register_loss(torch.nn.SoftMarginLoss)
    ... class SoftMargin(woodbury.LossRule):
    ...     def values(self, loss, outputs, targets):
    ...         return torch.nn.functional.softplus(-targets * outputs).mean(1)
    """

    def register(rule: RuleType) -> RuleType:
        _RULES[kind] = rule()
        return rule

    return register


_OWN = (
    "woodbury.register_loss adds a rule for a module of your own; in a loop GaussNewton(model, watch=True) "
    "takes any loss"
)


def as_module(loss: Any) -> Any:
    """A loss of torch.nn.functional as a module, and anything else as it is."""
    return next((kind() for function, kind in FUNCTIONS.items() if function is loss), loss)


def check_is_module(loss: Any) -> None:
    """Raise an error that says what to write unless this is a module."""
    if isinstance(loss, nn.Module):
        return
    name = getattr(loss, "__name__", type(loss).__name__)
    if isinstance(loss, type):
        raise TypeError(f"the second argument must be a loss module, got the class {name}: write {name}()")
    instead = f": {_OWN}" if callable(loss) else ", such as torch.nn.CrossEntropyLoss()"
    if (known := as_module(loss)) is not loss:
        instead = f": write torch.nn.{type(known).__name__}()"
    raise TypeError(f"the second argument must be the loss as a module (an nn.Module), got {name}{instead}")


def loss_rule(loss: nn.Module) -> LossRule:
    """The rule for this loss; raises if there is none, or if an option is not supported."""
    rule = _RULES.get(type(loss))
    if rule is None:
        check_is_module(loss)
        known = ", ".join(sorted(kind.__name__ for kind in _RULES if not kind.__module__.startswith("woodbury.")))
        raise TypeError(f"no rule for the loss {type(loss).__name__}; known: {known}. {_OWN}")
    rule.check(loss)
    return rule


def prepare(rule: LossRule, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
    """`rule.prepare`; raises where outputs or targets are complex, as the rules are those of real numbers."""
    if outputs.is_complex() or (targets is not None and targets.is_complex()):
        what = "the outputs of the model" if outputs.is_complex() else "targets"
        raise TypeError(
            f"{type(loss).__name__}: {what} are complex, and the loss rules are those of real numbers: pass "
            "torch.view_as_real of them"
        )
    return rule.prepare(loss, outputs, targets)


def check_term_count(term_count: Scalar, what: str = "the batch") -> Scalar:
    """M of a mean loss; raises if it is known to be zero."""
    if is_known(term_count) and term_count == 0:
        raise ValueError(
            f"every target of {what} is ignored (ignore_index of the loss, or a class of weight 0), and a mean "
            "over none is not a number: leave out samples without a target"
        )
    return term_count


def check_weights(loss: nn.Module, name: str) -> None:
    """Raise an error that names a weight of the loss if it makes no sense; None does."""
    weight: Any = getattr(loss, name)
    if weight is None:
        return
    is_real = isinstance(weight, Tensor) and not weight.is_complex()
    if not is_real or not bool(((weight >= 0) & (weight < math.inf)).all()):
        raise ValueError(
            f"{type(loss).__name__}({name}=...) is not supported: it must be a tensor of finite numbers that are "
            "not negative"
        )


def buffer_of(loss: nn.Module, name: str) -> Any:
    """A buffer of the loss, or None; torch's own search for it takes as long as a small operation."""
    return loss._buffers[name] if name in loss._buffers else getattr(loss, name)


def share_of_output(loss: Any, outputs: Tensor) -> float:
    """What the loss of a sample multiplies that of one output by: 1/C for a mean, 1 for a sum."""
    return 1.0 if loss.reduction == "sum" else 1 / outputs.shape[1]


def over_outputs(loss: Any, each: Tensor) -> Tensor:
    """The loss of a sample, (n,), from that of each output, (n, C)."""
    return each.sum(1) if loss.reduction == "sum" else each.mean(1)


def smallest_probability(dtype: torch.dtype) -> float:
    """The least probability in S: it keeps e = r / S finite and changes H by far less than rounding."""
    return torch.finfo(dtype).eps ** 1.5


class NoLoss(nn.Module):
    """Stands in for a loss that is seen in a closure or in a watched loop."""


@register_loss(NoLoss)
class _NoLossRule(LossRule):
    def prepare(self, loss: nn.Module, outputs: Tensor, targets: Tensor | None) -> Tensor:
        raise ValueError(
            "the optimizer was made without a loss, which it sees in a closure or a watched loop: pass the loss "
            "as its second argument to call step(inputs, targets)"
        )

    def values(self, loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError


class ScaledLoss(nn.Module):
    """A constant times a loss; without `counts` that of a process that has borrowed a sample, having none."""

    def __init__(self, loss: nn.Module, factor: float, counts: bool = True) -> None:
        super().__init__()
        self.loss, self.factor, self.counts = loss, factor, counts
        self.reduction = getattr(loss, "reduction", "mean")

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = self.factor * self.loss(outputs, targets)
        return value


@register_loss(ScaledLoss)
class _ScaledRule(LossRule):
    """c l: values and residuals times c, S and e times sqrt(c)."""

    def check(self, loss: Any) -> None:
        loss_rule(loss.loss)  # which checks it

    def is_sum(self, loss: Any) -> bool:
        return loss_rule(loss.loss).is_sum(loss.loss)

    def prepare(self, loss: Any, outputs: Tensor, targets: Tensor | None) -> Tensor:
        return loss_rule(loss.loss).prepare(loss.loss, outputs, targets)

    def count(self, loss: Any, targets: Tensor) -> Scalar:
        return loss_rule(loss.loss).count(loss.loss, targets) if loss.counts else 0

    def values(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss_rule(loss.loss).values(loss.loss, outputs, targets) * loss.factor

    def total(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss_rule(loss.loss).total(loss.loss, outputs, targets) * loss.factor

    def residual(self, loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss_rule(loss.loss).residual(loss.loss, outputs, targets) * loss.factor

    def compact_factor(self, loss: Any, outputs: Tensor, targets: Tensor) -> Factor:
        own, root = loss_rule(loss.loss).compact_factor(loss.loss, outputs, targets), math.sqrt(loss.factor)
        rest = None if own.rest is None else own.rest * loss.factor
        return DenseFactor(own.e * root, own.columns() * root, rest=rest)

    def curved_loss(self, loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
        own = loss_rule(loss.loss).curved_loss(loss.loss)
        return lambda outputs, targets: own(outputs, targets) * loss.factor
