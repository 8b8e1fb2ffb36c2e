"""Models that torch.compile has compiled: a step runs them as they were written.

Compiled code cannot be looked into: its backward pass runs once, for one column, and what a step exchanges in a
layer to capture its input would be compiled anew at every step. Outside of a step the model stays compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from woodbury._process import ForAllThreads

# Inside, compiled modules and functions run as they were written.
uncompiled = ForAllThreads(lambda: torch.compiler.set_stance("force_eager"))


def written_model(model: Any) -> Any:
    """The module inside what torch.compile returns for it, and anything else as it is."""
    if isinstance(model, DistributedDataParallel):  # a step sums over processes by itself
        return written_model(model.module)
    inside = getattr(model, "_orig_mod", None) if type(model).__name__ == "OptimizedModule" else None
    return inside if isinstance(inside, nn.Module) else model


class WrittenCall:
    """What runs in place of a model's own call: as it was written where gradients are followed.

    So it does in a loop that compiles the model around the hooks of an optimizer, which could not see inside then.
    """

    def __init__(self, model: nn.Module) -> None:
        self._compiled = model._compiled_call_impl  # by model.compile()
        self._plain = model._call_impl
        self._written: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            if self._written is None:
                if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and its import takes seconds
                    return self._plain(*args, **kwargs)
                self._written = torch.compiler.disable(self._plain)
            return self._written(*args, **kwargs)
        return (self._compiled or self._plain)(*args, **kwargs)

    @staticmethod
    def put_on(model: nn.Module) -> None:
        """Let calls of the model be such."""
        vars(model)["_compiled_call_impl"] = WrittenCall(model)

    @staticmethod
    def take_off(model: nn.Module) -> None:
        """Undo `put_on`, unless the model was compiled since."""
        own = vars(model).get("_compiled_call_impl")
        if isinstance(own, WrittenCall):
            vars(model)["_compiled_call_impl"] = own._compiled


_Method = TypeVar("_Method", bound=Callable[..., Any])


def unhidden(method: _Method) -> _Method:
    """A method that torch hides from torch.compile: as it was written, where nothing is compiled yet.

    To hide it imports torch._dynamo, which takes as long as the import of torch.
    """
    written = getattr(method, "__wrapped__", method)

    @wraps(written)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (method if "torch._dynamo" in sys.modules else written)(*args, **kwargs)

    return cast(_Method, run)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled a module, in place or as another module around it."""
    own = module._compiled_call_impl
    own = own._compiled if isinstance(own, WrittenCall) else own
    return own is not None or type(module).__name__ == "OptimizedModule"


def run_as_written(
    forward: Callable[[nn.Module, Any], Tensor], has_compiled: Callable[[], bool | None]
) -> Callable[[nn.Module, Any], Tensor]:
    """forward(model, inputs) without compiled code, where the model has some."""

    @wraps(forward)
    def run(model: nn.Module, inputs: Any) -> Tensor:
        if not has_compiled():
            return forward(model, inputs)
        with uncompiled:
            return forward(model, inputs)

    return run
