"""Single numbers that never make a step wait: floats on the CPU, `Number`s on any other device.

Both kinds take the ordinary operators. On the CPU a float costs a fraction of a 0-dim tensor. Elsewhere a `Number`
stores the operations that lead to it: a step needs about thirty (rho, lambda, whether to move), each as costly to
launch as a product of matrices, and `compute` does them all in one kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from woodbury.device.constants import zeros

# operation -> (in C++, on tensors); a truth value is a number, 0 for false
_OPERATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add": ("{} + {}", operator.add),
    "sub": ("{} - {}", operator.sub),
    "mul": ("{} * {}", operator.mul),
    "div": ("{} / {}", operator.truediv),
    "gt": ("T({} > {})", operator.gt),
    "ge": ("T({} >= {})", operator.ge),
    "lt": ("T({} < {})", operator.lt),
    "le": ("T({} <= {})", operator.le),
    "eq": ("T({} == {})", operator.eq),
    "and": ("T({} != T(0) && {} != T(0))", lambda a, b: a.bool() & b.bool()),
    "abs": ("fabs({})", torch.abs),
    "root": ("sqrt({0} < T(0) ? T(0) : {0})", lambda a: a.clamp_min(0).sqrt()),
    "where": ("({} != T(0) ? {} : {})", lambda c, a, b: torch.where(c.bool(), a, b)),
}
_ON_TENSORS_ONLY = ("and", "where")


def _operator(operation: str, swapped: bool = False) -> Callable[[Number, Any], Any]:
    """An operator method of `Number`; with a tensor of more than one number it is torch's operator."""

    def method(self: Number, other: Any) -> Any:
        if isinstance(other, Tensor):
            if other.dim() > 0:
                pair = (other, self.tensor()) if swapped else (self.tensor(), other)
                return _OPERATIONS[operation][1](*pair)
            other = Number(other)
        return Number(None, operation, (other, self) if swapped else (self, other))

    return method


class Number:
    """A number on a device: a 0-dim tensor, or an operation on such numbers that is not computed yet.

    Methods, torch functions and float() act on the tensor.
    """

    __slots__ = ("operands", "operation", "value")

    def __init__(self, value: Tensor | None, operation: str = "", operands: tuple[Any, ...] = ()) -> None:
        self.value = value
        self.operation = operation
        self.operands = operands  # numbers and floats

    def tensor(self) -> Tensor:
        """The number in double precision; computed by torch operations, one after the other."""
        if self.value is None:
            for number in _uncomputed([self]):
                number.value = _evaluate(number)
        assert self.value is not None
        if self.value.dtype not in (torch.float64, torch.bool):
            self.value = self.value.double()
        return self.value

    __add__ = _operator("add")
    __radd__ = _operator("add", swapped=True)
    __sub__ = _operator("sub")
    __rsub__ = _operator("sub", swapped=True)
    __mul__ = _operator("mul")
    __rmul__ = _operator("mul", swapped=True)
    __truediv__ = _operator("div")
    __rtruediv__ = _operator("div", swapped=True)
    __gt__ = _operator("gt")
    __ge__ = _operator("ge")
    __lt__ = _operator("lt")
    __le__ = _operator("le")
    __eq__ = _operator("eq")
    __and__ = _operator("and")
    __rand__ = _operator("and", swapped=True)
    __hash__ = None  # type: ignore[assignment]

    def __abs__(self) -> Number:
        return Number(None, "abs", (self,))

    def __neg__(self) -> Number:
        return 0.0 - self

    def __pow__(self, exponent: float) -> Tensor:
        return self.tensor() ** exponent

    def __or__(self, other: Any) -> Tensor:
        return self.tensor().bool() | (other.tensor().bool() if isinstance(other, Number) else other)

    def __invert__(self) -> Tensor:
        return ~self.tensor().bool()

    def __float__(self) -> float:
        return float(self.tensor())

    def __bool__(self) -> bool:
        return bool(self.tensor())

    def __getattr__(self, name: str) -> Any:  # attributes of a tensor that this class lacks
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.tensor() if isinstance(leaf, Number) else leaf, (tuple(args), kwargs or {})
        )
        return function(*args, **kwargs)


