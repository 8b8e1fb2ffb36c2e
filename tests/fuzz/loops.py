"""Random training loops against the dense step."""

import copy

import torch


def dense_parameters(model, inputs, loss, damping):
    """The parameters after a Gauss-Newton step on loss(outputs), by autograd alone, and the condition of its system.

    B = J^T H J with the Hessian H of the loss at the outputs, whose negative eigenvalues count as zero.
    """
    model = copy.deepcopy(model)  # which nobody watches
    named = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(own):
        return torch.func.functional_call(model, own, (inputs,)).reshape(-1)

    y = outputs(named)
    shape = torch.func.functional_call(model, named, (inputs,)).shape
    jacobians = torch.func.jacrev(outputs)(named)
    J = torch.cat([jacobians[name].reshape(len(y), -1) for name in named], 1)
    value = lambda flat: loss(flat.reshape(shape))  # noqa: E731
    slope = torch.autograd.functional.jacobian(value, y.detach())
    H = torch.autograd.functional.hessian(value, y.detach())
    values, vectors = torch.linalg.eigh(H)
    B = J.T @ (vectors * values.clamp_min(0)) @ vectors.T @ J
    theta = torch.cat([own.reshape(-1) for own in named.values()])
    p = -torch.linalg.solve(B + damping * torch.eye(len(B)).to(B), J.T @ slope)
    return (theta + p).detach(), 1 + float(torch.linalg.eigvalsh(B)[-1]) / damping
