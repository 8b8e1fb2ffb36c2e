"""Where the samples of a fit come from."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from numbers import Real
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from woodbury import _batch, _random
from woodbury._process import level_of_caller
from woodbury.model.fallback import Forward
from woodbury.parallel.group import Group

Data = tuple[Any, "Tensor | None"]
Draw = Callable[[int], Any]


@dataclass(frozen=True)
class Drawn:
    """Samples of a function that draws them, for any loss. See `woodbury.fit.equations.TermSource` for squares."""

    draw: Callable[[int], Data]
    forward: Forward | None
    is_fresh = True
    has_terms = False
    width, points = 1, None
    weights: dict[str, float] = field(default_factory=dict)  # of terms: none

    def batch(self, count: int) -> Data:
        """Samples for a step."""
        return self.draw(count)

    def as_data(self, inputs: Any, targets: Tensor | None) -> Data:
        """Other samples, as they are."""
        return inputs, targets

    def balance(self, is_near: bool = False) -> None:
        """Nothing, as there are no terms."""

    def loss(self) -> float:
        """Not known before a step."""
        return math.nan

    def mean_squares(self) -> dict[str, float]:
        return {}


_REAL = {torch.float32, torch.float64}


@dataclass
class Conversion:
    """Pairs as a model takes them: on its device, and in its type of floats, which is said once."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype | None = None  # of floats; None: as they are
    is_said: bool = False

    @staticmethod
    def to(model: nn.Module) -> Conversion:
        parameters = list(model.parameters())
        dtypes = {own.dtype for own in parameters if own.is_floating_point()}
        (dtype,) = dtypes if len(dtypes) == 1 and dtypes <= _REAL else (None,)
        return Conversion(parameters[0].device if parameters else "cpu", dtype)

    def __call__(self, pair: Any) -> Data:
        """Arrays, tables and lists of numbers as tensors too; anything else stays, as parts of inputs do."""
        pair = tuple(_as_tensor(own, self.dtype) for own in pair)
        if str(self.device) != "cpu":
            pair = pytree.tree_map_only(Tensor, lambda own: own.to(self.device, non_blocking=True), pair)
        floats = [own for own in pytree.tree_leaves(pair) if isinstance(own, Tensor) and own.is_floating_point()]
        others = {own.dtype for own in floats} - {self.dtype}
        if self.dtype is None or not others:
            return pair
        if not self.is_said:
            names = ", ".join(map(str, others))
            message = f"fit: data of {names} is converted to {self.dtype}, as the model has it"
            warnings.warn(message, stacklevel=level_of_caller())
            self.is_said = True
        return pytree.tree_map_only(Tensor, lambda own: own.to(self.dtype) if own.dtype in others else own, pair)


