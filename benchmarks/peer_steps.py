"""Steps of other libraries on the same network, as functions that move the parameters by p.

For a library that gives rows or a Gram matrix and no step, the rest of the step is here, as cheap as possible:
with the whole batch as S2 the gradient lies in the row space, g = U^T e / sqrt(n), so that

    p = -U^T (U U^T + lambda I)^{-1} e / sqrt(n)

needs no product with g. None of this uses woodbury's own code.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.common import Step


@dataclass(frozen=True)
class Task:
    """What a step needs: a network that it moves, the batch, and the damping lambda."""

    model: nn.Module
    loss: nn.Module  # CrossEntropyLoss or MSELoss, mean
    inputs: Tensor
    targets: Tensor
    damping: float

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def classes(self) -> bool:
        return isinstance(self.loss, nn.CrossEntropyLoss)


@dataclass(frozen=True)
class Peer:
    """A step of another library."""

    name: str
    make: Callable[[Task], Step]
    versus: str  # the optimizer of woodbury with the same p
    package: str | None = None  # its name for pip; None: torch itself
    squares_only: bool = False  # whether its p is another one for cross entropy


# -- torch alone, with all rows of U in memory --------------------------------------------------------------------


def _functional_gauss_newton(task: Task) -> Step:
    """U by vector-Jacobian products with the columns of S, by `vmap` over the samples."""

    def step() -> None:
        S, e = _factor(task)

        def rows(x: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
            def outputs(*parameters: Tensor) -> Tensor:
                return _call(task, parameters, x)

            pull = torch.func.vjp(outputs, *task.parameters)[1]
            return torch.func.vmap(pull)(columns.T)

        blocks = torch.func.vmap(rows)(task.inputs, S)
        _move_by_rows(task, [_as_matrix(block, 2) for block in blocks], 1 / math.sqrt(len(e)), e.flatten())

    return step


def _functional_natural_gradient(task: Task) -> Step:
    """U by `vmap(grad(loss))`, the recipe of torch's documentation."""

    def value(parameters: tuple[Tensor, ...], x: Tensor, target: Tensor) -> Tensor:
        return task.loss(_call(task, parameters, x).unsqueeze(0), target.unsqueeze(0))

    gradients = torch.func.vmap(torch.func.grad(value), in_dims=(None, 0, 0))

    def step() -> None:
        blocks = gradients(tuple(task.parameters), task.inputs, task.targets)
        n = len(task.inputs)
        _move_by_rows(task, [_as_matrix(block, 1) for block in blocks], 1 / math.sqrt(n), torch.ones(n))

    return step


# -- other libraries --------------------------------------------------------------------------------------------


def _levenberg_marquardt(task: Task) -> Step:
    """Its own training step, which evaluates the new loss. Its squares lack a factor 2: half the damping."""
    from torch_levenberg_marquardt import damping, loss, training

    module = training.LevenbergMarquardtModule(
        task.model,
        loss_fn=loss.MSELoss(),
        damping_strategy=damping.StandardDampingStrategy(task.damping / 2, dec_factor=1.0, inc_factor=1.0),
        learning_rate=1.0,
        attempts_per_step=1,
        solve_method="cholesky",  # the fastest of its three
    )
    return lambda: module.training_step(task.inputs, task.targets)


def _backpack_rows(task: Task, extension: str, attribute: str, leading: int) -> Callable[[], list[Tensor]]:
    """A function that returns the rows that an extension of BackPACK leaves on the parameters, as matrices."""
    from backpack import backpack, extend, extensions

    model, loss = extend(task.model), extend(type(task.loss)())

    def rows() -> list[Tensor]:
        model.zero_grad()
        with backpack(getattr(extensions, extension)()):
            loss(model(task.inputs), task.targets).backward()
        blocks = []
        for parameter in task.parameters:
            blocks.append(_as_matrix(getattr(parameter, attribute), leading))
            delattr(parameter, attribute)  # the next step needs the memory
        return blocks

    return rows


def _backpack_gauss_newton(task: Task) -> Step:
    """BackPACK gives U, divided by sqrt(n), the columns of S in front of the samples."""
    rows = _backpack_rows(task, "SqrtGGNExact", "sqrt_ggn_exact", leading=2)

    def step() -> None:
        _, e = _factor(task)
        _move_by_rows(task, rows(), 1.0, e.T.flatten())

    return step


def _backpack_natural_gradient(task: Task) -> Step:
    rows = _backpack_rows(task, "BatchGrad", "grad_batch", leading=1)
    n = len(task.inputs)

    def step() -> None:
        _move_by_rows(task, rows(), math.sqrt(n), torch.ones(n))  # a row is the gradient of a sample divided by n

    return step


