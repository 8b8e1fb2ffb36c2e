"""What `benchmarks.beside` runs once per version: a few steps of every optimizer on six tiny problems, in float64.

    PYTHONPATH=SRC python -m benchmarks.trajectories SRC FILE JSON

JSON is {"steps": numbers of steps, "only": names of problems, "starts": how many}, or {} to count operations.
It imports torch and the public names of woodbury alone, so that other commits can run it.
"""

import ast
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import woodbury
from benchmarks.common import chain

Settings = Mapping[str, Any]
_FEW_ROUNDINGS = 1e-15
NUMBERS = ("loss", "damping")  # of a StepInfo, compared beside the parameters


class Problem(NamedTuple):
    """A model with its loss, the batches that take turns, and what every optimizer and every step is given."""

    model: nn.Module
    loss: nn.Module
    batches: Sequence[tuple[Any, Any]]
    settings: Settings = MappingProxyType({})
    step: Settings = MappingProxyType({})


# -- problems -------------------------------------------------------------------------------------------------


def _classes(model: nn.Module, *shape: int, sizes: Sequence[int], **more: Settings) -> Problem:
    batches = [(torch.randn(size, *shape), torch.randint(5, (size,))) for size in sizes]
    return Problem(model, nn.CrossEntropyLoss(), batches, **more)


def mlp() -> Problem:
    """A chain of Linear layers; curvature from a part of each batch, always the same; a smaller last batch."""
    subset = {"subset": torch.tensor([1, 3, 4, 8, 9, 12, 14])}
    return _classes(chain(nn.Tanh, 6, 10, 8, 5), 6, sizes=(24, 24, 24, 17), step=subset)


def drawn() -> Problem:
    """The same where every step draws its curvature samples, or takes the whole batch."""
    return _classes(chain(nn.Tanh, 6, 10, 8, 5), 6, sizes=(24, 24, 24, 17), settings={"seed": 3})


def cnn() -> Problem:
    convolutions = (nn.Conv2d(1, 3, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 2), nn.Tanh())
    return _classes(nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16, 5)), 1, 8, 8, sizes=(12, 12, 9))


class _Tied(nn.Module):
    """The next token from the last; the head shares its weight with the embedding."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.embedding(tokens))))
        return logits.mT  # (n, classes, positions), as CrossEntropyLoss has it


def tokens() -> Problem:
    """Cross entropy per token, an embedding tied to the head."""
    batches = [(torch.randint(9, (6, 5)), torch.randint(9, (6, 5))) for _ in range(3)]
    return Problem(_Tied(9, 6), nn.CrossEntropyLoss(), batches)


def _residuals(laplacian: Callable[..., Any], model: nn.Module, points: Tensor) -> Tensor:
    value, gradient, bend = laplacian(model, points)
    return bend + value * gradient[..., 0] + torch.sin(3.0 * points[:, :1])


def equation(count: int) -> Problem:
    """Residuals of a differential equation at so many points, a row each; the model has 59 parameters."""
    settings = {"forward": partial(_residuals, woodbury.laplacian)}
    return Problem(
        chain(nn.Tanh, 2, 6, 5, 1), nn.MSELoss(), [(torch.rand(count, 2), None) for _ in range(3)], settings
    )


def regression() -> Problem:
    """One batch, whole."""
    inputs = torch.rand(60, 3)
    return Problem(chain(nn.Tanh, 3, 8, 8, 1), nn.MSELoss(), [(inputs, torch.sin(inputs.sum(1, keepdim=True)))])


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "mlp": mlp,
    "drawn": drawn,
    "cnn": cnn,
    "tokens": tokens,
    "equation-90": partial(equation, 90),
    "equation-30": partial(equation, 30),
    "memory": drawn,
    "search": regression,
}


# -- optimizers -----------------------------------------------------------------------------------------------


def _judged(problem: Problem) -> Settings:
    inputs = torch.rand(40, 3, generator=torch.Generator().manual_seed(5))
    return {"held_out": (inputs, torch.sin(inputs.sum(1, keepdim=True)))}


# Words of a case beside NAME=VALUE: made when needed, as other versions may lack their names.
SETTINGS: dict[str, Callable[[], Settings]] = {
    "relative": lambda: {"damping": woodbury.LevenbergMarquardt(initial=0.1, relative=True)},
    "search": lambda: {"search": woodbury.CurvedSearch()},
    "short-ladder": lambda: {
        "search": woodbury.CurvedSearch(rungs=(1e-1, 1e-3, 1e-5), bend=1e-3, first=None, deep=None)
    },
}
# What a word adds to every step.
STEPS: dict[str, Callable[[Problem], Settings]] = {
    "full": lambda problem: {"full": problem.batches},
    "held-out": _judged,
}
_PLAIN = ("GaussNewton", "NaturalGradient")
_BLOCKS = ("GaussNewton blocks='layer'", "NaturalGradient blocks='layer'")
_EQUATION = (*_PLAIN, "GaussNewton damping=0.01", "GaussNewton relative", "GaussNewton momentum=0.9")
# By problem: an optimizer and its settings.
CASES: dict[str, Sequence[str]] = {
    "mlp": (
        *_PLAIN,
        *_BLOCKS,
        *("GaussNewton relative", "GaussNewton damping=0.1", "GaussNewton weight_decay=0.01"),
        *("GaussNewton momentum=0.9", "GaussNewton momentum=0.9 weight_decay=0.01"),
        *("GaussNewton momentum=0.9 blocks='layer'", "GaussNewton solver='cg'", "GaussNewton solver='products'"),
        *("GaussNewton accept=0.1 full", "NaturalGradient weight_decay=0.01", "NaturalGradient momentum=0.9"),
        *("NaturalGradient relative", "NaturalGradient accept=0.1 full", "HessianFree", "KFAC"),
    ),
    "drawn": (
        *("GaussNewton curvature_samples=7", "GaussNewton", "NaturalGradient curvature_samples=0.5"),
        *("HessianFree curvature_samples=7", "KFAC curvature_samples=7"),
    ),
    "cnn": (*_PLAIN, *_BLOCKS, "GaussNewton momentum=0.9"),
    "tokens": (*_PLAIN, "GaussNewton momentum=0.9"),
    "equation-90": _EQUATION,
    "equation-30": _EQUATION,
    "memory": (
        *("GaussNewton memory=3", "GaussNewton metric='adam'", "GaussNewton metric='diagonal'"),
        *("GaussNewton memory=3 metric='adam'", "GaussNewton memory=3 metric='adam' momentum=0.9"),
        *("GaussNewton memory=3 metric='diagonal' momentum=0.9",),
        *("NaturalGradient memory=3 metric='adam' momentum=0.9",),
    ),
    "search": (
        *("GaussNewton search", "GaussNewton search held-out"),
        *("GaussNewton short-ladder", "GaussNewton short-ladder held-out"),
        *("GaussNewton search metric='diagonal'", "GaussNewton search metric='diagonal' held-out"),
    ),
}


def read_settings(words: Sequence[str]) -> Settings:
    """The settings of an optimizer that these words of a case stand for."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            found[name] = ast.literal_eval(value)
        elif name in SETTINGS:
            found |= SETTINGS[name]()
    return found