@dataclass
class MiniBatches:
    """The batches of a loader, epoch after epoch.

    One batch is read ahead: so the last one of an epoch is known as such, however long the epochs of a stream are.
    """

    loader: Iterable[Any]
    convert: Conversion = field(default_factory=Conversion)
    epoch: int = 0  # epochs that are over
    taken: int = 0  # batches of the epoch under way
    length: int | None = None  # batches of an epoch, once that is known
    _iterator: Iterator[Any] | None = field(default=None, repr=False)
    _ahead: Data | None = field(default=None, repr=False)
    _nothing: Data = field(default=(None, None), repr=False)  # no sample of the last batch
    _begun: dict[str, Any] | None = field(default=None, repr=False)  # random numbers when the epoch began
    least: int = 1  # so many labels, or rows of targets: smaller batches count as one together
    _unit: int = field(default=1, repr=False)  # batches that count as one, by the first of the epoch
    is_over: bool = False  # whether the batches just taken were the last of their epoch

    def __post_init__(self) -> None:
        if isinstance(self.loader, Iterator):
            raise TypeError(
                f"fit: {type(self.loader).__name__} can be gone through once only: pass something that can be "
                "gone through again and again, as a DataLoader or a list of batches"
            )
        with suppress(TypeError):  # of a stream, whose first epoch tells
            self.length = len(self.loader)  # type: ignore[arg-type]

    @property
    def epochs(self) -> float:
        """Epochs so far; of a first epoch whose length is not known only whole ones."""
        if not self.length:
            return float(self.epoch)
        return self.epoch + self.taken / max(self.length, self.taken + (not self.is_over))  # one is there still

    def next(self, most: int = 1) -> tuple[Data, int]:
        """The next batches as one, at most so many, and how many they are.

        Fewer at the end of an epoch, and where those that follow are of another form or shape. Without a sample
        where the epoch is over here, and not for another process (`agree`).
        """
        if self._iterator is None:
            self._open()
        if self._ahead is None:
            return self._nothing, 0
        batch, count = self._take(), 1
        while count < most * self._unit and self._ahead is not None:
            sizes = [_batch.sample_count(own[0]) for own in (batch, self._ahead)]
            try:
                batch = _batch.join([batch, self._ahead], sizes)
            except ValueError:  # a step of its own
                break
            self._take()
            count += 1
        return batch, count // self._unit

    def _open(self) -> None:
        """Begin an epoch; where one is taken up, with its random numbers, behind the batches that were taken."""
        cpu = torch.device("cpu")
        now, begun = _random.snapshot(cpu), self._begun
        taken, self.taken = self.taken, 0
        if begun is None:
            self._begun = self._order(now)
        else:
            _random.restore(_random.from_plain(begun["all"], cpu))
        self._iterator = iter(self.loader)
        self._read()
        if self._ahead is None:
            raise ValueError("fit: the loader has no batches")
        self._unit = math.ceil(self.least / _prediction_count(self._ahead))
        while self.taken < taken and self._ahead is not None:
            self._take()
        self.taken = taken  # by other processes, if not by this one
        if begun is not None:
            _random.restore(now)

    def _order(self, everyone: _random.Snapshot | None) -> dict[str, Any]:
        """The state of what chooses the order of the batches: generators of all, and of a DataLoader's own."""
        own = [generator.get_state() for generator in _generators(self.loader)]
        return {"all": None if everyone is None else _random.as_plain(everyone), "own": own}

    def state(self) -> dict[str, Any]:
        """What `take_up` needs, beside the batches taken: the random numbers of the epoch under way."""
        return self._order(None) if self._begun is None else self._begun

    def take_up(self, epoch: int, taken: int, length: int | None, state: Mapping[str, Any] | None) -> None:
        """Go on behind so many batches."""
        self.epoch, self.taken, self.length = epoch, taken, length or self.length
        if state is not None:
            self._begun = dict(state) if state["all"] is not None else None
            for generator, own in zip(_generators(self.loader), state["own"], strict=False):
                generator.set_state(own.cpu())

    def agree(self, group: Group, batch: Data) -> int:
        """The samples of a step of all processes; their epoch is over when none of them has a batch left."""
        samples = 0 if _batch.is_empty(batch[0]) else _batch.sample_count(batch[0])
        own = samples, int(self._ahead is None), self.taken, self.length or 0
        counts, over, taken, lengths = group.gather_numbers(*own)
        self.is_over, self.taken, self.length = all(over), max(taken), max(lengths) or None
        return sum(counts)

    def _take(self) -> Data:
        batch = self._ahead
        assert batch is not None
        self._read()
        if self._ahead is None:
            self._nothing = _batch.part(batch, slice(0), _batch.sample_count(batch[0]))
        self.taken += 1
        return batch

    def _read(self) -> None:
        assert self._iterator is not None
        try:
            found = next(self._iterator)
        except StopIteration:
            self._ahead = None
        else:
            self._ahead = self.convert(as_pair(found, "a loader must give pairs"))
        self.is_over = self._ahead is None

    def end_epoch(self) -> None:
        """Close the epoch under way; the next batch opens another."""
        self.length = self.taken
        self._iterator, self._begun, self.taken, self.epoch = None, None, 0, self.epoch + 1

    def all(self) -> Iterable[Any]:
        """The batches of an epoch, without a step on them; of one that does not end as many as were taken."""
        return islice(self.loader, max(self.taken, self.length or 0, 1))


def _prediction_count(batch: Data) -> int:
    """Labels, or rows of targets; samples where there are no targets."""
    inputs, targets = batch
    if not isinstance(targets, Tensor):
        return _batch.sample_count(inputs)
    has_rows = targets.is_floating_point() and targets.dim() > 1
    return max(1, targets[..., 0].numel() if has_rows else targets.numel())


def _generators(loader: Any) -> list[torch.Generator]:
    """Those of a DataLoader and its sampler, beside torch's own."""
    owners = loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    found = [getattr(own, "generator", None) for own in owners]
    return [own for own in found if isinstance(own, torch.Generator)]