def _uncomputed(results: Sequence[Number]) -> list[Number]:
    """These numbers and those they depend on that have no value yet, operands first."""
    order: dict[int, Number] = {}
    stack = list(reversed(results))
    while stack:
        number = stack[-1]
        missing = [
            operand
            for operand in number.operands
            if isinstance(operand, Number) and operand.value is None and id(operand) not in order
        ]
        if missing:
            stack.extend(reversed(missing))
        else:
            order.setdefault(id(stack.pop()), number)
    return list(order.values())


def _evaluate(number: Number) -> Tensor:
    """The value of a number whose operands have values."""
    values = [operand.tensor() if isinstance(operand, Number) else operand for operand in number.operands]
    if number.operation in _ON_TENSORS_ONLY:
        like = next(value for value in values if isinstance(value, Tensor))
        values = [v if isinstance(v, Tensor) else like.new_full((), v, dtype=torch.float64) for v in values]
    result: Tensor = _OPERATIONS[number.operation][1](*values)
    return result


Scalar = float | Number
Truth = bool | Number
Scale = float | Tensor  # a computed number, by which a tensor can be multiplied in place


def scalar(value: Tensor) -> Scalar:
    """A 0-dim tensor as a number on its device."""
    return value.item() if value.is_cpu else Number(value)


def truth(value: Tensor) -> Truth:
    """A boolean tensor with one entry as a truth value on its device."""
    return bool(value) if value.is_cpu else Number(value.reshape(()))


def as_number(value: float | Tensor) -> Scalar:
    """A number from the state of an optimizer, for arithmetic."""
    return Number(value) if isinstance(value, Tensor) else value


_ON_A_DEVICE = (Number, Tensor)


def is_known(value: Scalar | Truth | Tensor) -> bool:
    """Whether the value can be read without waiting for a device."""
    return not isinstance(value, _ON_A_DEVICE)


