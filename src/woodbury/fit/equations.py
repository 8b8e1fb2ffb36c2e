"""Terms of a fit: the residuals of equations, conditions and data, each on points of its own.

    f = sum_t w_t mean |r_t|^2,      r_t = function_t(model, inputs) - targets

**Points by residual.** Where a term draws its points, a step takes n of 8 n candidates, with the probabilities

    q = 1/2 uniform + 1/2 s / sum s,      s = min(|r|, 10 mean |r|)

and multiplies their residuals by 1 / sqrt(8 n q): the expected loss and its gradient stay what they are, and
points are where the residual is. The bound is for corners that no network can fit, such as two ends of a start
that do not meet: without it half of all points would be there. On a line (an equation in time alone) they are not
independent: from one end on, one is taken after every 1/n of the sum of q, so that there are no gaps between them,
and no two rows that say the same.

**Early times.** Where a source has a time, u from 0 to 1, residuals of the first term are multiplied by sqrt(w),

    w = exp(-a (u + C(u) / C(1))) / mean,      C(u) = the sum of |r|^2 before u

A path that leaves the solution early and stays where residuals are small is near a local minimum of the loss. With
w, the loss falls where it leaves later. a falls from 6 to 0 in the first six tenths of a fit.

**Weights.** The first term has the weight 1. Unless they are given, those of the others come from W = 10,
or 100 where the loss is below 1e-8 of the first one. With tau_t, the mean square of a row of term t,

    w_t = W a / min(max(a, 0.1), 1000),      a = tau_1 / tau_t

so that an equation in other units, with residuals thousands of times larger or smaller, is solved all the same.
Its rows are short in a network that is nearly linear too, until the first steps have changed that: weights are
chosen anew before steps 2, 3, 5, 9, 17 and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from woodbury import _batch
from woodbury._choice import check_number
from woodbury.device import fingerprint
from woodbury.device.recording import Replays
from woodbury.fit.derivable import check_derivatives
from woodbury.fit.sources import Conversion, Data, Draw, as_tensors
from woodbury.model.fallback import Forward
from woodbury.model.terms import Term, Terms, terms_of
from woodbury.row_matrix import rows

CANDIDATES = 8  # points drawn for each that is taken
CAP = 10.0  # times the mean |r|: as much as counts of a residual
AT_ONCE = 16384  # candidates that go through the model together
FEWER = 2  # times fewer points than the first term has, for the others
PROBE = 64  # points that tell how long the rows of a term are
FEW = 4  # that tell what it depends on
CONDITIONS = 10.0, 100.0  # W, far from a solution and near one,
SHORTEST, LONGEST = 0.1, 1000.0  # where the mean square of the rows of the first term is so many times theirs


class Equations:
    """What a model has to fulfil: named terms, each with its own points, for `woodbury.fit`.

        fit = woodbury.fit(model, woodbury.Equations(
            interior=(draw_inside, lambda model, x: woodbury.laplacian(model, x).laplacian + f(x)),
            boundary=(draw_edge, lambda model, x: model(x) - g(x)),
            data=((points, values), lambda model, x: model(x)),
        ), seconds=60)

    A term is (source, function), or (source, function, weight). The source is a function draw(count) that returns
    as many inputs, or (inputs, targets); or inputs that stay the same; or (inputs, targets). function(model,
    inputs) gives n values, or (n, k) of them, and the residual is the difference from the targets, or from zero.
    The first term is the one that takes most points: of those drawn it has `samples` per step, and the others
    half of that. A weight is a number; those not given are 10, and 100 near a solution. Unknown coefficients are
    parameters of the model.
    """

    def __init__(self, **terms: Any) -> None:
        if not terms:
            raise ValueError("Equations needs at least one term: Equations(name=(source, function))")
        self.terms = {name: _Source.read(name, term) for name, term in terms.items()}

    def converted(self, convert: Conversion) -> dict[str, _Source]:
        """The terms with points as a model takes them."""
        return {name: source.converted(convert) for name, source in self.terms.items()}


@dataclass(frozen=True)
class _Residual:
    """What a term makes of inputs."""

    name: str
    function: Forward

    def __call__(self, model: nn.Module, inputs: Any, targets: Tensor | None, scale: Tensor) -> Tensor:
        """(n, k), times (n, 1)."""
        values = self.function(model, inputs)
        if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != len(scale):
            shown = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"term {self.name!r} gave {shown} for {len(scale)} points: one row for each is needed"
            )
        if not values.is_floating_point():
            way_out = ": give its real and its imaginary part as two numbers" if values.is_complex() else ""
            raise ValueError(f"term {self.name!r} gave residuals of {values.dtype}{way_out}")
        values = values.reshape(len(values), -1)
        if targets is not None:
            if targets.numel() != values.numel():
                raise ValueError(
                    f"term {self.name!r} has targets of shape {tuple(targets.shape)} for values of shape "
                    f"{tuple(values.shape)}"
                )
            values = values - targets.reshape(values.shape)
        return values * scale


@dataclass
class _Source:
    """Where the points of a term come from, and its function."""

    residual: _Residual
    draw_some: Draw | None  # None: `fixed`
    fixed: Data | None
    weight: float | None
    convert: Conversion = field(default_factory=Conversion)
    mean_square: float = float("nan")  # of the residual, as last seen
    replays: Replays = field(default_factory=Replays)

    @property
    def name(self) -> str:
        return self.residual.name

    @staticmethod
    def read(name: str, term: Any) -> _Source:
        """Raises an error that names the term where it is none."""
        if not isinstance(term, tuple | list) or len(term) not in (2, 3) or not callable(term[1]):
            raise TypeError(f"Equations: {name} must be (source, function) or (source, function, weight)")
        source, function, weight = (*term, None)[:3]
        if weight is not None:
            check_number(f"Equations: the weight of {name}", weight, above=0)
        if callable(source):
            return _Source(_Residual(name, function), source, None, weight)
        try:
            fixed = _as_data(source, Conversion())
            _batch.check_batch(*fixed)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Equations: {name}: {error}") from None
        return _Source(_Residual(name, function), None, fixed, weight)

    def converted(self, convert: Conversion) -> _Source:
        return replace(self, fixed=self.fixed and convert(self.fixed), convert=convert, replays=Replays())

    def draw(self, count: int) -> tuple[Any, Tensor | None, int]:
        """So many inputs with their targets, or all there are, and how many."""
        if self.draw_some is None:
            assert self.fixed is not None
            return (*self.fixed, _batch.sample_count(self.fixed[0]))
        try:
            inputs, targets = _as_data(self.draw_some(count), self.convert)
            found = _batch.check_batch(inputs, targets)
        except (TypeError, ValueError) as error:
            raise ValueError(f"fit: term {self.name!r}: draw({count}): {error}") from error
        if found != count:
            way_out = "draw more and return the first of them" if found < count else f"return points[:{count}]"
            raise ValueError(f"fit: term {self.name!r}: draw({count}) gave {found} points: {way_out}")
        return inputs, targets, count

    def evaluate(self, model: nn.Module, inputs: Any, targets: Tensor | None, count: int, like: Tensor) -> Tensor:
        """The residuals (n, k), without a graph; raises an error that names the term if one is not finite."""
        parts = []

        @cache
        def key() -> Hashable:
            return fingerprint.of_model(model), fingerprint.of_function(self.residual.function)

        for start in range(0, count, AT_ONCE):
            window = slice(start, min(start + AT_ONCE, count))
            own_inputs, own_targets = _batch.part((inputs, targets), window, count)
            scale = like.new_ones(window.stop - window.start, 1)
            parts.append(self._values(model, key, own_inputs, own_targets, scale))
        residual = torch.cat(parts)
        if not bool(torch.isfinite(residual).all()):
            raise ValueError(f"fit: term {self.name!r} gives residuals that are not finite: check its function")
        self.mean_square = float(residual.square().mean())
        return residual

    def _values(self, model: nn.Module, key: Callable[[], Hashable], *batch: Any) -> Tensor:
        run = partial(self.residual, model)
        try:
            with torch.no_grad():
                values: Tensor = self.replays(key, run, *batch)
        except RuntimeError:  # it differentiates the model by torch.autograd.grad
            try:
                with torch.enable_grad():
                    values = self.replays(key, run, *batch)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, AttributeError) as error:
                fault = _batch.fault_of_types(error, batch[0], batch[2].dtype) or error
                if batch[1] is not None and batch[1].shape == getattr(batch[0], "shape", None):
                    fault = f"{fault}. Two tensors are inputs and targets: join columns by torch.cat"
                raise ValueError(f"fit: term {self.name!r}: {fault}") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"fit: term {self.name!r}: {error}") from error
        return values.detach()


def early_weights(times: Tensor, squares: Tensor, decline: float) -> tuple[Tensor, float]:
    """w, as above, of points at these times (n,), the first to the last, with these |r|^2 (n,); `decline` is a.

    And the u by which half of the sum is reached.
    """
    times = times - times.min()
    times, order = times / times.max().clamp(min=torch.finfo(times.dtype).tiny), times.argsort()
    sums = nn.functional.pad(squares[order].cumsum(0), (1, 0))  # of none, of the first, ..., of all
    before = sums[torch.searchsorted(times[order], times)] / sums[-1].clamp(min=torch.finfo(sums.dtype).tiny)
    weights = torch.exp(-decline * (times + before))
    return weights / weights.mean(), float(times[order][torch.searchsorted(sums[1:], sums[-1] / 2)])


def _take(inputs: Any, share: Tensor, count: int) -> Tensor:
    """Indices with these probabilities: evenly where the points are on a line, otherwise independent ones."""
    if not isinstance(inputs, Tensor) or inputs.shape[1:] != (1,):
        return torch.multinomial(share, count, replacement=True)
    order = inputs[:, 0].argsort()
    places = torch.arange(count, device=share.device) + torch.rand(1, dtype=share.dtype, device=share.device)
    return order[torch.searchsorted(share[order].cumsum(0), places / count).clamp(max=len(share) - 1)]


def _as_data(given: Any, convert: Conversion) -> Data:
    """(inputs, targets) of what a source gives, which may be inputs alone."""
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if is_pair and isinstance(given[1], int | float) and not isinstance(given[0], int | float):
        raise ValueError(f"{given[1]} in place of targets: subtract it in the function")
    is_pair = is_pair and (given[1] is None or isinstance(given[1], Tensor) or hasattr(given[1], "__array__"))
    pair: Data = as_tensors(given if is_pair else (given, None), convert)
    return pair


def _run(model: nn.Module, batch: Any) -> Tensor:
    """The residuals of a batch: of one term, or of several, number by number."""
    terms = terms_of(batch)
    if terms is None:
        source, inputs, targets, scale = batch
        residual: Tensor = source(model, inputs, targets, scale)
        return residual
    numbers = torch.cat([_run(model, term.inputs).reshape(-1) for term in terms.terms])
    return numbers[batch[0]].unsqueeze(1)


@dataclass
class TermSource:
    """The batches of a step of terms; `forward` runs them."""

    model: nn.Module
    sources: Mapping[str, _Source]
    by_residual: bool = True
    has_terms: bool = True  # of `Equations`; without, it is one function that draws samples
    weights: dict[str, float] = field(default_factory=dict)
    time: int | None = None  # the column of the first term that is the time
    decline: float = 0.0  # a
    middles: list[float] = field(default_factory=list)  # u with C(u) = C(1) / 2, of each batch with weights w
    forward = staticmethod(_run)
    # of the first term that draws points, in the last batch: the numbers of each, where there are terms; how many
    width: int = 1
    points: int | None = None

    @property
    def is_fresh(self) -> bool:
        return any(source.draw_some is not None for source in self.sources.values())

    @property
    def like(self) -> Tensor:
        return next(own for own in self.model.parameters() if own.requires_grad).detach()

    def batch(self, count: int) -> Data:
        """Points for a step."""
        return self._batch(count, self.by_residual, self.decline)

    def draw(self, count: int) -> Data:
        """Points as they are drawn."""
        return self._batch(count)

    def as_data(self, inputs: Any, targets: Tensor | None) -> Data:
        """Other points of the only term, as a batch."""
        (source,) = self.sources.values()
        scale = self.like.new_ones(_batch.sample_count(inputs), 1)
        return (source.residual, inputs, targets, scale), None

    def mean_squares(self) -> dict[str, float]:
        """Of each term, as last seen."""
        return {name: source.mean_square for name, source in self.sources.items()}

    def loss(self) -> float:
        """sum_t w_t mean |r_t|^2, as last seen."""
        return sum(self.weights[name] * own for name, own in self.mean_squares().items())

    def _batch(self, count: int, by_residual: bool = False, decline: float = 0.0) -> Data:
        if not self.weights:
            self._begin(count)
        parts, widths = {}, {}
        drawn = [name for name, source in self.sources.items() if source.draw_some is not None]
        leading = drawn[0] if drawn else next(iter(self.sources))
        for name, source in self.sources.items():
            own = count if name == leading else max(count // FEWER, min(count, PROBE))
            parts[name], widths[name] = self._points(source, own, by_residual, decline)
        self.points, self.width = len(parts[leading][3]), widths[leading] if self.has_terms else 1
        if len(parts) == 1:
            return parts[leading], None
        numbers = {name: len(part[3]) * widths[name] for name, part in parts.items()}
        terms = []
        for name, (function, inputs, targets, scale) in parts.items():
            # the mean over all numbers is the weighted sum of the means of the terms
            share = (self.weights[name] * sum(numbers.values()) / numbers[name]) ** 0.5
            terms.append(Term(name, (function, inputs, targets, share * scale), len(scale), widths[name]))
        return Terms(tuple(terms)).as_inputs(self.like), None

    def _begin(self, count: int) -> None:
        """Look at the derivatives of the terms on as many points, and choose the first weights."""
        for source in self.sources.values():
            part, width = self._points(source, count)
            found = len(part[3])
            check_derivatives(self.model, (found, width), *_batch.part(part, slice(0, FEW), found))
        self.balance()

    def _points(
        self, source: _Source, count: int, by_residual: bool = False, decline: float = 0.0
    ) -> tuple[tuple[Any, ...], int]:
        """Points of a term with their scales, and the numbers of each."""
        like, chosen = self.like, by_residual and source.draw_some is not None
        inputs, targets, found = source.draw(CANDIDATES * count if chosen else count)
        residual = source.evaluate(self.model, inputs, targets, found, like)
        scale = like.new_ones(found, 1)
        if decline and source.name == next(iter(self.sources)):
            weights, middle = early_weights(inputs[:, self.time], residual.square().sum(1), decline)
            self.middles.append(middle)
            scale = weights.sqrt().unsqueeze(1)
            residual = residual * scale
            source.mean_square = float(residual.square().mean())
        if chosen:
            sizes = residual.norm(dim=1).double()
            sizes = sizes.clamp(max=CAP * sizes.mean())
            total = sizes.sum()
            share = (1 / found + torch.where(total > 0, sizes / total, 1 / found)) / 2
            index = _take(inputs, share, count)
            inputs, targets = _batch.take((inputs, targets), index, found)
            scale = scale[index] * (found * share[index]).rsqrt().to(like).unsqueeze(1)
        return (source.residual, inputs, targets, scale), residual.shape[1]

    def balance(self, is_near: bool = False) -> None:
        """Choose the weights that are not given, by the rows now."""
        lengths: dict[str, float] = {}
        if any(source.weight is None for source in self.sources.values()) and len(self.sources) > 1:
            lengths = {name: self._row_length(source) for name, source in self.sources.items()}
        first = next(iter(self.sources))
        for name, source in self.sources.items():
            if source.weight is not None:
                self.weights[name] = float(source.weight)
            elif name == first:
                self.weights[name] = 1.0
            else:  # a term whose rows are all zero, now, tells nothing about units
                longer = lengths[first] / lengths[name] if lengths[first] > 0 and lengths[name] > 0 else 1.0
                self.weights[name] = CONDITIONS[is_near] * longer / min(max(longer, SHORTEST), LONGEST)

    def _row_length(self, source: _Source) -> float:
        """The mean square of a row of a term."""
        part, _ = self._points(source, PROBE)
        part = _batch.part(part, slice(0, PROBE), len(part[3]))
        try:
            found = rows(self.model, None, part, forward=_run, fallback="autograd")
        except ValueError as error:
            raise ValueError(f"term {source.name!r}: {error}") from error
        return float(found.gram().diagonal().mean())
