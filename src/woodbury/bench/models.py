"""The time of a step relative to `torch.optim.Adam` on the same batch, for models of sequences.

Each has something that once had no rule: a bare position parameter, with dropout, and recurrent layers. One goes
through the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from woodbury.bench.timing import Step, medians_within
from woodbury.optim import NaturalGradient

REFERENCE, OWN = "Adam", "NaturalGradient"


@dataclass(frozen=True)
class Sizes:
    """Of the models and batches."""

    words: int = 65
    length: int = 64
    width: int = 64
    samples: int = 64
    steps: int = 32  # of recurrent layers
    features: int = 16


class Transformer(nn.Module):
    """Characters in, the next ones out: two layers, four heads, dropout 0.1, a bare position parameter."""

    def __init__(self, sizes: Sizes, weight_norm: bool = False) -> None:
        super().__init__()
        width = sizes.width
        self.words = nn.Embedding(sizes.words, width)
        self.places = nn.Parameter(0.02 * torch.randn(sizes.length, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        head = nn.Linear(width, sizes.words)
        self.head = parametrizations.weight_norm(head) if weight_norm else head

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.blocks(self.words(inputs) + self.places[:length], mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden).transpose(1, 2)
        return logits


class Recurrent(nn.Module):
    """A recurrent layer, and a class read at the last step."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], sizes: Sizes, classes: int = 10) -> None:
        super().__init__()
        self.inner = kind(sizes.features, sizes.width, batch_first=True)
        self.head = nn.Linear(sizes.width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(inputs)[0][:, -1])
        return logits


def _texts(sizes: Sizes) -> tuple[Tensor, Tensor]:
    text = torch.randint(sizes.words, (sizes.samples, sizes.length + 1))
    return text[:, :-1], text[:, 1:].contiguous()


def _signals(sizes: Sizes) -> tuple[Tensor, Tensor]:
    return torch.randn(sizes.samples, sizes.steps, sizes.features), torch.randint(10, (sizes.samples,))


Build = Callable[[Sizes], nn.Module]
Draw = Callable[[Sizes], tuple[Tensor, Tensor]]
MODELS: dict[str, tuple[Build, Draw, dict[str, Any]]] = {  # with settings of the optimizer
    "transformer": (Transformer, _texts, {}),
    "LSTM": (lambda sizes: Recurrent(nn.LSTM, sizes), _signals, {}),
    "GRU": (lambda sizes: Recurrent(nn.GRU, sizes), _signals, {}),
    "transformer, head by the fallback": (
        lambda sizes: Transformer(sizes, weight_norm=True),
        _texts,
        {"fallback": "autograd"},
    ),
}


def bench_models(quick: bool = False, seconds: float = 20.0) -> dict[str, dict[str, float]]:
    """{model: {optimizer: median CPU seconds of a step}}, the two taking turns."""
    sizes = Sizes(words=5, length=3, width=4, samples=3, steps=2, features=2) if quick else Sizes()
    result = {}
    for name, (build, draw, settings) in MODELS.items():
        torch.manual_seed(0)
        batch = draw(sizes)
        steps = {REFERENCE: _adam_step(build(sizes), *batch), OWN: _own_step(build(sizes), *batch, **settings)}
        for step in steps.values():
            step()  # the first of a model makes its plan, and looks whether samples mix
        result[name] = medians_within(steps, 0.0 if quick else seconds, 200)
    return result


def _adam_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def _own_step(model: nn.Module, inputs: Tensor, targets: Tensor, **settings: Any) -> Step:
    optimizer = NaturalGradient(model, nn.CrossEntropyLoss(), **settings)
    return lambda: optimizer.step(inputs, targets)