def to_device(value: float | Tensor | Number, device: torch.device) -> float | Tensor:
    """A number for the state of an optimizer, on this device."""
    if device.type == "cpu":
        return float(value)
    if isinstance(value, Number):
        value = value.tensor()
    if isinstance(value, Tensor) and value.dtype == torch.float64 and value.device == device:
        return value
    return torch.as_tensor(value, dtype=torch.float64, device=device)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b; does not wait."""
    if isinstance(condition, Tensor):
        condition = Number(condition)
    return Number(None, "where", (condition, a, b)) if isinstance(condition, Number) else a if condition else b


def ratio_where(condition: Truth, a: Scalar, b: Scalar, otherwise: float) -> Any:
    """a / b where the condition holds, else `otherwise`."""
    if is_known(condition):
        return a / b if condition else otherwise
    return where(condition, a / b, otherwise)


def root(value: Scalar) -> Scalar:
    """The square root; of 0 for a negative value, as rounding may give one."""
    if isinstance(value, Number):
        return Number(None, "root", (value,))
    return max(value, 0.0) ** 0.5 if value == value else value


def as_double(value: Scalar | Tensor) -> Tensor:
    """The number as a 0-dim tensor in double precision."""
    return _as_tensor(value, torch.float64)


def as_truth(value: Truth | Tensor) -> Tensor:
    """The truth value as a 0-dim boolean tensor."""
    return _as_tensor(value, torch.bool)


def _as_tensor(value: Scalar | Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Number):
        value = value.tensor()
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=dtype, device="cpu")
    return (value.clone() if value.is_inference() else value).to(dtype)


# -- several numbers in one kernel --------------------------------------------------------------------------------

_MAX_TENSORS = 8  # inputs of a kernel, and outputs
_kernels: dict[Hashable, Callable[..., Any]] = {}
_kernels_work = True  # False once a kernel cannot be compiled


def compute(*values: Any) -> tuple[Any, ...]:
    """The same values with every `Number` as its tensor, all computed in one kernel where possible."""
    if Number not in map(type, values):  # on the CPU
        return values
    uncomputed = [value for value in values if isinstance(value, Number) and value.value is None]
    if uncomputed and torch.cuda.is_available():
        source, tensors, constants, operations = _program(uncomputed)
        few = max(len(tensors), len(uncomputed)) <= _MAX_TENSORS
        # with no double among them the kernel would compute in their type
        double = any(tensor.dtype == torch.float64 for tensor in tensors)
        if operations > 1 and few and double and tensors[0].is_cuda:
            for number, value in zip(
                uncomputed, _launch(source, len(uncomputed), tensors, constants), strict=True
            ):
                number.value = value
    return tuple(value.tensor() if isinstance(value, Number) else value for value in values)


def _program(results: Sequence[Number]) -> tuple[str, list[Tensor], dict[str, float], int]:
    """A C++ function of these numbers, the tensors and constants it takes, and its number of operations."""
    tensors: list[Tensor] = []  # a0, a1, ...
    constants: dict[str, float] = {}  # c0, c1, ...
    names: dict[int, str] = {}  # of numbers and tensors, by id

    def name_of(value: Any) -> str:
        if not isinstance(value, Number):
            name = f"c{len(constants)}"
            constants[name] = float(value)
            return name
        if value.value is None:
            return names[id(value)]
        if id(value.value) not in names:
            names[id(value.value)] = f"a{len(tensors)}"
            tensors.append(value.value)
        return names[id(value.value)]

    lines = []
    for index, number in enumerate(_uncomputed(results)):
        operands = [name_of(operand) for operand in number.operands]
        names[id(number)] = f"t{index}"
        lines.append(f"T t{index} = {_OPERATIONS[number.operation][0].format(*operands)};")
    outputs = [f"o{index} = {names[id(number)]};" for index, number in enumerate(results)]
    signature = [f"T a{index}" for index in range(len(tensors))] + [f"T {name}" for name in constants]
    signature += [f"T& o{index}" for index in range(len(results))]
    body = " ".join([*lines, *outputs])
    source = f"template <typename T> void numbers({', '.join(signature)}) {{ {body} }}"
    return source, tensors, constants, len(lines)


def _launch(
    source: str, outputs: int, tensors: Sequence[Tensor], constants: dict[str, float]
) -> Sequence[Tensor | None]:
    """The outputs of a kernel of this source, compiled at its first use; each None if it cannot be compiled."""
    global _kernels_work
    key = source, *(tensor.dtype for tensor in tensors), tensors[0].device
    kernel = _kernels.get(key)
    if not _kernels_work or (kernel is None and torch.cuda.is_current_stream_capturing()):  # cannot compile
        return [None] * outputs
    try:
        if kernel is None:
            kernel = torch.cuda.jiterator._create_multi_output_jit_fn(source, outputs, **constants)
        results = kernel(*tensors, **constants)
    except RuntimeError as error:
        if key in _kernels or isinstance(error, torch.OutOfMemoryError):
            raise
        _kernels_work = False  # no compiler on this machine: torch's operations do the same
        return [None] * outputs
    _kernels[key] = kernel
    return results if outputs > 1 else [results]  # torch returns a single output as it is


def scaled_if(holds: Tensor, values: Tensor, rate: float | Tensor = 1.0) -> Tensor:
    """rate times the values if `holds` is true, else zeros (also for nan and inf)."""
    scaled = values if isinstance(rate, float) and rate == 1.0 else rate * values
    holds = holds if holds.dtype == torch.bool else holds.bool()
    return torch.where(holds, scaled, zeros((), values.dtype, values.device))
