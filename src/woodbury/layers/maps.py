"""Attention and recurrent layers: their parameters act through linear maps inside their forward pass.

Each z = W v + b inside them, at every position, is a use of all or part of the weights, and is reported. Attention
runs torch's own forward pass, with all its options, in which `watch_linear_maps` sees the calls of `F.linear`. An
LSTM, GRU or RNN has two linear maps shared by all time steps:

    z_t = W_ih x_t + b_ih,   y_t = W_hh h_{t-1} + b_hh,   h_t = a function of z_t, y_t and the state before

The rows of W_ih and b_ih are those of a linear map on the sequence x, with the gradients in z_t as columns; those
of W_hh and b_hh the same on the sequence h_{t-1}, with the gradients in y_t. Where h_t depends on z_t + y_t alone
(LSTM, RNN) these are the same. In a GRU the last third enters as r y, so that its gradient in y is r times that in
z. torch's own forward pass shows no z: the pass is run here step by step, with the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from woodbury._process import ForAllThreads
from woodbury.layers.positions import own_outputs
from woodbury.layers.rules import WEIGHT_AND_BIAS, rule_of, sequence_rows
from woodbury.layers.shared import SharedRows
from woodbury.layers.sums import Place, whole_parameter

# Inside, attention is computed by kernels that can be differentiated twice, and mapped: torch's fused ones cannot.
plain_attention = ForAllThreads(lambda: sdpa_kernel(SDPBackend.MATH))

PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_MAX_LAYERS = 64  # of one recurrent module; more take the fallback
_IN_LAYERS = [
    f"{name}_l{layer}{way}"
    for name in (*NAMES, "weight_hr")  # the last: projections, refused when the layer is called
    for layer in range(_MAX_LAYERS)
    for way in ("", "_reverse")
]

# Takes a use of W and b during a pass: v and z = W v + b, (n, t, features) each, and the places of W and b, or
# None; if gradients in z are to be multiplied by a factor, this too.
Report = Callable[..., None]
State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM


@rule_of(nn.MultiheadAttention, parameters=PROJECTIONS)
@rule_of(nn.LSTM, nn.GRU, nn.RNN, parameters=_IN_LAYERS)
@rule_of(nn.LSTMCell, nn.GRUCell, nn.RNNCell, parameters=NAMES)
def maps_inside(layer: nn.Module, inputs: Tensor, grads: Tensor) -> Any:
    """Mark the layer: its rows are those of the linear maps inside it."""
    raise AssertionError(f"the rows of {type(layer).__name__} come from the linear maps inside it")


def rows_of_map(
    places: Collection[str], factor: Tensor | None, layer: nn.Module, inputs: Tensor, grads: Tensor
) -> SharedRows:
    """The rule for z = W v + b inside a layer, with these of W and b and a factor on the gradients in z."""
    weight, bias = (name if name in places else None for name in WEIGHT_AND_BIAS)
    grads = grads if factor is None else grads * factor.unsqueeze(1)
    return sequence_rows(inputs, grads, torch.Size((grads.shape[-1], inputs.shape[-1])), weight, bias)


def projects_out(module: nn.Module, trained: Collection[int]) -> bool:
    """Whether a module is attention that uses parameters of its `out_proj`, some of them trained (given by id)."""
    if not isinstance(module, nn.MultiheadAttention):
        return False
    return any(id(parameter) in trained for parameter in module.out_proj._parameters.values())


def watch_linear_maps(
    forward: Callable[..., Any], samples: int, names: Mapping[int, str], report: Report
) -> Callable[..., Any]:
    """`forward` of attention, whose every z = F.linear(v, W, b) also calls report(v, z, places of W and b).

    names: id of a trainable parameter -> its name. v and z have samples first; torch passes tensors (positions, n,
    features), or (positions n, features). Calls with other weights are not reported. torch's functions are copied
    to see a linear map of ours in place of `F.linear`, so that nothing is exchanged for the rest of the program.
    """

    def place(tensor: Tensor | None) -> Place | None:
        """The place of a tensor in a trainable parameter, or None."""
        whole = tensor if tensor is None or id(tensor) in names else tensor._base
        if tensor is None or whole is None or id(whole) not in names:
            return None
        start = (tensor.storage_offset() - whole.storage_offset()) // whole.stride(0)
        return Place(names[id(whole)], start, tensor.shape[0])

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        places = place(weight), place(bias)
        flat = input.dim() == 2
        if places == (None, None) or (flat and len(input) % samples):  # the second has no sample axis
            return F.linear(input, weight, bias)
        inputs = (input.unflatten(0, (-1, samples)) if flat else input).transpose(0, 1)  # (n, positions, features)
        outputs = F.linear(inputs, weight, bias)
        if 1 in outputs.shape[:2]:  # nothing is copied below, and the caller may change what it gets in place
            outputs = own_outputs(outputs)
        report(inputs, outputs, places)
        outputs = outputs.transpose(0, 1).contiguous()  # torch takes views of it
        return outputs.flatten(0, 1) if flat else outputs

    if not isinstance(forward, FunctionType):
        return forward
    return _copy(forward, {**forward.__globals__, "F": SimpleNamespace(**_functions_with(linear))})


def _functions_with(linear: Callable[..., Tensor]) -> dict[str, Any]:
    """What `torch.nn.functional` holds, with its functions for attention copied to call this linear map."""
    functions = dict(vars(F), linear=linear)
    for name in ("multi_head_attention_forward", "_in_projection_packed", "_in_projection"):
        function = functions.get(name)
        if isinstance(function, FunctionType) and function.__globals__ is vars(F):  # torch's own
            functions[name] = _copy(function, functions)
    return functions


def _copy(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """A copy of a function that looks up global names in `names`."""
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def recurrent_obstacle(layer: nn.Module, arguments: Sequence[Any], samples: int) -> str | None:
    """Why a call cannot be run step by step, and a way out, as the end of a sentence; or None."""
    inputs = arguments[0] if arguments else None
    state = arguments[1] if len(arguments) > 1 else None
    is_cell = isinstance(layer, nn.RNNCellBase)
    if not isinstance(inputs, Tensor):
        return (
            "gets a packed sequence, for which there is no rule: pass padded sequences and read the outputs of "
            "each one at its own last step"
        )
    axis = 0 if is_cell or getattr(layer, "batch_first", False) else 1
    shape = inputs.shape
    if inputs.dim() != (2 if is_cell else 3) or shape[axis] != samples:
        return (
            f"has an input of shape {tuple(shape)} in a batch of {samples} samples: axis {axis} must be that of "
            "the samples"
        )
    if getattr(layer, "proj_size", 0):
        return "has projections (proj_size), for which there is no rule: use a Linear layer behind it"
    if torch.is_autocast_enabled(inputs.device.type):
        return "runs under autocast, where it has no rule: take steps without it"
    if inputs.device.type != "cpu" and layer.training and vars(layer).get("dropout"):
        return "draws dropout masks that do not repeat on this device: use nn.Dropout between layers instead"
    states = state if isinstance(state, tuple | list) else () if state is None else (state,)
    if any(own.shape[-2:] != (samples, layer.hidden_size) for own in states):
        return "starts from states of another shape"  # torch's own words come first
    return None


def recurrent_forward(
    layer: nn.Module, names: Mapping[int, str], report: Report, inputs: Tensor, hx: Any = None
) -> Any:
    """What a recurrent layer returns; reports its linear maps. names: id of a trained parameter -> its name."""
    run = partial(_run, layer, names, report)
    width = layer.hidden_size
    assert isinstance(width, int)
    has_cell = isinstance(layer, nn.LSTM | nn.LSTMCell)
    given = () if hx is None else tuple(hx) if has_cell else (hx,)
    if isinstance(layer, nn.RNNCellBase):
        start = given or (inputs.new_zeros(len(inputs), width),) * (2 if has_cell else 1)
        _, state = run("", inputs.unsqueeze(1), start)
        return state if has_cell else state[0]
    assert isinstance(layer, nn.RNNBase)
    xs = inputs if layer.batch_first else inputs.transpose(0, 1)  # (n, t, features)
    ways = ("", "_reverse") if layer.bidirectional else ("",)
    count = layer.num_layers * len(ways)
    if not given:
        given = (inputs.new_zeros(count, len(xs), width),) * (2 if has_cell else 1)
    starts = list(zip(*(own.unbind(0) for own in given), strict=True))
    ends: list[State] = []
    for number in range(layer.num_layers):
        if number and layer.dropout and layer.training:  # torch drops positions first: the same mask
            xs = F.dropout(xs.transpose(0, 1), layer.dropout).transpose(0, 1)
        sequences = []
        for way in ways:
            hidden, end = run(f"_l{number}{way}", xs, starts[len(ends)])
            sequences.append(torch.stack(hidden))
            ends.append(end)
        xs = (sequences[0] if len(sequences) == 1 else torch.cat(sequences, dim=2)).transpose(0, 1)
    outputs = xs if layer.batch_first else xs.transpose(0, 1)
    final = tuple([torch.stack(own) for own in zip(*ends, strict=True)])
    return outputs, (final if has_cell else final[0])


def _run(
    layer: nn.Module, names: Mapping[int, str], report: Report, suffix: str, xs: Tensor, state: State
) -> tuple[list[Tensor], State]:
    """The hidden states (n, features) of every step of xs (n, t, features), and the last state."""
    W_ih, W_hh, b_ih, b_hh = (getattr(layer, name + suffix, None) for name in NAMES)
    assert W_ih is not None and W_hh is not None
    backward = suffix.endswith("_reverse")

    def place(tensor: Tensor | None) -> Place | None:
        name = names.get(id(tensor))
        return None if tensor is None or name is None else whole_parameter(name, tensor.shape)

    gated = isinstance(layer, nn.GRU | nn.GRUCell)
    bias = b_ih if gated or b_ih is None or b_hh is None else b_ih + b_hh
    z = F.linear(xs, W_ih, bias)
    if torch.is_grad_enabled() and not z.requires_grad:  # all of it is frozen, perhaps not W_hh
        z = z.detach().requires_grad_()
    # One use each in the autograd graph, however many steps there are.
    matrix, shift = W_hh.clone().t(), b_hh.clone() if gated and b_hh is not None else None
    before: list[Tensor] = []
    factors: list[Tensor] = []
    hidden: list[Tensor] = []
    steps = z.unbind(1)
    for step in steps[::-1] if backward else steps:
        before.append(state[0])
        if gated:
            state, factor = _gru_step(step, state[0], matrix, shift)
            factors.append(factor)
        elif len(state) == 2:
            state = _lstm_step(torch.addmm(step, state[0], matrix), state[1])
        else:
            sums = torch.addmm(step, state[0], matrix)
            state = (sums.relu() if getattr(layer, "nonlinearity", "tanh") == "relu" else sums.tanh(),)
        hidden.append(state[0])
    if backward:
        before, factors, hidden = before[::-1], factors[::-1], hidden[::-1]
    on_inputs, on_state = (place(W_ih), place(b_ih)), (place(W_hh), place(b_hh))
    if on_inputs != (None, None):
        report(xs, z, on_inputs)
    if on_state != (None, None):
        with torch.no_grad():
            on_grads = None
            if gated:
                r = torch.stack(factors, dim=1)
                on_grads = torch.cat([torch.ones_like(r), torch.ones_like(r), r], dim=2)
            report(torch.stack(before, dim=1), z, on_state, on_grads)
    return hidden, state


def _lstm_step(sums: Tensor, cell: Tensor) -> State:
    gates = torch.sigmoid(sums)
    i, f, _, o = gates.chunk(4, dim=1)
    width = cell.shape[1]
    cell = f * cell + i * torch.tanh(sums[:, 2 * width : 3 * width])
    return o * torch.tanh(cell), cell


def _gru_step(step: Tensor, hidden: Tensor, matrix: Tensor, shift: Tensor | None) -> tuple[State, Tensor]:
    """The new state, and r."""
    own = hidden @ matrix if shift is None else torch.addmm(shift, hidden, matrix)
    width = hidden.shape[1]
    gates = torch.sigmoid(step[:, : 2 * width] + own[:, : 2 * width])
    r, keep = gates.chunk(2, dim=1)
    new = torch.tanh(step[:, 2 * width :] + r * own[:, 2 * width :])
    return (new + keep * (hidden - new),), r
