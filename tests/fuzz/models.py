"""Random models, stage by stage; each knows what the library promises about it.

A stage is chosen for the shape that reaches it: (n, F), (n, T, F) or (n, C, H, W). `Builder.features` names what
was chosen; `needs_fallback`, `mixes` and `random` say what the documentation says about that.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import woodbury

ACTIVATIONS = [nn.Tanh, nn.Sigmoid, nn.Softplus, nn.GELU, nn.SiLU, nn.ReLU, nn.ELU]


class Gain(nn.Module):
    """Each feature times a learned number; has a registered rule."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(1 + 0.3 * torch.randn(width))

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


class Bare(nn.Module):
    """A parameter of a module without a rule."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(1 + 0.3 * torch.randn(width))
        self.shift = nn.Parameter(0.3 * torch.randn(()))

    def forward(self, x):
        return self.scale * x + self.shift


class TwoNames(nn.Module):
    """One parameter under two names in one module."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.b = self.a

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b


class ListTwice(nn.Module):
    """ParameterList([p, p])."""

    def __init__(self, width):
        super().__init__()
        p = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.both = nn.ParameterList([p, p])

    def forward(self, x):
        return torch.tanh(x @ self.both[0]) @ self.both[1]


class Unused(nn.Module):
    """A layer that the outputs do not depend on."""

    def __init__(self, width):
        super().__init__()
        self.idle = nn.Linear(width, 2)

    def forward(self, x):
        self.idle(x)
        return x


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Twice(nn.Module):
    """A module called twice."""

    def __init__(self, inner, between):
        super().__init__()
        self.inner, self.between = inner, between

    def forward(self, x):
        return self.inner(self.between(self.inner(x)))


class PastModule(nn.Module):
    """F.linear with the weight of a layer, which is also called."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.layer(x)) + F.linear(x, self.layer.weight.t())


class Pairs(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.form = nn.Bilinear(width, width, out)

    def forward(self, x):
        return self.form(x, torch.tanh(x))


class Cell(nn.Module):
    """A recurrent cell, two steps."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for _ in range(2):
            state = self.cell(x, state)
        return state[0] if isinstance(state, tuple) else state


