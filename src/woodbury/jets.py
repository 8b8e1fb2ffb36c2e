"""Jets: values together with derivatives in the inputs, carried through a model (Taylor mode).

A jet holds the Taylor coefficients u_0 + u_1 + ... + u_K of a function of the inputs, by degree. With those of phi
at u_0, c_j = phi^(j)(u_0) / j!,

    (u v)_k = sum_i u_i v_{k-i},    phi(u)_k = sum_{j=1..k} c_j ((u - u_0)^j)_k,    (W u + b)_k = W u_k for k > 0

A model runs on a jet in place of a tensor. Linear layers are called on (n, positions, features), one position for
the value and one for each coefficient, so that optimizers get their rows by the rule for sequences. A function
without a rule here goes through nested forward mode; a module that cannot run on jets at all, as a whole.
"""

from __future__ import annotations

import operator
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from woodbury._process import has_global_hook, hooks_of, level_of_caller
from woodbury.taylor import FORMULAS, taylor_coefficients

Parts = list[Any]  # coefficients by degree, from 1 on: tensors (n, m_k, ...), None where all are zero
Function = Callable[..., Any]


class NoRuleError(NotImplementedError):
    """What cannot be done with jets."""


class HiddenError(ValueError):
    """What torch's forward mode would give wrong derivatives of, without a warning."""


class Jet(Tensor):
    """Looks to a model like its value (n, ...)."""

    kind: Any  # which coefficients it has: `widths` m_k, how to `multiply` them, `push` them by forward mode
    value: Tensor
    parts: Parts  # empty once a function in place has written over it
    with_grad: bool  # whether autograd followed when it was made

    @staticmethod
    def __new__(cls, kind: Any, value: Tensor, parts: Parts) -> Jet:
        make: Any = Tensor._make_wrapper_subclass
        jet: Jet = make(cls, value.shape, dtype=value.dtype, device=value.device)
        jet.kind, jet.value, jet.parts, jet.with_grad = kind, value, parts, torch.is_grad_enabled()
        return jet

    def filled_parts(self) -> list[Tensor]:
        """With zeros in place of None."""
        zeros = torch.zeros_like(self.value).unsqueeze(1)
        pairs = zip(self.parts, self.kind.widths, strict=True)
        wide = zeros.shape[2:]
        return [zeros.expand(-1, width, *wide) if part is None else part for part, width in pairs]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__ if func.__name__ != "__get__" else func.__self__.__name__
        if name in _PLAIN:
            return func(*_change(args, _value), **_change(kwargs, _value))
        jets = _jets_in((args, kwargs))
        if name[-1] == "_" != name[-2] or name.startswith(("__i", "__set")) or kwargs.get("out") is not None:
            raise NoRuleError(f"{name} writes into a tensor")
        if not all(jet.parts for jet in jets):
            raise NoRuleError("a tensor that was written into is used again")
        if any(jet.with_grad != torch.is_grad_enabled() for jet in jets):
            _check_caller()
            raise NoRuleError("autograd is turned on or off inside the model")
        rule = _RULES.get(name)
        result = NotImplemented if rule is None else rule(func, *args, **kwargs)
        return _by_forward_mode(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: object) -> Any:
        raise NoRuleError(f"{func} is called by a torch.func transform, or by compiled code")


def _change(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nesting with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)([_change(own, change) for own in tree])
    if isinstance(tree, dict):
        return {key: _change(own, change) for key, own in tree.items()}
    return tree


def _jets_in(tree: Any) -> list[Jet]:
    jets: list[Jet] = []
    _change(tree, lambda own: jets.append(own) if isinstance(own, Jet) else None)
    return jets


def _value(own: Any) -> Any:
    return own.value if isinstance(own, Jet) else own


def _check_caller() -> None:
    modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(sys._getframe())]
    if "torch.autograd.function" in modules:
        raise HiddenError(
            "the model calls a torch.autograd.Function, whose second derivatives by torch's forward mode are "
            "zeros: write it with torch's own functions"
        )


def _by_forward_mode(func: Function, args: Any, kwargs: Any) -> Jet:
    """A function of one sample at a time without a rule."""
    jets, name = _jets_in((args, kwargs)), getattr(func, "__name__", func)

    def function(*values: Tensor) -> Any:
        left = iter(values)
        own_args, own_kwargs = _change((args, kwargs), lambda own: next(left) if isinstance(own, Jet) else own)
        return func(*own_args, **own_kwargs)

    try:
        return _push(function, jets)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise NoRuleError(f"{name} has no rule, and forward mode cannot take it: {error}") from error


