"""The dense reference of a case: Jacobians by autograd, Hessians of torch's own loss, a dense solve in float64.

No code of woodbury's.
"""

import copy

import torch


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


class Dense:
    """Everything about a model on a batch, written out in float64 at the parameters it has now."""

    def __init__(self, case, model=None, names=None, random=None, dtype=torch.float64):
        """names are the parameters to train (all trainable ones by default); random a state to run with."""
        self.case = wide = case.to(dtype, model)
        self.model = wide.model
        self.run = case.forward or (lambda m, x: m(x))
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = (
            trainable if names is None else {name: trainable[name] for name in trainable if name in names}
        )
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
        numbers = outputs.reshape(-1)
        parameters = list(self.parameters.values())
        rows = []
        for number in numbers:
            grads = torch.autograd.grad(number, parameters, retain_graph=True, allow_unused=True)
            rows.append(
                flat([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)])
            )
        return torch.stack(rows).detach().reshape(len(outputs), -1, len(self.theta))

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
        size = outputs.numel()
        shape = outputs.shape
        point = outputs.reshape(-1).requires_grad_()
        (slope,) = torch.autograd.grad(self.value(point.reshape(shape), targets), point, create_graph=True)
        H = torch.zeros(size, size, dtype=torch.float64)
        if slope.requires_grad:
            for i in range(size):
                H[i] = torch.autograd.grad(slope[i], point, retain_graph=True)[0]
        J = J.reshape(size, -1)
        return times * (J.T @ H @ J)

    def over(self, parts, theta=None):
        """f and its gradient over several batches of samples together, at these parameters."""
        parameters = list(self.parameters.values())
        self.put(self.theta if theta is None else theta)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.before[name])
        if self.random is not None:
            torch.set_rng_state(self.random)
        outputs = torch.cat([self.run(self.model, self.case.inputs(index)) for index in parts])
        targets = None if self.case.targets is None else torch.cat([self.case.target(index) for index in parts])
        value = self.value(outputs, targets)
        grads = torch.autograd.grad(value, parameters, allow_unused=True)
        gradient = flat([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)])
        self.put(self.theta)
        return float(value.detach()), gradient

    def put(self, theta):
        with torch.no_grad():
            for p, value in zip(self.parameters.values(), self.unflatten(theta).values(), strict=True):
                p.copy_(value)

    def unflatten(self, vector):
        pieces = vector.split([p.numel() for p in self.parameters.values()])
        return {
            name: piece.reshape(p.shape) for (name, p), piece in zip(self.parameters.items(), pieces, strict=True)
        }

    def flatten(self, vector):
        return flat([vector[name].detach().double() for name in self.parameters])

    def block_mask(self):
        """(p, p): 1 where two parameters belong to the same module."""
        owners = [name.rpartition(".")[0] for name in self.parameters]
        number = {owner: float(i) for i, owner in enumerate(dict.fromkeys(owners))}
        ids = flat(
            [torch.full((p.numel(),), number[o]) for o, p in zip(owners, self.parameters.values(), strict=True)]
        )
        return (ids[:, None] == ids[None, :]).double()

    def spread(self, by_name):
        """One number per parameter entry, from one per parameter."""
        return flat(
            [torch.full((p.numel(),), float(by_name[n]), dtype=torch.float64) for n, p in self.parameters.items()]
        )


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
