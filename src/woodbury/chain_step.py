"""A step along a chain in the fewest operations: what `Rows` and `Displacement` compute, for this case alone.

The rows of layer l are the products of its inputs v (n, i) and the columns h (r, o) sent back to its outputs, so

    K = sum_l (v_l v_l^T + 1) * (h_l h_l^T)        p_l = -Hbar_l^T v_l,   Hbar_l (n, o) = sum over columns of c h_l
    z_l(theta + p) = W_l v + b_l - (v v_l^T + 1) Hbar_l

and no row, no p and no second product with the weights of the first layer is needed. A small step is bound by the
number of its operations: that is why this is written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from woodbury._vector import Vector
from woodbury.device.numbers import forced, keep
from woodbury.device.scalars import Truth, is_known, ones
from woodbury.layers.forms import own_product
from woodbury.linalg import full_precision
from woodbury.model.chain import ChainPass


class ChainRows:
    """The rows Z of a batch along a chain, for columns (m, k, C) of consecutive samples that cover all of it."""

    def __init__(self, made: ChainPass, segments: Sequence[Tensor]) -> None:
        self.made = made
        self.layout, self.grads = made.columns_back(segments)
        self._inner: Tensor | None = None  # v v^T + 1 of the first layer (n, n), kept for the trial pass

    def grams(self, dtype: torch.dtype | None, by_layer: bool) -> Tensor:
        """Z Z^T (r, r), or its terms (layers, r, r); accumulated in `dtype` if one is given."""
        terms: list[Tensor] = []
        with full_precision():
            for index, (inputs, grads) in enumerate(zip(self.made.given, self.grads, strict=True)):
                inner = _inner(inputs, inputs, self.made.chain.biases[index] is not None, dtype)
                if index == 0:
                    self._inner = inner
                outer = own_product(grads, dtype)
                spread = self.layout.spread(inner, self.layout)
                if by_layer or not terms:
                    terms.append(outer.mul_(spread))
                else:
                    terms[0].addcmul_(outer, spread)
        return torch.stack(terms) if by_layer else terms[0]

    def step(self, coefficients: Tensor) -> ChainDisplacement:
        """p = -Z^T c for coefficients c (r,), or (layers, r) to give each layer its own; after `grams`."""
        assert self._inner is not None
        if coefficients.dtype != self.grads[0].dtype:
            coefficients, self._inner = coefficients.to(self.grads[0].dtype), self._inner.to(self.grads[0].dtype)
        if coefficients.dim() == 2:
            contracted = [self.layout.contract(*pair) for pair in zip(coefficients, self.grads, strict=True)]
        else:
            if self.layout.is_plain:
                coefficients = coefficients.unsqueeze(1)
            contracted = [self.layout.contract(coefficients, grads) for grads in self.grads]
        return ChainDisplacement(self.made, contracted, self._inner)


class ChainDisplacement:
    """p along a chain, in factors. Everything but `dense` is to be called under torch.no_grad()."""

    def __init__(self, made: ChainPass, contracted: list[Tensor], inner: Tensor) -> None:
        self.made = made
        self.contracted = contracted  # Hbar (n, o) of each layer
        self.inner = inner

    def outputs(self) -> Tensor:
        """What the chain gives for the batch at theta + p."""
        made, chain = self.made, self.made.chain
        z = torch.addmm(made.sums[0], self.inner, self.contracted[0], alpha=-1)
        for index in range(1, len(chain.layers)):
            v, bias = chain.activate(index - 1, z), chain.biases[index]
            inner = _inner(v, made.given[index], bias is not None, None)
            z = F.linear(v, chain.weights[index], bias).addmm_(inner, self.contracted[index], alpha=-1)
        return z

    def dense(self) -> Vector:
        """p as a dictionary over all trainable parameters."""
        vector: Vector = {}
        for layer, inputs, contracted in zip(
            self.made.chain.layers, self.made.given, self.contracted, strict=True
        ):
            vector[layer.parameters["weight"]] = -(contracted.t() @ inputs)
            if "bias" in layer.parameters:
                vector[layer.parameters["bias"]] = -contracted.sum(0)
        return {name: vector[name] for name in self.made.plan.parameters}

    def add_(self, rates: Mapping[str, float | Tensor], accepted: Truth) -> None:
        """theta <- theta + rate p where accepted, rate by parameter name; without waiting for the device."""
        if is_known(accepted):
            if accepted:
                self._add_known(rates)
            return
        (kept,), chain = forced(accepted), self.made.chain
        for index, layer in enumerate(chain.layers):
            inputs, names, bias = keep(self.made.given[index], kept), layer.parameters, chain.biases[index]
            rate = rates[names["weight"]]
            # the rate is no alpha= here: in a recorded step it is a tensor, and both must round alike
            change = keep(self.contracted[index], kept, rate).t()
            chain.weights[index].addmm_(change, inputs, alpha=-1)
            if bias is not None:
                if rates[names["bias"]] is not rate:
                    change = keep(self.contracted[index], kept, rates[names["bias"]]).t()
                bias.addmv_(change, ones(inputs.shape[0], inputs.dtype, inputs.device), alpha=-1)

    def _add_known(self, rates: Mapping[str, float | Tensor]) -> None:
        chain, given = self.made.chain, self.made.given
        count = ones(given[0].shape[0], given[0].dtype, given[0].device)
        for index, layer in enumerate(chain.layers):
            change, names, bias = self.contracted[index].t(), layer.parameters, chain.biases[index]
            chain.weights[index].addmm_(change, given[index], alpha=-float(rates[names["weight"]]))
            if bias is not None:
                bias.addmv_(change, count, alpha=-float(rates[names["bias"]]))


def _inner(a: Tensor, b: Tensor, bias: bool, dtype: torch.dtype | None) -> Tensor:
    """a b^T + 1, (n, n'), or a b^T for a layer without bias."""
    if dtype is not None and dtype != a.dtype:
        a, b = a.to(dtype), b.to(dtype)
    return F.linear(a, b, ones(b.shape[0], b.dtype, b.device) if bias else None)
