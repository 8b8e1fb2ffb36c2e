"""Arithmetic on single numbers of a CUDA device: written down as it comes, done by one kernel when it is needed.

A step decides by some thirty operations on single numbers (rho, lambda, whether to move), each as dear to launch
as a product of matrices. Inside `written_down()` a `Number` takes their place: it stands for a 0-dim tensor, knows
the operators of one, and remembers what was asked. `forced` turns several into tensors by one kernel, compiled at
the first call for arithmetic of this form and kept. Any torch function computes one by the ordinary operations.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from woodbury.device.constants import kept

# operation -> (in C++, on tensors); a truth is a number, not zero where it holds
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
_MOST = 8  # tensors that a kernel takes, and gives


class _Names(dict[int, str]):
    """Index -> name, each written once."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    def __missing__(self, index: int) -> str:
        name = self[index] = f"{self.letter}{index}"
        return name


_GIVEN, _CONSTANTS, _RESULTS = _Names("a"), _Names("c"), _Names("t")


class _Tape:
    """Numbers in the order they were asked for: tensors a0, a1, ..., constants c0, ..., results t0, ..."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.constants: list[float] = []
        self.code: list[tuple[str, ...]] = []
        self.values: dict[str, Tensor] = {}

    def name(self, value: Number | Tensor | float) -> str:
        if isinstance(value, Number) and value.tape is self:
            return value.name
        if not isinstance(value, Number | Tensor):
            self.constants.append(float(value))
            return _CONSTANTS[len(self.constants) - 1]
        name = _GIVEN[len(self.tensors)]
        self.tensors.append(value.tensor() if isinstance(value, Number) else value)
        return name

    def write(self, operation: str, *operands: Number | Tensor | float) -> Number:
        self.code.append((operation, *map(self.name, operands)))
        return Number(self, _RESULTS[len(self.code) - 1])

    def value(self, name: str) -> Any:
        """By ordinary operations."""
        if name[0] == "c":
            return self.constants[int(name[1:])]
        if name not in self.values:
            if name[0] == "a":
                self.values[name] = self.tensors[int(name[1:])].double()
            else:
                for own in self._behind(name):
                    self._carry_out(own)
        return self.values[name]

    def _behind(self, name: str) -> list[str]:
        """The results that one depends on and that are not known yet, in order, itself last."""
        last = int(name[1:])
        needed = {name}
        for index in range(last, -1, -1):
            if _RESULTS[index] in needed:
                _, *operands = self.code[index]
                needed.update(own for own in operands if own[0] == "t" and own not in self.values)
        return [_RESULTS[index] for index in range(last + 1) if _RESULTS[index] in needed]

    def _carry_out(self, name: str) -> None:
        operation, *operands = self.code[int(name[1:])]
        values = [self.value(operand) for operand in operands]
        if operation in ("where", "and"):  # these take tensors only
            like = next(value for value in values if isinstance(value, Tensor))
            values = [
                value if isinstance(value, Tensor) else like.new_full((), value, dtype=torch.float64)
                for value in values
            ]
        self.values[name] = _OPERATIONS[operation][1](*values)


def _binary(operation: str, swapped: bool = False) -> Callable[[Number, Any], Any]:
    """The operator of a `Number`; with a tensor that is no single number it is torch's own."""

    def method(self: Number, other: Any) -> Any:
        tape, kind = self.tape, type(other)
        if kind is Number and other.tape is tape:
            name = other.name
        elif kind is float or kind is int:
            name = _CONSTANTS[len(tape.constants)]
            tape.constants.append(other)
        elif isinstance(other, Tensor) and other.dim() > 0:
            pair = (other, self.tensor()) if swapped else (self.tensor(), other)
            return _OPERATIONS[operation][1](*pair)
        else:
            name = tape.name(other)
        tape.code.append((operation, name, self.name) if swapped else (operation, self.name, name))
        return Number(tape, _RESULTS[len(tape.code) - 1])

    return method


class Number:
    """A 0-dim tensor that is not computed yet."""

    __slots__ = ("name", "tape")

    def __init__(self, tape: _Tape, name: str) -> None:
        self.tape = tape
        self.name = name

    def tensor(self) -> Tensor:
        """The number, by the ordinary operations."""
        value: Tensor = self.tape.value(self.name)
        return value

    __add__ = _binary("add")
    __radd__ = _binary("add", swapped=True)
    __sub__ = _binary("sub")
    __rsub__ = _binary("sub", swapped=True)
    __mul__ = _binary("mul")
    __rmul__ = _binary("mul", swapped=True)
    __truediv__ = _binary("div")
    __rtruediv__ = _binary("div", swapped=True)
    __gt__ = _binary("gt")
    __ge__ = _binary("ge")
    __lt__ = _binary("lt")
    __le__ = _binary("le")
    __eq__ = _binary("eq")
    __and__ = _binary("and")
    __rand__ = _binary("and", swapped=True)
    __hash__ = None  # type: ignore[assignment]

    def __abs__(self) -> Number:
        return self.tape.write("abs", self)

    def root(self) -> Number:
        """Square root; of what is below zero, zero."""
        return self.tape.write("root", self)

    def where(self, a: Number | Tensor | float, b: Number | Tensor | float) -> Number:
        """a where this, a truth, holds, else b."""
        return self.tape.write("where", self, a, b)

    def __float__(self) -> float:
        return float(self.tensor())

    def __bool__(self) -> bool:
        return bool(self.tensor())

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.tensor() if isinstance(leaf, Number) else leaf, (tuple(args), kwargs or {})
        )
        return function(*args, **kwargs)


