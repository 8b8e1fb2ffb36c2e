"""Dense references by plain autograd, one sample and one output at a time. No code of woodbury's."""

import copy

import torch
from torch import nn


def parameters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def theta(model):
    """The trainable parameters as one vector, a copy."""
    return flat([p.detach() for p in parameters(model).values()])


def one(inputs, i):
    """Sample i as a batch of one."""
    return chosen(inputs, [i])


def chosen(inputs, subset):
    """Some samples of a batch: a tensor, or a dictionary or tuple of tensors."""
    if isinstance(inputs, dict):
        return {name: value[subset] for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(value[subset] for value in inputs)
    return inputs[subset]


def value_of(loss, outputs, targets):
    """The loss module's own value; GaussianNLLLoss finds its variances beside the targets."""
    if isinstance(loss, nn.GaussianNLLLoss):
        return loss(outputs, targets[:, 0], targets[:, 1])
    return loss(outputs, targets)


def loss_of(model, data, loss=None):
    """Of all samples, mean squares unless another is given; in evaluation mode."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        value = (loss or nn.MSELoss())(model(data[0]), data[1]).item()
    model.train(was_training)
    return value


def is_sum(loss):
    return getattr(loss, "reduction", "mean") == "sum"


def loss_derivatives(loss, outputs, targets):
    """Gradients (n, C) and Hessians (n, C, C) of a loss in the outputs of each sample, C numbers in a sample.

    One output of all samples at a time: no term of the loss depends on the outputs of two samples. NLLLoss has the
    Hessians of the cross entropy; HuberLoss, SmoothL1Loss and L1Loss the weights rho'(d) / d of iteratively
    reweighted least squares, d = y - t; for L1Loss, 1 / |d| with |d| at least 1e-4 |t| + eps.
    """
    point = outputs.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(value_of(loss, point, targets), point)
    slopes = slope.flatten(1) if slope.dim() > 1 else slope.unsqueeze(1)
    if isinstance(loss, nn.HuberLoss | nn.SmoothL1Loss | nn.L1Loss):
        difference = (point.detach() - targets).reshape(slopes.shape)
        weights = slopes / difference
        if isinstance(loss, nn.L1Loss) or getattr(loss, "beta", 1) == 0:
            floor = 1e-4 * targets.reshape(slopes.shape).abs() + torch.finfo(slopes.dtype).eps
            weights = weights * (difference.abs() / floor).clamp(max=1)
        return slopes, torch.diag_embed(weights)
    if isinstance(loss, nn.NLLLoss):
        loss = nn.CrossEntropyLoss(loss.weight, ignore_index=loss.ignore_index, reduction=loss.reduction)
    (curved,) = torch.autograd.grad(value_of(loss, point, targets), point, create_graph=True)
    if not curved.requires_grad:
        return slopes, slopes.new_zeros(*slopes.shape, slopes.shape[1])
    rows = [
        torch.autograd.grad(number.sum(), point, retain_graph=True)[0].reshape(slopes.shape)
        for number in curved.reshape(slopes.shape).unbind(1)
    ]
    return slopes, torch.stack(rows, 1)


def rows_of(outputs, params):
    """The gradient of each number among the outputs, one after the other."""
    numbers = outputs.reshape(-1)
    rows = [torch.autograd.grad(own, params, retain_graph=True, materialize_grads=True) for own in numbers]
    return torch.stack([flat(row) for row in rows])


def jacobians(model, inputs, samples, forward=None):
    """(C, p) of the outputs of each sample, one sample at a time."""
    params, run = list(parameters(model).values()), forward or (lambda m, x: m(x))
    return [rows_of(run(model, one(inputs, i)), params) for i in range(samples)]


def of_squares(errors, weights, params):
    """B and g of sum_t w_t mean e_t^2, with H = 2."""
    B, g = 0.0, 0.0
    for error, weight in zip(errors, weights, strict=False):
        rows, share = rows_of(error, params), 2 * weight / error.numel()
        B, g = B + share * rows.T @ rows, g + share * error.detach().reshape(-1) @ rows
    return B, g


def per_sample(model, loss, inputs, targets, forward=None):
    """For each sample: Jacobian (C, p), gradient (C,) and Hessian (C, C) of its loss in its outputs.

    A sample's loss is its share of the batch's, times the number of samples: the mean over them is the loss of
    the batch, whatever that divides by. Of a loss that is a sum it is the share itself.
    """
    times = 1 if is_sum(loss) else len(targets)
    outputs = model(inputs) if forward is None else forward(model, inputs)
    slopes, hessians = loss_derivatives(loss, outputs, targets)
    rows = jacobians(model, inputs, len(targets), forward)
    return list(zip(rows, times * slopes, times * hessians, strict=True))


def gradient(model, loss, inputs, targets, forward=None):
    run = forward or (lambda m, x: m(x))
    params = list(parameters(model).values())
    return flat(torch.autograd.grad(value_of(loss, run(model, inputs), targets), params, materialize_grads=True))


def residual_condition(model, loss, inputs, targets):
    """How many eps the largest residual may err by: it is a difference of numbers up to 1."""
    outputs = model(inputs).detach().requires_grad_()
    (slope,) = torch.autograd.grad(value_of(loss, outputs, targets), outputs)
    largest = slope.abs().max() * (1 if is_sum(loss) else len(targets))
    return max(1.0, float(1 / largest))


def curvature_matrix(samples, kind):
    """B = (1/n) sum J^T H J, or (1/n) sum g g^T."""
    if kind == "gauss-newton":
        return sum(J.T @ H @ J for J, _, H in samples) / len(samples)
    return sum(torch.outer(J.T @ r, J.T @ r) for J, r, _ in samples) / len(samples)


def block_mask(named):
    """(p, p) of parameters by name: 1 where two of them belong to the same module."""
    modules = [name.rpartition(".")[0] for name in named]
    owners = [torch.full((p.numel(),), modules.index(m)) for m, p in zip(modules, named.values(), strict=True)]
    owners = torch.cat(owners)
    return (owners[:, None] == owners[None, :]).double()


def dense_system(model, loss, inputs, targets, subset, forward=None):
    """A function that solves for p with the curvature of the subset: its Jacobians are computed once for many p.

    It returns argmin_p g.p + p B p / 2 + W (theta.p + p.p/2) + damping |p - shift|^2 / 2, B and g, all dense, for
    (damping, kind, blocks, decay W, shift); damping may be a function of B.
    """
    samples = per_sample(model, loss, chosen(inputs, subset), targets[subset], forward)
    g = gradient(model, loss, inputs, targets, forward)
    start = theta(model)

    def solve(damping, kind, blocks="full", decay=None, shift=None):
        B = curvature_matrix(samples, kind) * (len(targets) if is_sum(loss) else 1)
        if blocks == "layer":
            B = B * block_mask(parameters(model)).to(B)
        strength = damping(B) if callable(damping) else damping
        W = torch.zeros_like(start) if decay is None else decay
        q = torch.zeros_like(start) if shift is None else shift
        return torch.linalg.solve(B + torch.diag(W + strength), strength * q - g - W * start), B, g

    return solve


def dense_direction(model, loss, inputs, targets, subset, *settings, forward=None, **more):
    """p, B and g of one `dense_system`, with the settings that its function takes."""
    return dense_system(model, loss, inputs, targets, subset, forward)(*settings, **more)


def equation_6(samples, g, damping):
    """p by the paper's (6): G^-1 = (I - J^T D^-1 J / N2) / lam, D = lam H^-1 + J J^T / N2, as printed."""
    n = len(samples)
    J = torch.cat([j for j, _, _ in samples])
    H = torch.block_diag(*[h for _, _, h in samples])
    D = damping * torch.linalg.inv(H) + J @ J.T / n
    return -(g - J.T @ torch.linalg.solve(D, J @ g) / n) / damping


def equation_7(samples, g, damping):
    """p by the paper's (7): G^-1 = (I - J^T H D^-1 J / N2) / lam, D = lam I + J J^T H / N2, as printed."""
    n = len(samples)
    J = torch.cat([j for j, _, _ in samples])
    H = torch.block_diag(*[h for _, _, h in samples])
    D = damping * torch.eye(len(J), dtype=J.dtype) + J @ J.T @ H / n
    return -(g - J.T @ H @ torch.linalg.solve(D, J @ g) / n) / damping


class PlainNorm(nn.LayerNorm):
    """In plain arithmetic: third derivatives of a layer norm by reverse mode are wrong in torch 2.13."""

    def forward(self, x):
        apart = x - x.mean(-1, keepdim=True)
        return apart * (apart.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


def written_out(model):
    """A copy with layer norms in plain arithmetic."""
    model = copy.deepcopy(model)
    for own in model.modules():
        if type(own) is nn.LayerNorm:
            own.__class__ = PlainNorm
    return model


def relative_error(a, b):
    return float((a - b).norm() / b.norm())


def model_error(a, b):
    """|a - b| / |b| of the parameters of two models."""
    return relative_error(*(flat([own.detach() for own in model.parameters()]) for model in (a, b)))