def _push(function: Function, jets: Sequence[Jet]) -> Jet:
    """By nested forward mode; the function may write into what it gets."""
    kind, values = jets[0].kind, [jet.value for jet in jets]

    def run(*own: Tensor) -> Any:
        return function(*[value.clone() for value in own])

    outputs = run(*values)
    if not isinstance(outputs, Tensor):
        raise NoRuleError(f"one tensor is expected, not {type(outputs).__name__}")
    return Jet(kind, outputs, kind.push(run, values, [jet.filled_parts() for jet in jets]))


# -- rules: (function, its arguments) -> a jet, or NotImplemented ---------------------------------------------


def _map_linearly(func: Function, *args: Any, constant: Any = torch.zeros_like, **kwargs: Any) -> Jet:
    """f(u)_k = f(u_k), with zeros in place of constants."""
    jets = _jets_in((args, kwargs))
    columns = {id(jet): [() if part is None else part.unbind(1) for part in jet.parts] for jet in jets}

    def run(pick: Callable[[Tensor], Tensor]) -> Tensor:
        return func(*_change(args, pick), **_change(kwargs, pick))

    def pick(degree: int, place: int, own: Tensor) -> Any:
        if not isinstance(own, Jet):
            return constant(own) if own.is_floating_point() else own
        of_degree = columns[id(own)][degree]
        return of_degree[place] if of_degree else torch.zeros_like(own.value)

    value, parts = run(_value), []
    if value.dim() == 0:
        raise NoRuleError(f"{func.__name__} leaves no axis of samples")
    for degree in range(len(jets[0].parts)):
        width = max(len(own[degree]) for own in columns.values())
        mapped = [run(partial(pick, degree, place)) for place in range(width)]
        parts.append(torch.stack(mapped, 1) if mapped else None)
    return Jet(jets[0].kind, value, parts)


def _map_to_several(func: Function, *args: Any, **kwargs: Any) -> tuple[Jet, ...]:
    """The same for a function that returns several tensors."""
    count = len(func(*_change(args, _value), **kwargs))
    return tuple(_map_linearly(lambda *own, at=at: func(*own, **kwargs)[at], *args) for at in range(count))


def _map_one(func: Function, *args: Any) -> Any:
    """f(u, c)_k = f(u_k, c), where one of the factors is a jet."""
    return _map_linearly(func, *args, constant=lambda own: own) if len(_jets_in(args)) == 1 else NotImplemented


def _add(func: Function, a: Any, b: Any, sign: int = 1, **options: Any) -> Any:
    if options:
        return NotImplemented
    operation = operator.add if sign > 0 else operator.sub
    value, jets = operation(_value(a), _value(b)), _jets_in((a, b))
    if any(jet.value.shape != value.shape for jet in jets):
        return _map_linearly(operation, a, b)
    left, right = (own.parts if isinstance(own, Jet) else [None] * len(jets[0].parts) for own in (a, b))
    pairs = zip(left, right if sign > 0 else [_scale(part, -1) for part in right], strict=True)
    return Jet(jets[0].kind, value, [_sum(pair) for pair in pairs])


def _sum(terms: Iterable[Tensor | None]) -> Tensor | None:
    """Of those that are not zero."""
    present = [term for term in terms if term is not None]
    return reduce(operator.add, present) if present else None


def _scale(part: Tensor | None, factor: Any) -> Tensor | None:
    """Coefficients (n, m, ...) times a factor that has the axes (n, ...), the last of them, or none."""
    if part is None or factor is None:
        return None
    aligned = isinstance(factor, Tensor) and factor.dim() == part.dim() - 1
    return part * (factor.unsqueeze(1) if aligned else factor)


def _multiply(func: Function, a: Any, b: Any, **options: Any) -> Any:
    jets = _jets_in((a, b))
    jet, other = jets[0], b if jets[0] is a else a
    axes = _value(other).dim() if isinstance(other, Tensor) else 0
    if options or axes > jet.value.dim() or (len(jets) == 2 and axes < jet.value.dim()):
        return NotImplemented
    value = _value(a) * _value(b)
    if len(jets) == 1:
        return Jet(jet.kind, value, [_scale(part, other) for part in jet.parts])
    triples = zip(a.parts, b.parts, _multiply_parts(jet.kind, a.parts, b.parts), strict=True)
    return Jet(jet.kind, value, [_sum((_scale(u, b.value), _scale(v, a.value), uv)) for u, v, uv in triples])