class _Here(threading.local):
    tape: _Tape | None = None


_here = _Here()


class written_down:  # noqa: N801  (a context, used as a function)
    """Inside, `number` gives a `Number` on CUDA devices."""

    def __init__(self, device: torch.device) -> None:
        self.tape = _Tape() if device.type == "cuda" else None

    def __enter__(self) -> None:
        self.before, _here.tape = _here.tape, self.tape

    def __exit__(self, *_: object) -> None:
        _here.tape = self.before


def number(value: Tensor) -> Tensor | Number:
    """A 0-dim tensor as something to compute with."""
    tape = _here.tape
    return value if tape is None else Number(tape, tape.name(value))


_kernels: dict[Any, Callable[..., Any]] = {}
_works = True  # until a kernel could not be made


def forced(*values: Any) -> tuple[Any, ...]:
    """The same numbers with every `Number` among them computed, all by one kernel where that can be."""
    pending = [value for value in values if isinstance(value, Number) and value.name not in value.tape.values]
    if len(pending) > 1 and all(value.tape is pending[0].tape for value in pending):
        _compute(pending[0].tape, [value.name for value in pending])
    return tuple(value.tensor() if isinstance(value, Number) else value for value in values)


def multiples(value: Any, *factors: Any) -> tuple[Any, ...]:
    """value times each factor, computed: by one operation where the factors are plain numbers."""
    if isinstance(value, Number) and all(isinstance(factor, float | int) for factor in factors):
        tensor = value.tensor()
        return (tensor * _vector(factors, tensor.device)).unbind()
    return forced(*(value * factor for factor in factors))


@kept
def _vector(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def _compute(tape: _Tape, names: Sequence[str]) -> None:
    """Put the values of these results on the tape, if there is a kernel to do it."""
    doubles = any(tensor.dtype == torch.float64 for tensor in tape.tensors)
    most = max(len(tape.tensors), len(names))
    if not doubles or not tape.tensors[0].is_cuda or most > _MOST:
        return
    key = (*tape.code, *names, *(tensor.dtype for tensor in tape.tensors), tape.tensors[0].device)
    constants = {_CONSTANTS[index]: value for index, value in enumerate(tape.constants)}

    def make() -> Callable[..., Any]:
        source = _source(tape, names)
        return torch.cuda.jiterator._create_multi_output_jit_fn(source, len(names), **constants)

    results = _launched(key, make, tape.tensors, constants)
    if results is not None:
        tape.values.update(zip(names, results, strict=True))


def _launched(
    key: Hashable, make: Callable[[], Callable[..., Any]], tensors: Sequence[Tensor], constants: dict[str, float]
) -> Any:
    """What the kernel of this key gives, made if it was not yet; None where none can be had."""
    global _works
    kernel = _kernels.get(key)
    if not _works or (kernel is None and torch.cuda.is_current_stream_capturing()):  # nothing is compiled then
        return None
    try:
        kernel = make() if kernel is None else kernel
        results = kernel(*tensors, **constants)
    except RuntimeError as error:
        if key in _kernels or isinstance(error, torch.OutOfMemoryError):
            raise
        _works = False  # no compiler on this machine: the ordinary operations do it
        return None
    _kernels[key] = kernel
    return results


def _source(tape: _Tape, names: Sequence[str]) -> str:
    given = [f"T a{index}" for index in range(len(tape.tensors))]
    given += [f"T c{index}" for index in range(len(tape.constants))]
    given += [f"T& o{index}" for index in range(len(names))]
    lines = [
        f"T t{index} = {_OPERATIONS[operation][0].format(*operands)};"
        for index, (operation, *operands) in enumerate(tape.code)
    ]
    lines += [f"o{index} = {name};" for index, name in enumerate(names)]
    return f"template <typename T> void numbers({', '.join(given)}) {{ {' '.join(lines)} }}"


_KEEP = "template <typename T> T keep(T x, T kept, T rate) { return kept != T(0) ? x * rate : T(0); }"


def keep(values: Tensor, where: Tensor, rate: float | Tensor | None = None) -> Tensor:
    """rate times the values where a truth holds, else zeros, whatever the values are."""
    if values.is_cuda and values.dtype in (torch.float32, torch.float64):
        tensors, constants = [values, where], {"rate": 1.0}
        if isinstance(rate, Tensor):
            tensors, constants = [values, where, rate], {}
        elif rate is not None:
            constants = {"rate": float(rate)}
        key = _KEEP, len(tensors), values.dtype, values.device
        make = partial(torch.cuda.jiterator._create_jit_fn, _KEEP, **constants)
        result: Tensor | None = _launched(key, make, tensors, constants)
        if result is not None:
            return result
    scaled = values if rate is None else rate * values
    return torch.where(where.bool(), scaled, scaled.new_zeros(()))
