"""Random models, stage by stage; each knows what the library promises about it.

A stage is chosen for the shape that reaches it: (n, F), (n, T, F) or (n, C, H, W). `Builder.features` names what
was chosen; `needs_fallback`, `mixes` and `random` say what the documentation says about that.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import woodbury

ACTIVATIONS = [nn.Tanh, nn.Sigmoid, nn.Softplus, nn.GELU, nn.SiLU, nn.ReLU, nn.ELU]
CELLS = [nn.RNNCell, nn.LSTMCell, nn.GRUCell]


class Parts(nn.Module):
    """Arguments become attributes: layers, parameters and settings; `run(self, *inputs)` is what it computes."""

    def __init__(self, run=None, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def drawn(**sizes):
    """Parameters of normal numbers, by name."""
    return {name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()}


class Gain(Parts):
    """Each feature times a learned number; has a registered rule."""

    def __init__(self, width):
        super().__init__(gain=nn.Parameter(1 + 0.3 * torch.randn(width)))

    def forward(self, x):
        return self.gain * x


class TwiceInside(Gain):
    """g tanh(g x): a registered layer that uses its parameter twice."""

    def forward(self, x):
        return self.gain * torch.tanh(self.gain * x)


@woodbury.register_layer(Gain)
def gain_rows(layer, inputs, grads):
    return {"gain": inputs.unsqueeze(1) * grads}


@woodbury.register_layer(TwiceInside)
def twice_rows(layer, inputs, grads):
    inner = torch.tanh(layer.gain.detach() * inputs)
    return {"gain": grads * (inner + layer.gain.detach() * inputs * (1 - inner**2)).unsqueeze(1)}


def bare(width):
    """Parameters of a module without a rule."""
    scale, shift = nn.Parameter(1 + 0.3 * torch.randn(width)), nn.Parameter(0.3 * torch.randn(()))
    return Parts(lambda m, x: m.scale * x + m.shift, scale=scale, shift=shift)


def list_twice(width, names=False):
    """ParameterList([p, p]), or one parameter under two names in one module."""
    p = nn.Parameter(torch.randn(width, width) / width**0.5)
    if names:
        return Parts(lambda m, x: torch.tanh(x @ m.a) @ m.b, a=p, b=p)
    return Parts(lambda m, x: torch.tanh(x @ m.both[0]) @ m.both[1], both=nn.ParameterList([p, p]))


def twice(width):
    return Parts(lambda m, x: m.inner(torch.tanh(m.inner(x))), inner=nn.Linear(width, width))


def pairs(width, out):
    return Parts(lambda m, x: m.form(x, torch.tanh(x)), form=nn.Bilinear(width, width, out))


def past_module(width):
    """F.linear with the weight of a layer, which is also called."""
    layer = nn.Linear(width, width)
    return Parts(lambda m, x: torch.tanh(m.layer(x)) + F.linear(x, m.layer.weight.t()), layer=layer)


def two_steps(module, x):
    """Of a recurrent cell."""
    state = module.cell(x, module.cell(x))
    return state[0] if isinstance(state, tuple) else state


def recurrent(module, x):
    """An RNN of any kind; by transposing, if it wants positions first."""
    if module.rnn.batch_first:
        return module.rnn(x)[0]
    return module.rnn(x.transpose(0, 1))[0].transpose(0, 1)


class Attention(Parts):
    def __init__(self, attention, masked=False):
        super().__init__(attention=attention, masked=masked)

    def forward(self, x):
        own = x if self.attention.batch_first else x.transpose(0, 1)
        mask = None
        if self.masked:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        out = self.attention(own, own, own, attn_mask=mask, need_weights=False)[0]
        return out if self.attention.batch_first else out.transpose(0, 1)


class Function(Parts):
    def __init__(self, function, *arguments):
        super().__init__(function=function, arguments=arguments)

    def forward(self, x):
        return self.function(x, *self.arguments)


def places(length, width, expanded):
    """A position embedding, with a sample axis or without."""

    def run(module, x):
        positions = torch.arange(x.shape[1])
        return x + module.table(positions.expand(x.shape[:2]) if expanded else positions)

    return Parts(run, table=nn.Embedding(length, width))


def padded(module, x):
    """torch's encoder with a mask of padded positions that comes from the data."""
    mask = x[..., 0] > 0.5
    mask = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)
    return module.encoder(x, src_key_padding_mask=mask)


def middle(x):
    """Mixes two samples that are neither the first nor the last, where there are such."""
    y = x.clone()
    y[1:-2] += 0.5 * x[2:-1]
    return y