class Recurrent(nn.Module):
    """An RNN of any kind; by transposing, if it wants positions first."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        if self.rnn.batch_first:
            return self.rnn(x)[0]
        return self.rnn(x.transpose(0, 1))[0].transpose(0, 1)


class Attention(nn.Module):
    def __init__(self, attention, masked=False):
        super().__init__()
        self.attention, self.masked = attention, masked

    def forward(self, x):
        own = x if self.attention.batch_first else x.transpose(0, 1)
        mask = None
        if self.masked:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        out = self.attention(own, own, own, attn_mask=mask, need_weights=False)[0]
        return out if self.attention.batch_first else out.transpose(0, 1)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function, *arguments):
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, x):
        return self.function(x, *self.arguments)


class Around(nn.Module):
    """after(inner(before(x), ...)), both plain functions of (x, shape of the module's input)."""

    def __init__(self, before, inner, after):
        super().__init__()
        self.before, self.inner, self.after = before, inner, after

    def forward(self, x):
        return self.after(self.inner(self.before(x)), x.shape)


class Places(nn.Module):
    """A position embedding, with a sample axis or without."""

    def __init__(self, length, width, expanded):
        super().__init__()
        self.table, self.expanded = nn.Embedding(length, width), expanded

    def forward(self, x):
        places = torch.arange(x.shape[1])
        return x + self.table(places.expand(x.shape[:2]) if self.expanded else places)


class Bag(nn.Module):
    def __init__(self, bag):
        super().__init__()
        self.bag = bag

    def forward(self, x):
        return self.bag(x)


class Padded(nn.Module):
    """torch's encoder with a mask of padded positions that comes from the data."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        mask = x[..., 0] > 0.5
        mask = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)
        return self.encoder(x, src_key_padding_mask=mask)


def stretch(module, arguments, output):
    """A forward hook."""
    return 1.5 * output


def bend(module, arguments):
    """A hook before forward."""
    return (torch.tanh(arguments[0]),)


def fold(x):
    return x.flatten(0, 1)


def unfold(y, shape):
    return y.unflatten(0, shape[:2])


def swap(x):
    return x.transpose(0, 1)


def swap_back(y, shape):
    return y.transpose(0, 1)


def channels_second(x):
    return x.transpose(1, 2)


def channels_back(y, shape):
    return y.transpose(1, 2)


def center(x):
    return x - x.mean(0, keepdim=True)


def compete(x):
    return x * x.softmax(0)


def order(x):
    return x.sort(0)[0]


def shift(x):
    return x + 0.5 * x.roll(1, 0)


def middle(x):
    """Mixes two samples that are neither the first nor the last, where there are such."""
    y = x.clone()
    y[1:-2] += 0.5 * x[2:-1]
    return y


def sums_before(x):
    return x.cumsum(0) / 2


def standardise(x):
    return F.batch_norm(x, None, None, training=True)


class Net(nn.Module):
    """The stages in turn."""

    def __init__(self, stages):
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Builder:
    """Puts together a model for samples x (n, ...), n >= 5, by running them through each stage as it is made."""

    def __init__(self, rng, x, words=None):
        self.rng, self.h, self.words = rng, x, words
        self.stages = []
        self.features = set()
        self.needs_fallback = False  # without it the model is refused
        self.mixes = False
        self.random = False
        self.refused = None  # why the model is refused whatever the options
        self.running = False  # has buffers that a pass changes
        self.single = True  # derivatives of derivatives exist
        self.plain_linear = True  # Linear on one vector per sample only: what KFAC takes

    def add(self, feature, stage, fallback=False, plain=False):
        self.features.add(feature)
        self.stages.append(stage)
        self.needs_fallback |= fallback
        self.plain_linear &= plain
        with torch.no_grad():
            self.h = stage(self.h)

    def activation(self):
        rng = self.rng
        if rng.random() < 0.25:
            self.add("inplace", rng.choice([nn.ReLU(inplace=True), nn.ELU(inplace=True)]), plain=True)
        else:
            self.add("activation", rng.choice(ACTIVATIONS)(), plain=True)

    def narrow(self, most=8):
        """Leave few features, for the dense reference."""
        if self.h.dim() < 4 and self.h.shape[-1] > most:
            self.add("narrow", Function(torch.narrow, -1, 0, most), plain=True)

    def stage(self):
        """Add one stage that fits."""
        self.narrow(6)
        if self.words is not None:
            self.embed()
        elif self.h.dim() == 2:
            self.on_vectors()
        elif self.h.dim() == 3:
            self.on_sequences()
        else:
            self.on_images()

    # -- stages by shape ---------------------------------------------------------------------------------

    def embed(self):
        rng, words, self.words = self.rng, self.words, None
        width = rng.choice([2, 4])
        kind = rng.random()
        if kind < 0.2:
            bag = nn.EmbeddingBag(words, width, mode=rng.choice(["sum", "mean"]))
            self.single = False
            self.add("EmbeddingBag", Bag(bag), fallback=True)
        elif kind < 0.24:
            option = rng.choice(["max_norm", "scale_grad_by_freq"])
            self.refused = f"EmbeddingBag({option})"
            layer = nn.EmbeddingBag(words, width, **{option: 0.5 if option == "max_norm" else True})
            self.single = False
            self.add(f"Embedding-bag-{option}", Bag(layer), fallback=True)
        elif kind < 0.28:
            option = rng.choice(["max_norm", "scale_grad_by_freq", "sparse"])
            self.refused = f"Embedding({option})"
            layer = nn.Embedding(words, width, **{option: 0.5 if option == "max_norm" else True})
            self.add(f"Embedding-{option}", layer)
        else:
            padding = rng.choice([None, 0])
            table = nn.Embedding(words, width, padding_idx=padding)
            self.add("Embedding", table)
            if rng.random() < 0.2:
                head = nn.Linear(width, words)
                head.weight = table.weight
                self.add("tied-embedding", nn.Sequential(nn.Tanh(), head))
                width = words
        if self.h.dim() == 3 and rng.random() < 0.3:
            expanded = rng.random() < 0.5
            self.add("places", Places(self.h.shape[1], width, expanded), fallback=not expanded)

    def on_vectors(self):
        rng, width = self.rng, self.h.shape[1]
        choices = {
            "Linear": 6,
            "residual": 1,
            "called-twice": 1,
            "tied": 1,
            "LayerNorm": 1,
            "RMSNorm": 1,
            "GroupNorm": 1,
            "BatchNorm-eval": 1,
            "PReLU": 1,
            "Bilinear": 1,
            "bare": 1,
            "Gain": 0.7,
            "TwiceInside": 0.7,
            "frozen": 1,
            "Dropout": 0.6,
            "weight_norm": 0.6,
            "spectral_norm": 0.6,
            "two-names": 0.4,
            "ParameterList": 0.4,
            "cell": 0.6,
            "past-module": 0.6,
            "unused": 0.4,
            "hooked": 0.5,
            "shared-module": 0.7,
            "to-sequence": 1.2,
        }
        kind = rng.choices(list(choices), list(choices.values()))[0]
        out = rng.choice([2, 3, 4])
        if kind == "Linear":
            self.add(kind, nn.Linear(width, out, bias=rng.random() < 0.8), plain=True)
            self.activation()
        elif kind == "residual":
            self.add(kind, Residual(nn.Sequential(nn.Tanh(), nn.Linear(width, width))), plain=True)
        elif kind == "called-twice":
            self.add(kind, Twice(nn.Linear(width, width), nn.Tanh()))
        elif kind == "tied":
            first, second = nn.Linear(width, width), nn.Linear(width, width, bias=rng.random() < 0.5)
            second.weight = first.weight
            self.add(kind, nn.Sequential(first, nn.Tanh(), second))
        elif kind in ("LayerNorm", "RMSNorm"):
            self.add(kind, getattr(nn, kind)(width, **self.no_bias(kind)))
        elif kind == "GroupNorm" and width > 1:
            self.add(kind, nn.GroupNorm(self.divisor(width, multiple=True), width))
        elif kind == "BatchNorm-eval":
            self.add(kind, self.still(nn.BatchNorm1d(width)))
        elif kind == "PReLU":
            self.add(kind, nn.PReLU(rng.choice([1, width])))
        elif kind == "Bilinear":
            self.add(kind, Pairs(width, out))
        elif kind in ("bare", "two-names", "ParameterList"):
            self.add(kind, {"bare": Bare, "two-names": TwoNames, "ParameterList": ListTwice}[kind](width), True)
        elif kind == "Gain":
            self.add(kind, Gain(width))
        elif kind == "TwiceInside":
            self.add(kind, TwiceInside(width))
        elif kind == "frozen":
            layer = nn.Linear(width, out)
            rng.choice([layer, layer.weight, layer.bias]).requires_grad_(False)
            self.add(kind, layer)
            self.activation()
        elif kind == "Dropout":
            self.random = True
            inplace = rng.random() < 0.3
            self.add(kind, nn.Sequential(nn.Linear(width, out), nn.Dropout(0.4, inplace=inplace)))
        elif kind == "weight_norm":
            self.add(kind, parametrizations.weight_norm(nn.Linear(width, out)), True)
        elif kind == "spectral_norm":
            self.add(kind, parametrizations.spectral_norm(nn.Linear(width, out)).eval(), True)
        elif kind == "cell":
            cell = rng.choice([nn.RNNCell, nn.LSTMCell, nn.GRUCell])(width, out)
            self.add(kind, Cell(cell), True)
        elif kind == "past-module":
            self.add(kind, PastModule(width), True)
        elif kind == "hooked":
            layer = nn.Linear(width, out)
            if rng.random() < 0.5:
                layer.register_forward_hook(stretch)
            else:
                layer.register_forward_pre_hook(bend)
            self.add(kind, layer)
        elif kind == "shared-module":
            layer = rng.choice([nn.Linear(width, width), Gain(width), nn.LayerNorm(width), nn.PReLU()])
            self.add(kind, nn.Sequential(layer, nn.Tanh(), layer))
        elif kind == "unused":
            self.add(kind, Unused(width))
        elif width % 2 == 0:
            self.add(kind, Function(torch.unflatten, 1, (2, width // 2)))
        else:
            self.add(kind, Function(torch.unsqueeze, 1))

    def on_sequences(self):
        rng = self.rng
        _, length, width = self.h.shape
        choices = {
            "Linear-sequence": 3,
            "LayerNorm": 1,
            "RMSNorm": 1,
            "GroupNorm": 1,
            "InstanceNorm": 1,
            "BatchNorm-eval": 1,
            "PReLU": 0.7,
            "Conv1d": 3,
            "ConvTranspose1d": 1,
            "MultiheadAttention": 1.5,
            "TransformerEncoderLayer": 1,
            "TransformerEncoder-padded": 0.8,
            "bias_kv": 0.4,
            "RNN": 1.5,
            "Bilinear": 0.5,
            "bare": 0.5,
            "called-twice": 0.7,
            "tied": 0.7,
            "cumsum": 0.5,
            "folded": 0.7,
            "positions-first": 0.7,
            "mean": 2,
            "last": 1,
            "flatten": 2,
        }
        kind = rng.choices(list(choices), list(choices.values()))[0]
        out = rng.choice([2, 3, 4])
        if kind == "Linear-sequence":
            self.add(kind, nn.Linear(width, out, bias=rng.random() < 0.8))
            self.activation()
        elif kind in ("LayerNorm", "RMSNorm"):
            self.add(kind, getattr(nn, kind)(rng.choice([width, (length, width)]), **self.no_bias(kind)))
        elif kind == "GroupNorm" and length * width > 1:
            self.add(kind, nn.GroupNorm(self.divisor(length, multiple=width == 1), length))
            self.maybe_inplace()
        elif kind == "InstanceNorm" and width > 1:
            self.instance_norm(nn.InstanceNorm1d, length)
        elif kind == "BatchNorm-eval":
            self.add(kind, self.still(nn.BatchNorm1d(length)))
        elif kind == "PReLU":
            self.add(kind, nn.PReLU(rng.choice([1, length])))
        elif kind == "Conv1d":
            self.convolution(nn.Conv1d, 1)
        elif kind == "ConvTranspose1d" and width <= 6:
            self.transposed_convolution(nn.ConvTranspose1d)
        elif kind == "MultiheadAttention" and width % 2 == 0 and width <= 4:
            attention = nn.MultiheadAttention(width, 2, bias=rng.random() < 0.8, batch_first=rng.random() < 0.6)
            if rng.random() < 0.15:
                attention.in_proj_weight.requires_grad_(False)
                self.features.add("frozen-in_proj")
            self.add(kind, Attention(attention, masked=rng.random() < 0.3))
        elif kind == "TransformerEncoderLayer" and width == 2:
            training = rng.random() < 0.5
            layer = nn.TransformerEncoderLayer(
                width, 1, 3, dropout=0.0, batch_first=True, norm_first=rng.random() < 0.5
            )
            self.add(kind, layer.train(training))
        elif kind == "TransformerEncoder-padded" and width in (2, 4):
            training = rng.random() < 0.5
            layer = nn.TransformerEncoderLayer(width, 2, 3, dropout=0.0, batch_first=True)
            self.add(kind, Padded(nn.TransformerEncoder(layer, 1)).train(training))
        elif kind == "bias_kv" and width % 2 == 0 and width <= 4:
            attention = nn.MultiheadAttention(width, 1, add_bias_kv=True, batch_first=True)
            self.add(kind, Attention(attention), True)
        elif kind == "RNN" and width <= 4:
            cls = rng.choice([nn.RNN, nn.LSTM, nn.GRU])
            both, tied = rng.random() < 0.2, rng.random() < 0.15
            layers = rng.choice([1, 1, 2])
            rnn = cls(
                width,
                width if tied else 2,
                layers,
                batch_first=rng.random() < 0.5,
                bidirectional=both and not tied,
            )
            if tied:
                rnn.weight_hh_l0 = rnn.weight_ih_l0
                self.features.add("RNN-tied")
            self.add(kind, Recurrent(rnn), True)
        elif kind == "Bilinear":
            self.add(kind, Pairs(width, out))
        elif kind == "bare":
            self.add(kind, Bare(width), True)
        elif kind == "called-twice":
            self.add(kind, Twice(nn.Linear(width, width), nn.Tanh()))
        elif kind == "tied":
            first, second = nn.Linear(width, width), nn.Linear(width, width)
            second.weight = first.weight
            self.add(kind, nn.Sequential(first, nn.Tanh(), second))
        elif kind == "cumsum":
            self.add(kind, Function(torch.cumsum, 1))
        elif kind == "folded":
            self.add(kind, Around(fold, nn.Linear(width, out), unfold), True)
        elif kind == "positions-first":
            self.add(kind, Around(swap, nn.Linear(width, out), swap_back), True)
        elif kind == "mean":
            self.add(kind, Function(torch.mean, 1))
        elif kind == "last":
            self.add(kind, Function(torch.select, 1, -1))
        else:
            self.add("flatten", nn.Flatten())

    def on_images(self):
        rng = self.rng
        _, channels, height, width = self.h.shape
        choices = {
            "Conv2d": 4,
            "ConvTranspose2d": 1,
            "GroupNorm": 1,
            "InstanceNorm": 1,
            "BatchNorm-eval": 1,
            "PReLU": 1,
            "LayerNorm": 0.5,
            "Linear-images": 0.7,
            "channels_last": 0.7,
            "pool": 1,
            "flatten": 2,
            "mean": 1,
        }
        kind = rng.choices(list(choices), list(choices.values()))[0]
        if kind == "Conv2d":
            self.convolution(nn.Conv2d, 2)
        elif kind == "ConvTranspose2d" and height <= 4:
            self.transposed_convolution(nn.ConvTranspose2d)
        elif kind == "GroupNorm" and self.h.is_contiguous() and self.h[0].numel() > 1:
            # torch 2.13's own backward may segfault where channels are last
            self.add(kind, nn.GroupNorm(self.divisor(channels, multiple=height * width == 1), channels))
            self.maybe_inplace()
        elif kind == "InstanceNorm" and height * width > 1:
            self.instance_norm(nn.InstanceNorm2d, channels)
        elif kind == "BatchNorm-eval":
            self.add(kind, self.still(nn.BatchNorm2d(channels)))
        elif kind == "PReLU":
            self.add(kind, nn.PReLU(rng.choice([1, channels])))
        elif kind == "LayerNorm":
            self.add(kind, nn.LayerNorm([height, width] if height * width > 1 else [channels, height, width]))
        elif kind == "Linear-images":
            self.add(kind, nn.Linear(width, 2))
        elif kind == "channels_last":
            self.add(kind, Function(to_channels_last))
        elif kind == "pool" and min(height, width) > 1:
            self.add(kind, rng.choice([nn.AvgPool2d, nn.MaxPool2d])(2))
        elif kind == "mean":
            self.add(kind, Function(torch.mean, (2, 3)))
        else:
            self.add("flatten", nn.Flatten())

    # -- parts -------------------------------------------------------------------------------------------

    def no_bias(self, kind):
        return {"bias": False} if kind == "LayerNorm" and self.rng.random() < 0.3 else {}

    def divisor(self, channels, multiple=False):
        """A number of groups that divides the channels; with more than one channel per group if `multiple`."""
        groups = [g for g in range(1, channels + 1) if channels % g == 0 and (not multiple or g < channels)]
        return self.rng.choice(groups or [1])

    def still(self, norm):
        """A batch norm in eval mode with statistics of its own."""
        with torch.no_grad():
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 2)
        return norm.eval()

    def maybe_inplace(self):
        if self.rng.random() < 0.3:
            self.add("norm-inplace", nn.ReLU(inplace=True))

    def instance_norm(self, cls, channels):
        running = self.rng.random() < 0.3
        self.running |= running
        if running:
            self.features.add("running-statistics")
        self.add("InstanceNorm", cls(channels, affine=True, track_running_stats=running))
        self.maybe_inplace()

    def convolution(self, cls, dimensions):
        rng, channels, length = self.rng, self.h.shape[1], min(self.h.shape[2:])
        kernel = rng.randint(1, min(3, length))
        dilation = rng.choice([1, 2]) if (kernel - 1) * 2 < length else 1
        groups = rng.choice([1, self.divisor(channels)])
        options = {
            "stride": rng.choice([1, 2]),
            "padding": rng.choice([0, 1]) if length > 1 else 0,
            "padding_mode": rng.choice(["zeros", "zeros", "reflect", "circular", "replicate"]),
        }
        if rng.random() < 0.15:
            options |= {"stride": 1, "padding": "same"}
        layer = cls(
            channels, groups * rng.choice([1, 2]), kernel, dilation=dilation, groups=groups,
            bias=rng.random() < 0.8, **options,
        )  # fmt: skip
        self.add(f"Conv{dimensions}d", layer)
        if options["padding_mode"] != "zeros" and options["padding"]:
            self.features.add("padding_mode")
        if rng.random() < 0.6:
            self.activation()

    def transposed_convolution(self, cls):
        rng, channels = self.rng, self.h.shape[1]
        stride, kernel = rng.choice([1, 2]), rng.choice([1, 2, 3])
        groups = rng.choice([1, self.divisor(channels)])
        layer = cls(
            channels, groups * rng.choice([1, 2]), kernel, stride=stride, groups=groups,
            padding=rng.choice([0, 1]) if kernel == 3 else 0, output_padding=rng.choice([0, stride - 1]),
            dilation=rng.choice([1, 2]) if stride == 2 else 1, bias=rng.random() < 0.8,
        )  # fmt: skip
        self.add(cls.__name__, layer)

    def mix(self):
        """Add a stage that mixes the samples of a batch."""
        rng, h = self.rng, self.h
        self.mixes = True
        kinds = ["batch-mean", "batch-softmax", "batch-sort", "batch-roll", "batch-middle", "batch-cumsum"]
        kinds += ["BatchNorm-train", "batch_norm-function"]
        kinds += ["RNN-positions-first", "attention-positions-first"] * 2 if h.dim() == 3 else []
        kind = rng.choice(kinds)
        functions = {
            "batch-mean": center,
            "batch-softmax": compete,
            "batch-sort": order,
            "batch-roll": shift,
            "batch-middle": middle,
            "batch-cumsum": sums_before,
            "batch_norm-function": standardise,
        }
        if kind in functions:
            self.add(kind, Function(functions[kind]))
        elif kind == "BatchNorm-train":
            norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[h.dim() - 2](h.shape[1])
            self.add(kind, norm)
        elif kind == "RNN-positions-first":
            rnn = rng.choice([nn.RNN, nn.LSTM, nn.GRU])(h.shape[2], 2)
            self.add(kind, First(rnn), True)
        else:
            attention = nn.MultiheadAttention(h.shape[2], 1)
            self.add(kind, SelfAttention(attention))


class First(nn.Module):
    """The first of several outputs."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class SelfAttention(First):
    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


def to_channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)