def as_pair(batch: Any, what: str) -> Data:
    """(inputs, targets) of a batch."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"fit: {what} (inputs, targets), targets None for zeros, got {type(batch).__name__}"
            + (f" of {len(batch)}" if isinstance(batch, tuple | list) else _way_out(batch))
        )
    return batch[0], batch[1]


def _way_out(data: Any) -> str:
    """What to write in place of data that holds samples, but is neither a pair nor a loader; "" for others."""
    if isinstance(data, str | PathLike):
        return ": read the file first"
    if isinstance(data, Mapping):
        return ": pass two of its entries, (data['inputs'], data['targets'])"
    if hasattr(data, "to_numpy"):  # of pandas
        return ": choose its columns, (data[['a', 'b']], data[['y']])"
    if isinstance(data, Tensor) or type(data).__module__ == "numpy":
        return ": pass the targets with it, (inputs, targets)"
    if hasattr(data, "__getitem__") and not isinstance(data, Iterable):
        return ": put a Dataset into a DataLoader, or its tensors into a pair"
    return ""


def is_batches(data: Any) -> bool:
    """Whether data is a loader, or a list of batches, rather than a pair of tensors or a function."""
    if isinstance(data, tuple | list):
        are_pairs = all(isinstance(own, tuple | list) and len(own) == 2 for own in data)
        return are_pairs or (len(data) != 2 and not isinstance(data[0], Tensor))
    return isinstance(data, Iterable) and not _way_out(data)


def as_tensors(pair: Any, convert: Conversion) -> Any:
    """What is a pair as one that the model takes, anything else as it is."""
    return convert(pair) if isinstance(pair, tuple | list) and len(pair) == 2 else pair


def _as_tensor(values: Any, dtype: torch.dtype | None) -> Any:
    values, columns = _batch.unwrapped(values), getattr(values, "columns", ())
    if hasattr(values, "to_numpy"):  # of pandas
        values = values.to_numpy()
    is_list = isinstance(values, list) and all(
        type(own) in (int, float, str) for own in pytree.tree_leaves(values)
    )
    if type(values).__module__ != "numpy" and not is_list:
        return values
    try:
        found = torch.tensor(values, device="cpu")
    except (TypeError, ValueError) as error:
        pairs = zip(columns, values.T, strict=False) if len(columns) else ()
        odd = [name for name, own in pairs if not all(isinstance(each, Real) for each in own)]
        where = f" (not so in columns {_batch.in_words(odd)})" if odd else ""
        raise TypeError(
            f"fit: inputs and targets must be numbers of one type{where}, in rows of the same length: classes by "
            f"their places 0, 1, ... (numpy.unique(y, return_inverse=True)[1]), other columns in numbers ({error})"
        ) from error
    if is_list and found.is_floating_point():  # floats of Python have no size
        return torch.tensor(values, dtype=dtype or torch.float64, device="cpu")
    return found


def split_off(data: Data, share: float, seed: int) -> tuple[Data, Data, tuple[Tensor, Tensor]]:
    """A share of the samples for validation: the others, these, and the indices of both."""
    samples = _batch.check_batch(*data)
    count = round(share * samples) if 0 < share < 1 else 0
    if not 0 < count < samples:
        raise ValueError(
            f"fit: validation={share} of {samples} sample(s) leaves nothing to train on, or to validate with: "
            "pass a share between 0 and 1, or a pair (inputs, targets)"
        )
    order = torch.randperm(samples, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    parts = order[count:].sort().values, order[:count].sort().values
    device = None if data[1] is None else data[1].device
    pairs = [_batch.take(data, own.to(device), samples) for own in parts]
    return pairs[0], pairs[1], parts


def check_finite(validation: Iterable[Any]) -> None:
    """Raise if a batch of validation data holds something that is not finite, or is none."""
    for batch in validation:
        try:
            _batch.check_batch(*as_pair(batch, "validation must give pairs"))
        except ValueError as error:
            raise ValueError(f"fit: validation: {error}") from None


def check_same_columns(data: Data, validation: Data) -> None:
    """Raise unless validation data is finite and has the columns of the data."""
    check_finite([validation])
    shapes = [
        [tuple(own.shape[1:]) for own in pytree.tree_leaves(pair) if isinstance(own, Tensor)]
        for pair in (data, validation)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(f"fit: samples of the data have the shapes {shapes[0]}, those of validation {shapes[1]}")


def check_learnable(data: Data) -> None:
    """Raise if noise cannot be told from the rest: one sample, or targets that are all the same."""
    inputs, targets = data
    if _batch.check_batch(inputs, targets) < 2:
        raise ValueError(
            "fit: one sample alone does not tell noise from the rest: pass more, or leave out validation= and "
            "weight_decay='evidence'"
        )
    if targets is not None and bool((targets == targets[:1]).all()):
        raise ValueError("fit: all targets are the same: there is nothing to learn from them")


def drawing(data: Any, convert: Conversion) -> Callable[[int], Data]:
    """draw(count) as it was given, with a pair that the model takes as its result."""

    def draw(count: int) -> Data:
        drawn = data(count)
        is_pair = not isinstance(drawn, Tensor)
        return convert(as_pair(drawn, f"draw({count}) must return a pair") if is_pair else (drawn, None))

    return draw