# Functions that mix the samples of a batch.
MIXTURES = {
    "batch-mean": lambda x: x - x.mean(0, keepdim=True),
    "batch-softmax": lambda x: x * x.softmax(0),
    "batch-sort": lambda x: x.sort(0)[0],
    "batch-roll": lambda x: x + 0.5 * x.roll(1, 0),
    "batch-middle": middle,
    "batch-cumsum": lambda x: x.cumsum(0) / 2,
    "BatchNorm-train": None,  # a layer
    "batch_norm-function": lambda x: F.batch_norm(x, None, None, training=True),
}


def in_turn(stages):
    """The stages one after the other, in a module that is no nn.Sequential."""

    def run(m, x):
        for stage in m.stages:
            x = stage(x)
        return x

    return Parts(run, stages=nn.ModuleList(stages))


class Builder:
    """Puts together a model for samples x (n, ...), n >= 5, by running them through each stage as it is made."""

    def __init__(self, rng, x, words=None):
        self.rng, self.h, self.words = rng, x, words
        self.out = 2  # features that the next stage gives, where it may choose
        self.stages = []
        self.features = set()
        self.needs_fallback = False  # without it the model is refused
        self.mixes = False
        self.random = False
        self.refused = None  # why the model is refused whatever the options
        self.running = False  # has buffers that a pass changes
        self.single = True  # derivatives of derivatives exist

    @property
    def length(self):
        """Positions of a sequence, channels of an image."""
        return self.h.shape[1]

    @property
    def width(self):
        return self.h.shape[-1]

    def chance(self, share):
        return self.rng.random() < share

    def add(self, feature, stage, fallback=False):
        self.features.add(feature)
        self.stages.append(stage)
        self.needs_fallback |= fallback
        with torch.no_grad():
            self.h = stage(self.h)

    def narrow(self, most=8):
        """Leave few features, for the dense reference."""
        if self.h.dim() < 4 and self.width > most:
            self.add("narrow", Function(torch.narrow, -1, 0, most))

    def stage(self):
        """Add one stage that fits."""
        self.narrow(6)
        if self.words is not None:
            self.embed()
        elif self.h.dim() == 2:
            self.choose(ON_VECTORS, "to-sequence")
        elif self.h.dim() == 3:
            self.choose(ON_SEQUENCES, "flatten")
        else:
            self.choose(ON_IMAGES, "flatten")

    def choose(self, table, otherwise):
        """Add a stage of a table, or the one named `otherwise` where it does not fit."""
        kind = self.rng.choices(list(table), [own.weight for own in table.values()])[0]
        if self.h.dim() < 4:
            self.out = self.rng.choice([2, 3, 4])
        stage = table[kind].make(self)
        if stage is None:
            kind = otherwise
            stage = table[kind].make(self)
        self.add(kind, stage, table[kind].fallback)
        if table[kind].after is not None:
            table[kind].after(self)

    def embed(self):
        rng, words, self.words = self.rng, self.words, None
        width = rng.choice([2, 4])
        kind = rng.random()
        if kind < 0.2:
            self.single = False
            bag = nn.EmbeddingBag(words, width, mode=rng.choice(["sum", "mean"]))
            self.add("EmbeddingBag", bag, fallback=True)
        elif kind < 0.28:
            cls, more = (nn.EmbeddingBag, []) if kind < 0.24 else (nn.Embedding, ["sparse"])
            option = rng.choice(["max_norm", "scale_grad_by_freq", *more])
            self.single = cls is nn.Embedding
            self.refused = f"{cls.__name__}({option})"
            layer = cls(words, width, **{option: 0.5 if option == "max_norm" else True})
            self.add(f"{cls.__name__}-{option}", layer, fallback=not self.single)
        else:
            table = nn.Embedding(words, width, padding_idx=rng.choice([None, 0]))
            self.add("Embedding", table)
            if self.chance(0.2):
                head = nn.Linear(width, words)
                head.weight = table.weight
                self.add("tied-embedding", nn.Sequential(nn.Tanh(), head))
        if self.h.dim() == 3 and self.chance(0.3):
            expanded = self.chance(0.5)
            self.add("places", places(self.length, self.width, expanded), fallback=not expanded)

    # -- what follows a stage ----------------------------------------------------------------------------

    def activation(self):
        if self.chance(0.25):
            inplace = self.rng.choice([nn.ReLU(inplace=True), nn.ELU(inplace=True)])
            self.add("inplace", inplace)
        else:
            self.add("activation", self.rng.choice(ACTIVATIONS)())

    def maybe_activation(self):
        if self.chance(0.6):
            self.activation()

    def maybe_inplace(self):
        if self.chance(0.3):
            self.add("norm-inplace", nn.ReLU(inplace=True))

    # -- stages that take more than a line ---------------------------------------------------------------

    def divisor(self, channels, multiple=False):
        """A number of groups that divides the channels; with more than one channel per group if `multiple`."""
        groups = [g for g in range(1, channels + 1) if channels % g == 0 and (not multiple or g < channels)]
        return self.rng.choice(groups or [1])

    def group_norm(self, numbers):
        """Of as many numbers in each channel; a group of one number alone has no variance."""
        channels = self.length
        if channels * numbers > 1:
            return nn.GroupNorm(self.divisor(channels, multiple=numbers == 1), channels)

    def instance_norm(self, cls):
        if self.h[0, 0].numel() > 1:
            running = self.chance(0.3)
            self.running |= running
            if running:
                self.features.add("running-statistics")
            return cls(self.length, affine=True, track_running_stats=running)

    def still(self, cls):
        """A batch norm in eval mode with statistics of its own."""
        norm = cls(self.length)
        with torch.no_grad():
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 2)
        return norm.eval()

    def tied(self, bias=True):
        first, second = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width, bias=bias)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second)

    def frozen(self):
        layer = nn.Linear(self.width, self.out)
        self.rng.choice([layer, layer.weight, layer.bias]).requires_grad_(False)
        return layer

    def dropout(self):
        self.random = True
        return nn.Sequential(nn.Linear(self.width, self.out), nn.Dropout(0.4, inplace=self.chance(0.3)))

    def hooked(self):
        layer = nn.Linear(self.width, self.out)
        if self.chance(0.5):
            layer.register_forward_hook(lambda module, arguments, output: 1.5 * output)
        else:
            layer.register_forward_pre_hook(lambda module, arguments: (torch.tanh(arguments[0]),))
        return layer

    def shared(self):
        width = self.width
        layer = self.rng.choice([nn.Linear(width, width), Gain(width), nn.LayerNorm(width), nn.PReLU()])
        return nn.Sequential(layer, nn.Tanh(), layer)

    def sequence(self):
        """Vectors as sequences."""
        if self.width % 2 == 0:
            return Function(torch.unflatten, 1, (2, self.width // 2))
        return Function(torch.unsqueeze, 1)

    def attention(self):
        if self.width not in (2, 4):
            return None
        attention = nn.MultiheadAttention(self.width, 2, bias=self.chance(0.8), batch_first=self.chance(0.6))
        if self.chance(0.15):
            attention.in_proj_weight.requires_grad_(False)
            self.features.add("frozen-in_proj")
        return Attention(attention, masked=self.chance(0.3))

    def extended_attention(self):
        if self.width in (2, 4):
            return Attention(nn.MultiheadAttention(self.width, 1, add_bias_kv=True, batch_first=True))

    def encoder(self, masked):
        if self.width not in ((2, 4) if masked else (2,)):
            return None
        training = self.chance(0.5)
        options = {} if masked else {"norm_first": self.chance(0.5)}
        heads = 2 if masked else 1
        layer = nn.TransformerEncoderLayer(self.width, heads, 3, dropout=0.0, batch_first=True, **options)
        return (Parts(padded, encoder=nn.TransformerEncoder(layer, 1)) if masked else layer).train(training)

    def recurrent(self):
        if self.width > 4:
            return None
        cls = self.rng.choice([nn.RNN, nn.LSTM, nn.GRU])
        both, tied = self.chance(0.2), self.chance(0.15)
        layers, first = self.rng.choice([1, 1, 2]), self.chance(0.5)
        out = self.width if tied else 2
        rnn = cls(self.width, out, layers, batch_first=first, bidirectional=both and not tied)
        if tied:
            rnn.weight_hh_l0 = rnn.weight_ih_l0
            self.features.add("RNN-tied")
        return Parts(recurrent, rnn=rnn)

    def convolution(self, cls):
        rng, channels, length = self.rng, self.length, min(self.h.shape[2:])
        kernel = rng.randint(1, min(3, length))
        dilation = rng.choice([1, 2]) if (kernel - 1) * 2 < length else 1
        groups = rng.choice([1, self.divisor(channels)])
        options = {
            "stride": rng.choice([1, 2]),
            "padding": rng.choice([0, 1]) if length > 1 else 0,
            "padding_mode": rng.choice(["zeros", "zeros", "reflect", "circular", "replicate"]),
        }
        if self.chance(0.15):
            options |= {"stride": 1, "padding": "same"}
        if options["padding_mode"] != "zeros" and options["padding"]:
            self.features.add("padding_mode")
        return cls(
            channels, groups * rng.choice([1, 2]), kernel, dilation=dilation, groups=groups,
            bias=self.chance(0.8), **options,
        )  # fmt: skip

    def transposed_convolution(self, cls, longest):
        rng, channels = self.rng, self.length
        if self.h.shape[2] > longest:
            return None
        stride, kernel = rng.choice([1, 2]), rng.choice([1, 2, 3])
        groups = rng.choice([1, self.divisor(channels)])
        return cls(
            channels, groups * rng.choice([1, 2]), kernel, stride=stride, groups=groups,
            padding=rng.choice([0, 1]) if kernel == 3 else 0, output_padding=rng.choice([0, stride - 1]),
            dilation=rng.choice([1, 2]) if stride == 2 else 1, bias=self.chance(0.8),
        )  # fmt: skip

    def image_group_norm(self):
        if self.h.is_contiguous():  # torch 2.13's own backward may segfault where channels are last
            return self.group_norm(self.h[0, 0].numel())

    def image_layer_norm(self):
        _, channels, height, width = self.h.shape
        return nn.LayerNorm([height, width] if height * width > 1 else [channels, height, width])

    def pool(self):
        if min(self.h.shape[2:]) > 1:
            return self.rng.choice([nn.AvgPool2d, nn.MaxPool2d])(2)

    def mix(self):
        """Add a stage that mixes the samples of a batch."""
        rng, h = self.rng, self.h
        self.mixes = True
        on_sequences = ["RNN-positions-first", "attention-positions-first"] * 2
        kind = rng.choice([*MIXTURES, *(on_sequences if h.dim() == 3 else [])])
        if kind == "BatchNorm-train":
            self.add(kind, (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[h.dim() - 2](h.shape[1]))
        elif kind == "RNN-positions-first":
            layer = rng.choice([nn.RNN, nn.LSTM, nn.GRU])(h.shape[2], 2)
            self.add(kind, Parts(lambda m, x: m.inner(x)[0], inner=layer), True)
        elif kind == "attention-positions-first":
            layer = nn.MultiheadAttention(h.shape[2], 1)
            self.add(kind, Parts(lambda m, x: m.inner(x, x, x, need_weights=False)[0], inner=layer))
        else:
            self.add(kind, Function(MIXTURES[kind]))


class Kind(NamedTuple):
    """A kind of stage: how often it is chosen, and what makes it, or None where it does not fit."""

    weight: float
    make: Callable[[Builder], nn.Module | None]
    fallback: bool = False
    after: Callable[[Builder], None] | None = None


def either(b):
    """The shape of a norm over the features, or over everything."""
    return b.rng.choice([b.width, (b.length, b.width)])


ON_VECTORS = {
    "Linear": Kind(6, lambda b: nn.Linear(b.width, b.out, b.chance(0.8)), after=Builder.activation),
    "residual": Kind(1, lambda b: Parts(lambda m, x: x + m.own(torch.tanh(x)), own=nn.Linear(b.width, b.width))),
    "called-twice": Kind(1, lambda b: twice(b.width)),
    "tied": Kind(1, lambda b: b.tied(bias=b.chance(0.5))),
    "LayerNorm": Kind(1, lambda b: nn.LayerNorm(b.width, bias=not b.chance(0.3))),
    "RMSNorm": Kind(1, lambda b: nn.RMSNorm(b.width)),
    "GroupNorm": Kind(1, lambda b: b.group_norm(1)),
    "BatchNorm-eval": Kind(1, lambda b: b.still(nn.BatchNorm1d)),
    "PReLU": Kind(1, lambda b: nn.PReLU(b.rng.choice([1, b.width]))),
    "Bilinear": Kind(1, lambda b: pairs(b.width, b.out)),
    "bare": Kind(1, lambda b: bare(b.width), fallback=True),
    "Gain": Kind(0.7, lambda b: Gain(b.width)),
    "TwiceInside": Kind(0.7, lambda b: TwiceInside(b.width)),
    "frozen": Kind(1, Builder.frozen, after=Builder.activation),
    "Dropout": Kind(0.6, Builder.dropout),
    "weight_norm": Kind(0.6, lambda b: parametrizations.weight_norm(nn.Linear(b.width, b.out)), fallback=True),
    "spectral_norm": Kind(
        0.6, lambda b: parametrizations.spectral_norm(nn.Linear(b.width, b.out)).eval(), fallback=True
    ),
    "two-names": Kind(0.4, lambda b: list_twice(b.width, names=True), fallback=True),
    "ParameterList": Kind(0.4, lambda b: list_twice(b.width), fallback=True),
    "cell": Kind(0.6, lambda b: Parts(two_steps, cell=b.rng.choice(CELLS)(b.width, b.out)), fallback=True),
    "past-module": Kind(0.6, lambda b: past_module(b.width), fallback=True),
    "unused": Kind(0.4, lambda b: Parts(lambda m, x: (m.idle(x), x)[1], idle=nn.Linear(b.width, 2))),
    "hooked": Kind(0.5, Builder.hooked),
    "shared-module": Kind(0.7, Builder.shared),
    "to-sequence": Kind(1.2, Builder.sequence),
}
ON_SEQUENCES = {
    "Linear-sequence": Kind(3, lambda b: nn.Linear(b.width, b.out, b.chance(0.8)), after=Builder.activation),
    "LayerNorm": Kind(1, lambda b: nn.LayerNorm(either(b), bias=not b.chance(0.3))),
    "RMSNorm": Kind(1, lambda b: nn.RMSNorm(either(b))),
    "GroupNorm": Kind(1, lambda b: b.group_norm(b.width), after=Builder.maybe_inplace),
    "InstanceNorm": Kind(1, lambda b: b.instance_norm(nn.InstanceNorm1d), after=Builder.maybe_inplace),
    "BatchNorm-eval": Kind(1, lambda b: b.still(nn.BatchNorm1d)),
    "PReLU": Kind(0.7, lambda b: nn.PReLU(b.rng.choice([1, b.length]))),
    "Conv1d": Kind(3, lambda b: b.convolution(nn.Conv1d), after=Builder.maybe_activation),
    "ConvTranspose1d": Kind(1, lambda b: b.transposed_convolution(nn.ConvTranspose1d, 6)),
    "MultiheadAttention": Kind(1.5, Builder.attention),
    "TransformerEncoderLayer": Kind(1, lambda b: b.encoder(masked=False)),
    "TransformerEncoder-padded": Kind(0.8, lambda b: b.encoder(masked=True)),
    "bias_kv": Kind(0.4, Builder.extended_attention, fallback=True),
    "RNN": Kind(1.5, Builder.recurrent, fallback=True),
    "Bilinear": Kind(0.5, lambda b: pairs(b.width, b.out)),
    "bare": Kind(0.5, lambda b: bare(b.width), fallback=True),
    "called-twice": Kind(0.7, lambda b: twice(b.width)),
    "tied": Kind(0.7, Builder.tied),
    "cumsum": Kind(0.5, lambda b: Function(torch.cumsum, 1)),
    "folded": Kind(
        0.7,
        lambda b: nn.Sequential(
            Function(torch.flatten, 0, 1), nn.Linear(b.width, b.out), Function(torch.unflatten, 0, (-1, b.length))
        ),
        fallback=True,
    ),
    "positions-first": Kind(
        0.7,
        lambda b: nn.Sequential(
            Function(torch.transpose, 0, 1), nn.Linear(b.width, b.out), Function(torch.transpose, 0, 1)
        ),
        fallback=True,
    ),
    "mean": Kind(2, lambda b: Function(torch.mean, 1)),
    "last": Kind(1, lambda b: Function(torch.select, 1, -1)),
    "flatten": Kind(2, lambda b: nn.Flatten()),
}
ON_IMAGES = {
    "Conv2d": Kind(4, lambda b: b.convolution(nn.Conv2d), after=Builder.maybe_activation),
    "ConvTranspose2d": Kind(1, lambda b: b.transposed_convolution(nn.ConvTranspose2d, 4)),
    "GroupNorm": Kind(1, Builder.image_group_norm, after=Builder.maybe_inplace),
    "InstanceNorm": Kind(1, lambda b: b.instance_norm(nn.InstanceNorm2d), after=Builder.maybe_inplace),
    "BatchNorm-eval": Kind(1, lambda b: b.still(nn.BatchNorm2d)),
    "PReLU": Kind(1, lambda b: nn.PReLU(b.rng.choice([1, b.length]))),
    "LayerNorm": Kind(0.5, Builder.image_layer_norm),
    "Linear-images": Kind(0.7, lambda b: nn.Linear(b.width, 2)),
    "channels_last": Kind(0.7, lambda b: Function(lambda x: x.contiguous(memory_format=torch.channels_last))),
    "pool": Kind(1, Builder.pool),
    "flatten": Kind(2, lambda b: nn.Flatten()),
    "mean": Kind(1, lambda b: Function(torch.mean, (2, 3))),
}