def _asdl(task: Task) -> Step:
    from asdl.precondition import smw

    config = smw.SmwEmpNaturalGradientConfig(data_size=len(task.inputs), damping=task.damping)
    maker = smw.SmwEmpNaturalGradientMaker(task.model, config)

    def step() -> None:
        task.model.zero_grad()
        outputs = maker.setup_model_call(task.model, task.inputs)
        maker.setup_loss_call(nn.functional.cross_entropy if task.classes else _squares, outputs, task.targets)
        maker.forward_and_backward()
        _move(task, [own.grad for own in task.parameters if own.grad is not None])

    return step


def _curvlinops_conjugate_gradient(task: Task) -> Step:
    """Without a matrix, up to a relative residual of 1e-5 or 1000 iterations."""
    import curvlinops
    from curvlinops.examples import IdentityLinearOperator

    shapes = [tuple(parameter.shape) for parameter in task.parameters]

    def step() -> None:
        gradients = torch.autograd.grad(task.loss(task.model(task.inputs), task.targets), task.parameters)
        ggn = curvlinops.GGNLinearOperator(
            task.model, task.loss, task.parameters, [(task.inputs, task.targets)], check_deterministic=False
        )
        like = task.parameters[0]
        damped = ggn + task.damping * IdentityLinearOperator(shapes, like.device, like.dtype)
        inverse = curvlinops.CGInverseLinearOperator(damped, eps=0.0, tolerance=1e-5, max_iter=1000)
        _move(task, inverse @ list(gradients))

    return step


# -- parts of several steps ---------------------------------------------------------------------------------------


@torch.no_grad()
def _factor(task: Task) -> tuple[Tensor, Tensor]:
    """S (n, c, k) and e (n, k): S S^T is the Hessian of each sample's loss and S e its gradient."""
    outputs = task.model(task.inputs)
    n, c = outputs.shape
    if task.classes:
        probabilities = outputs.softmax(1)
        root = probabilities.sqrt()
        residual = probabilities - nn.functional.one_hot(task.targets, c).to(outputs)
        return torch.diag_embed(root) - probabilities.unsqueeze(2) * root.unsqueeze(1), residual / root
    scale = math.sqrt(2 / c)
    return scale * torch.eye(c).to(outputs).expand(n, c, c), 2 / c * (outputs - task.targets) / scale


def _call(task: Task, parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """The output for one sample."""
    names = [name for name, _ in task.model.named_parameters()]
    return torch.func.functional_call(task.model, dict(zip(names, parameters, strict=True)), (x.unsqueeze(0),))[0]


def _as_matrix(block: Tensor, leading: int) -> Tensor:
    """The rows of one parameter as a matrix; the first `leading` axes of `block` count the rows."""
    return block.detach().flatten(leading).flatten(0, leading - 1)


@torch.no_grad()
def _move_by_rows(task: Task, blocks: Sequence[Tensor], scale: float, e: Tensor) -> None:
    """Move the parameters by p for U = scale x blocks, the columns of each parameter, and g = U^T e / sqrt(n)."""
    K = blocks[0] @ blocks[0].T
    for block in blocks[1:]:
        K.addmm_(block, block.T)
    K.mul_(scale**2).diagonal().add_(task.damping)
    rhs = e.unsqueeze(1) / math.sqrt(len(task.inputs))
    coefficients = scale * torch.cholesky_solve(rhs, torch.linalg.cholesky(K)).squeeze(1)
    _move(task, [block.T @ coefficients for block in blocks])


@torch.no_grad()
def _move(task: Task, directions: Sequence[Tensor]) -> None:
    for parameter, direction in zip(task.parameters, directions, strict=True):
        parameter.sub_(direction.view_as(parameter))


def _squares(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    values = (outputs - targets).square().mean(1)
    return values if reduction == "none" else values.mean()


# -- all of them --------------------------------------------------------------------------------------------------

PEERS = (
    Peer("torch.func rows, GN", _functional_gauss_newton, "smw-gn"),
    Peer("torch.func gradients, NG", _functional_natural_gradient, "smw-ng"),
    Peer(
        "torch-levenberg-marquardt", _levenberg_marquardt, "smw-gn", "torch-levenberg-marquardt", squares_only=True
    ),
    Peer("BackPACK, SqrtGGNExact", _backpack_gauss_newton, "smw-gn", "backpack-for-pytorch"),
    Peer("BackPACK, BatchGrad", _backpack_natural_gradient, "smw-ng", "backpack-for-pytorch"),
    Peer("ASDL, SMW empirical NG", _asdl, "smw-ng", "asdfghjkl"),
    Peer("curvlinops, CG on the GGN", _curvlinops_conjugate_gradient, "smw-gn", "curvlinops-for-pytorch"),
)
