"""The dense reference of a case: Jacobians by autograd, Hessians of torch's own loss, a dense solve in float64.

No code of woodbury's.
"""

import copy

import torch

from tests.reference import flat, rows_of


class Dense:
    """Everything about a model on a batch, written out in float64 at the parameters it has now."""

    def __init__(self, case, model=None, names=None, random=None, dtype=torch.float64):
        """names are the parameters to train (all trainable ones by default); random a state to run with."""
        self.case = wide = case.to(dtype, model)
        self.model = wide.model
        self.run = case.forward or (lambda m, x: m(x))
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = {name: p for name, p in trainable.items() if names is None or name in names}
        self.theta = flat([p.detach() for p in self.parameters.values()])
        self.before = {name: b.clone() for name, b in self.model.named_buffers()}
        self.random = random
        self.loss = wide.loss
        self.index = torch.arange(wide.n)
        self.targets = wide.target(self.index)
        self.outputs = self.forward(self.index)
        self.n = len(self.outputs)
        self.J = self.jacobian(self.outputs)
        self.buffers = {name: b.clone() for name, b in self.model.named_buffers()}

    def forward(self, index):
        if self.random is not None:
            torch.set_rng_state(self.random)
        return self.run(self.model, self.case.inputs(index))

    def jacobian(self, outputs):
        """(n, C, p), one output after the other."""
        return rows_of(outputs, list(self.parameters.values())).reshape(len(outputs), -1, len(self.theta))

    def value(self, outputs, targets):
        return self.loss(outputs, self.fit_targets(outputs, targets))

    def fit_targets(self, outputs, targets):
        if targets is None:
            return torch.zeros_like(outputs)
        if isinstance(self.loss, torch.nn.CrossEntropyLoss):
            return targets.to(outputs.dtype) if targets.is_floating_point() else targets.long()
        return targets.to(outputs.dtype)

    def slope(self, outputs, targets):
        """The gradient of the loss in the outputs."""
        point = outputs.detach().requires_grad_()
        return torch.autograd.grad(self.value(point, targets), point)[0]

    def curvature(self, kind, subset, of):
        """B of these samples; of a sum over `of` samples, if that is what the loss is."""
        is_sum = getattr(self.loss, "reduction", "mean") == "sum"
        times = of / len(subset) if is_sum else 1
        outputs = self.outputs.detach()[subset]
        targets = None if self.targets is None else self.targets[subset]
        J = self.J[subset]
        if kind == "empirical":
            G = torch.einsum("nc,ncp->np", self.slope(outputs, targets).reshape(len(subset), -1), J)
            return G.T @ G * (times if is_sum else len(subset))
        H = torch.autograd.functional.hessian(lambda y: self.value(y, targets), outputs)
        H, J = H.reshape(outputs.numel(), -1), J.reshape(outputs.numel(), -1)
        return times * (J.T @ H @ J)

    def over(self, parts, theta=None):
        """f and its gradient over several batches of samples together, at these parameters."""
        self.put(self.theta if theta is None else theta)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.before[name])
        if self.random is not None:
            torch.set_rng_state(self.random)
        outputs = torch.cat([self.run(self.model, self.case.inputs(index)) for index in parts])
        targets = None if self.case.targets is None else torch.cat([self.case.target(index) for index in parts])
        value = self.value(outputs, targets)
        gradient = rows_of(value, list(self.parameters.values()))[0]
        self.put(self.theta)
        return float(value.detach()), gradient

    def put(self, theta):
        with torch.no_grad():
            for p, value in zip(self.parameters.values(), self.unflatten(theta).values(), strict=True):
                p.copy_(value)

    def unflatten(self, vector):
        pieces = vector.split([p.numel() for p in self.parameters.values()])
        pairs = zip(self.parameters.items(), pieces, strict=True)
        return {name: piece.reshape(p.shape) for (name, p), piece in pairs}

    def flatten(self, vector):
        return flat([vector[name].detach().double() for name in self.parameters])

    def spread(self, by_name):
        """One number per parameter entry, from one per parameter."""
        sizes = {name: p.numel() for name, p in self.parameters.items()}
        return flat([torch.full((n,), float(by_name[name]), dtype=torch.float64) for name, n in sizes.items()])


def solve(B, g, damping, decay, theta, shift):
    """argmin_p g.p + p B p / 2 + W (theta.p + p.p / 2) + damping |p - shift|^2 / 2."""
    matrix = B + torch.diag(decay + damping)
    return torch.linalg.solve(matrix, damping * shift - g - decay * theta)


def dense_parameters(model, inputs, loss, damping):
    """The parameters after a Gauss-Newton step on loss(outputs), by autograd alone, and the condition of it.

    B = J^T H J with the Hessian H of the loss at the outputs, whose negative eigenvalues count as zero.
    """
    model = copy.deepcopy(model)  # which nobody watches
    named = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(own):
        return torch.func.functional_call(model, own, (inputs,))

    shape = outputs(named).shape
    y = outputs(named).detach().flatten()
    jacobians = torch.func.jacrev(lambda own: outputs(own).flatten())(named)
    J = torch.cat([jacobians[name].reshape(len(y), -1) for name in named], 1)

    def value(flat):
        return loss(flat.reshape(shape))

    slope = torch.autograd.functional.jacobian(value, y)
    H = torch.autograd.functional.hessian(value, y)
    values, vectors = torch.linalg.eigh(H)
    B = J.T @ (vectors * values.clamp_min(0)) @ vectors.T @ J
    theta = torch.cat([own.reshape(-1) for own in named.values()])
    p = -torch.linalg.solve(B + damping * torch.eye(len(B), dtype=B.dtype), J.T @ slope)
    return (theta + p).detach(), 1 + float(torch.linalg.eigvalsh(B)[-1]) / damping