# -- runs -----------------------------------------------------------------------------------------------------


def run(problem_name: str, case: str, steps: Sequence[int], start: int = 0) -> dict[str, Any]:
    """{"steps": {number of steps: {"parameters" or one of NUMBERS: values}}, "size": ..., "condition": ...}.

    size and condition are those of the bound in `benchmarks.beside`; the many dampings of a search leave the
    condition open, as 1. Every start but 0 is a few roundings away from it: all later rounding errors differ.
    """
    torch.manual_seed(0)
    problem = PROBLEMS[problem_name]()
    if start:
        _perturb(problem.model, torch.Generator().manual_seed(start))
    kind, *words = case.split()
    settings: Settings = {**problem.settings, **read_settings(words)}
    optimizer = getattr(woodbury, kind)(problem.model, problem.loss, **settings)
    more = dict(problem.step)
    for word in STEPS.keys() & set(words):
        more |= STEPS[word](problem)
    K = _gram(problem, kind)
    size = len(K) + sum(parameter.numel() for parameter in problem.model.parameters())
    result: dict[str, Any] = {"size": size, "condition": 1.0, "steps": {}}
    for step in range(max(steps)):
        info = optimizer.step(*problem.batches[step % len(problem.batches)], **more).as_dict()
        if step == 0 and "search" not in settings:
            result["condition"] = 1.0 + float(torch.linalg.eigvalsh(K)[-1]) / info["damping"]
        if step + 1 in steps:
            parameters = {key: value.detach().clone() for key, value in problem.model.named_parameters()}
            result["steps"][step + 1] = {"parameters": parameters, **{name: info[name] for name in NUMBERS}}
    return result


@torch.no_grad()
def _perturb(model: nn.Module, draws: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.0 + _FEW_ROUNDINGS * torch.randn(parameter.shape, generator=draws))


def _gram(problem: Problem, kind: str) -> Tensor:
    """K of the first batch."""
    curvature = "empirical" if kind == "NaturalGradient" else "gauss-newton"
    forward = problem.settings.get("forward")
    rows = woodbury.rows(problem.model, problem.loss, *problem.batches[0], curvature=curvature, forward=forward)
    return rows.gram()


def run_all(steps: Sequence[int], only: Sequence[str], start: int) -> dict[tuple[str, str], Any]:
    """{(problem, optimizer): what `run` returns, or {"error": text} where this version cannot}."""
    results: dict[tuple[str, str], Any] = {}
    for name in only or PROBLEMS:
        for case in CASES[name]:
            try:
                results[name, case] = run(name, case, steps, start)
            except Exception as error:
                results[name, case] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return results


# -- operations -----------------------------------------------------------------------------------------------

OPERATIONS = {"plain": "", "momentum": "momentum=0.9", "search": "search"}
OPERATIONS["memory, adam, momentum"] = "memory=3 metric='adam' momentum=0.9"


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def count_operations(settings: str) -> int | None:
    """Of aten, in the fifth step of GaussNewton on 8-50-50-1 with 64 samples; None where this version cannot."""
    torch.manual_seed(0)
    model, inputs, targets = chain(nn.Tanh, 8, 50, 50, 1), torch.randn(64, 8), torch.randn(64, 1)
    try:
        optimizer = woodbury.GaussNewton(model, nn.MSELoss(), **read_settings(settings.split()))
    except (TypeError, AttributeError):  # an argument, or a name, that is not there
        return None
    for _ in range(4):
        optimizer.step(inputs, targets)
    with _Counter() as counter:
        optimizer.step(inputs, targets)
    return counter.count


# -- the command ----------------------------------------------------------------------------------------------


def main(source: str, file: str, asked: str) -> None:
    if not Path(woodbury.__file__).resolve().is_relative_to(Path(source).resolve()):
        raise SystemExit(f"woodbury comes from {woodbury.__file__}, not from {source}")
    torch.set_default_dtype(torch.float64)
    wanted = json.loads(asked)
    if wanted:
        steps, only = wanted["steps"], wanted["only"]
        torch.save([run_all(steps, only, start) for start in range(wanted["starts"])], file)
    else:
        torch.save({name: count_operations(settings) for name, settings in OPERATIONS.items()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