def _multiply_parts(kind: Any, a: Parts, b: Parts) -> Parts:
    """((u - u_0) (v - v_0))_k for every degree k."""
    products: Parts = [None]
    for degree in range(2, len(a) + 1):
        terms = []
        for i in range(1, degree // 2 + 1 if a is b else degree):
            u, v = a[i - 1], b[degree - i - 1]
            if u is not None and v is not None:
                product = kind.multiply(u, v, (i, degree - i))
                terms.append(product + product if a is b and 2 * i < degree else product)
        products.append(_sum(terms))
    return products


def _divide(func: Function, a: Any, b: Any, **options: Any) -> Any:
    if options:
        return NotImplemented
    return torch.reciprocal(b) * a if isinstance(b, Tensor) else a * (1 / b)


def _power(func: Function, base: Any, exponent: Any) -> Any:
    """c_j = (p over j) u_0^(p - j)."""
    if not isinstance(base, Jet) or isinstance(exponent, Tensor):
        return NotImplemented
    coefficients, factor = [base.value**exponent], 1.0
    for j in range(1, len(base.parts) + 1):
        factor *= (exponent - j + 1) / j
        coefficients.append(None if factor == 0 else factor * base.value ** (exponent - j))
    return _compose(base, coefficients)


def _compose(jet: Jet, coefficients: Sequence[Any]) -> Jet:
    """phi(u) by the coefficients c_0, ..., c_K of phi at u_0; None for 0."""
    result: Parts = [None] * len(jet.parts)
    power = jet.parts  # (u - u_0)^j
    for j, coefficient in enumerate(coefficients[1:], 1):
        if j > 1:
            power = _multiply_parts(jet.kind, jet.parts, power)
        result = [_sum((own, _scale(part, coefficient))) for own, part in zip(result, power, strict=True)]
    return Jet(jet.kind, coefficients[0], result)


def _elementwise(func: Function, jet: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
    """A function of each number alone: its derivatives are those along ones."""
    if not isinstance(jet, Jet) or any(isinstance(own, Tensor) for own in (*args, *kwargs.values())):
        return NotImplemented
    coefficients = taylor_coefficients(func, jet.value, len(jet.parts), args, kwargs)
    result = _compose(jet, coefficients)
    if inplace:
        jet.parts = []
    return result


def _linear(func: Function, inputs: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(inputs, Jet) or isinstance(weight, Jet) or inputs.value.dim() < 2:
        return NotImplemented
    jet = _through_positions(inputs, lambda stacked: F.linear(stacked, weight))
    return jet if bias is None else jet + bias


def _through_positions(jet: Jet, function: Callable[[Tensor], Tensor], padded: bool = False) -> Jet:
    """A linear function, called once on the value and all coefficients, (n, positions, ...).

    padded: with a position of zeros at the end, whose output is taken away from the derivatives.
    """
    stacked = [jet.value.unsqueeze(1), *(part for part in jet.parts if part is not None)]
    if padded:
        stacked.append(torch.zeros_like(stacked[0]))
    value, *rest = function(torch.cat(stacked, 1)).split([own.shape[1] for own in stacked], 1)
    left = iter([own - rest[-1] for own in rest[:-1]] if padded else rest)
    return Jet(jet.kind, value.squeeze(1), [None if part is None else next(left) for part in jet.parts])


_ELEMENTWISE = (
    *("gelu", "softplus", "elu", "celu", "selu", "mish", "log_sigmoid", "logsigmoid", "softsign", "tanhshrink"),
    *("relu", "leaky_relu", "hardswish", "abs", "rsqrt", "log", "log1p", "expm1", "erf", "sinh", "cosh", "tan"),
    *("asin", "acos", "atan", "arctan", "asinh"),
)
_LINEAR = (
    *("__getitem__", "cat", "concat", "stack", "select", "narrow", "index_select", "expand", "repeat", "sum"),
    *("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "t", "T", "mT", "permute"),
    *("movedim", "clone", "contiguous", "neg", "mean", "to", "double", "float", "flip", "roll", "cumsum"),
    "type_as",
)
_RULES: dict[str, Function] = {
    **dict.fromkeys((*FORMULAS, *_ELEMENTWISE), _elementwise),
    **dict.fromkeys(_LINEAR, _map_linearly),
    **dict.fromkeys(("split", "chunk", "unbind"), _map_to_several),
    **dict.fromkeys(("matmul", "mm", "__rmatmul__"), _map_one),
    **dict.fromkeys(("mul", "multiply"), _multiply),
    **dict.fromkeys(("div", "divide", "true_divide"), _divide),
    **dict.fromkeys(("sub", "subtract"), partial(_add, sign=-1)),
    "__rsub__": lambda func, a, b: _add(func, b, a, sign=-1),
    "__rdiv__": lambda func, a, b: _divide(func, b, a),
    "add": _add,
    "pow": _power,
    "square": lambda func, a: _power(func, a, 2),
    "sqrt": lambda func, a: _power(func, a, 0.5),
    "reciprocal": lambda func, a: _power(func, a, -1),
    "dropout": lambda func, jet, p, training, inplace: (  # one mask for the value and its derivatives
        NotImplemented if inplace else jet * func(torch.ones_like(jet.value), p, training)
    ),
    "linear": _linear,
}
_PLAIN = frozenset(  # what does not depend on derivatives
    (
        *("shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "size", "dim", "numel"),
        *("__len__", "is_floating_point", "is_complex", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "sign"),
    )
)


# -- modules --------------------------------------------------------------------------------------------------

_FORWARD_MODE: WeakSet[Any] = WeakSet()  # those that were found not to run on jets, and the code of functions


def run(module: Function, jet: Jet) -> Jet:
    """What a module makes of a jet: by the rules, or else by nested forward mode."""
    kind = type(module)
    has_own = getattr(kind, "forward", None) is not nn.Sequential.forward or "forward" in vars(module)
    if isinstance(module, nn.Sequential) and not has_own and _is_plain(module):
        for child in module._modules.values():  # `children` leaves out one that is used again
            assert child is not None
            jet = run(child, jet)
        return jet
    modules = module.modules() if isinstance(module, nn.Module) else ()  # a function of points will do as well
    if module in _FORWARD_MODE or not all(map(_is_plain, modules)):
        return _push(module, [jet])
    try:
        outputs = module(Jet(jet.kind, jet.value, jet.parts))  # a function in place may write over this one
        return outputs if isinstance(outputs, Jet) else Jet(jet.kind, outputs, [None] * len(jet.parts))
    except (torch.OutOfMemoryError, HiddenError):
        raise
    except Exception as error:
        reason = error
    outputs = _push(module, [jet])  # an error of the model's own comes again here
    code = getattr(module, "__code__", module)  # a lambda is a new function each time
    if code not in _FORWARD_MODE:
        warnings.warn(
            f"derivatives of {kind.__name__} in its inputs go through nested forward mode, which is several times "
            f"slower: {reason}",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )
    _FORWARD_MODE.update((module, code))
    return outputs


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of the module runs its forward, as it is written, and nothing else."""
    if isinstance(module, torch.jit.ScriptModule):
        raise HiddenError("torch's forward mode sees nothing inside torch.jit: pass the module as it was written")
    compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    return not (compiled or any(hooks_of(module)) or has_global_hook())


def run_layer(module: nn.Module, forward: Function, *args: Any, **kwargs: Any) -> Any:
    """forward(*args) in place of a layer's own, also on a jet: a Linear layer is called once, on all positions.

    To the rule for sequences b is part of every position. A position of zeros, taken away from the derivatives,
    sends their gradients back with the other sign: the row of b is that of the value.
    """
    if not args or not isinstance(args[0], Jet):
        return forward(*args, **kwargs)
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return type(module).forward(module, *args, **kwargs)
    with _BiasOfValue():
        return _through_positions(args[0], forward, padded=module.bias is not None)


class _BiasOfValue(TorchFunctionMode):
    """Inside, F.linear adds b to the first position alone: W v_i + b - b would lose the digits of W v_i."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or args[2] is None:
            return func(*args, **(kwargs or {}))
        inputs, weight, bias = args
        z = F.linear(inputs, weight)
        first = bias.to(z.dtype).expand(1, *z.shape[2:])
        return z + F.pad(first, [0, 0] * (z.dim() - 2) + [0, z.shape[1] - 1])
