"""Data sets by name: each is one function that returns training and test tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """A classification problem: standardised features and class indices."""

    train_inputs: Tensor  # (N, features)
    train_targets: Tensor  # (N,) int64
    test_inputs: Tensor
    test_targets: Tensor
    classes: int


DATASETS: dict[str, Callable[[], Dataset]] = {}


def dataset(name: str) -> Callable[[Callable[[], Dataset]], Callable[[], Dataset]]:
    """Enter the decorated function into `DATASETS`; the first line of its docstring describes it."""

    def enter(load: Callable[[], Dataset]) -> Callable[[], Dataset]:
        DATASETS[name] = load
        return load

    return enter


def standardise(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors with the training features moved to zero mean and unit variance.

    A feature that is constant in training has no scale to divide by: it is centred only.
    """
    mean = train.mean(dim=0)
    scale = train.std(dim=0, correction=0)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (train - mean) / scale, (test - mean) / scale


@dataset("digits")
def digits() -> Dataset:
    """Handwritten digits, 8 x 8 pixels, 1347 for training and 450 for testing (ships with scikit-learn)."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    # The split belongs to the data set, not to the run: its seed is the same for every run.
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, labels, test_size=450, stratify=labels, random_state=0
    )
    # Statistics in float64, so that a constant feature has a deviation of exactly zero.
    train_inputs, test_inputs = standardise(torch.from_numpy(train_x), torch.from_numpy(test_x))
    return Dataset(
        train_inputs=train_inputs.float(),
        train_targets=torch.from_numpy(train_y).long(),
        test_inputs=test_inputs.float(),
        test_targets=torch.from_numpy(test_y).long(),
        classes=10,
    )
