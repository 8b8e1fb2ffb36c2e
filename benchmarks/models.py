"""The time of a step relative to `torch.optim.Adam` on the same batch, for models of sequences.

Each has something that once had no rule: a bare position parameter, with dropout, and recurrent layers. One goes
through the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.common import Batch, Command, Step, add_quick, loop_step, medians_within, ratio_table
from woodbury.optim import NaturalGradient

_WORDS, _LENGTH, _WIDTH, _SAMPLES = 65, 64, 64, 64
_STEPS, _FEATURES, _CLASSES = 32, 16, 10  # of the recurrent models


class Transformer(nn.Module):
    """Characters in, the next ones out: two layers, four heads, dropout 0.1, a bare position parameter."""

    def __init__(self, weight_norm: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(_LENGTH, _WIDTH))
        block = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        head = nn.Linear(_WIDTH, _WORDS)
        self.head = parametrizations.weight_norm(head) if weight_norm else head

    def forward(self, inputs: Tensor) -> Any:
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.blocks(self.words(inputs) + self.places[:length], mask=mask, is_causal=True)
        return self.head(hidden).transpose(1, 2)


class Recurrent(nn.Module):
    """The output of a recurrent layer at the last time step, through a Linear layer."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.inner = kind(inputs, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.inner(inputs)[0][:, -1])


def _texts() -> Batch:
    text = torch.randint(_WORDS, (_SAMPLES, _LENGTH + 1))
    return text[:, :-1], text[:, 1:].contiguous()


def _signals() -> Batch:
    return torch.randn(_SAMPLES, _STEPS, _FEATURES), torch.randint(_CLASSES, (_SAMPLES,))


# how to build it, its batch, and settings of the optimizer
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], dict[str, Any]]] = {
    "transformer": (Transformer, _texts, {}),
    "LSTM": (partial(Recurrent, nn.LSTM, _FEATURES, _WIDTH, _CLASSES), _signals, {}),
    "GRU": (partial(Recurrent, nn.GRU, _FEATURES, _WIDTH, _CLASSES), _signals, {}),
    "transformer, head by the fallback": (partial(Transformer, True), _texts, {"fallback": "autograd"}),
}


def bench_models(quick: bool = False) -> dict[str, dict[str, float]]:
    """{model: {optimizer: median CPU seconds of a step}}, the two taking turns."""
    loss = nn.CrossEntropyLoss()
    result = {}
    for name, (build, draw, settings) in MODELS.items():
        torch.manual_seed(0)
        batch, model, own = draw(), build(), NaturalGradient(build(), loss, **settings)
        adam = loop_step(torch.optim.Adam(model.parameters(), lr=1e-3), model, loss, batch)
        steps: dict[str, Step] = {"Adam": adam, "NaturalGradient": partial(own.step, *batch)}
        for step in steps.values():
            step()  # the first of a model makes its plan, and looks whether samples mix
        result[name] = medians_within(steps, 0.0 if quick else 20.0)
    return result


COMMAND = Command(
    "steps on a transformer with a bare parameter and dropout, an LSTM and a GRU beside Adam's (2 minutes)",
    lambda options: bench_models(options.quick),
    partial(ratio_table, "CPU milliseconds of a step"),
    add_quick,
)
