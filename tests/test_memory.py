"""No object of size N2 x n: the peak memory of a step, seen from outside in fresh processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# An allocator that holds on to freed memory hides a part of the next peak: with these settings mimalloc (torch's
# own on ARM) and glibc return it at once.
RETURNS_MEMORY = {"MIMALLOC_PURGE_DELAY": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}


def takes_gigabytes(test):
    """Slow, and never beside another of these."""
    return pytest.mark.slow(pytest.mark.xdist_group("gigabytes")(test))


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")


def printed(program, *arguments):
    """The numbers that a program prints, in a process whose allocator gives freed memory back at once."""
    command, environment = [sys.executable, "-c", program, *arguments], os.environ | RETURNS_MEMORY
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [int(word) for word in done.stdout.split()]


# The first lines of a program. choose_in_forks returns each argument in a process of its own: they are forked one
# after the other, before anything has been computed.
START = """
import os, sys, torch, woodbury
from torch import nn
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
def choose_in_forks(arguments):
    for argument in arguments:
        child = os.fork()
        if child == 0:
            return argument
        assert os.waitpid(child, 0)[1] == 0, argument
    sys.exit()
"""


PROGRAM = """
method = choose_in_forks(sys.argv[1:])
widths = (3072, 2048, 2048, 10)
torch.manual_seed(0)
layers = [m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.Sigmoid())][:-1]
model, loss = nn.Sequential(*layers), nn.CrossEntropyLoss()
inputs, targets = torch.randn(64, 3072), torch.randint(10, (64,))
if method == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
else:
    optimizer = woodbury.NaturalGradient(model, loss, blocks=method)
    def step():
        assert optimizer.step(inputs, targets).accepted
before = peak()
for _ in range(3):
    step()
print(peak() - before, sum(p.numel() * 4 for p in model.parameters()))
"""


@pytest.mark.slow
@needs_proc
def test_natural_gradient_step_needs_less_than_two_copies_of_the_parameters_more_than_sgd():
    # bytes by which the peak grows in three steps, and bytes of the parameters
    sgd, parameters, *steps = printed(START + PROGRAM, "sgd", "full", "layer")
    assert sgd > 0.9 * parameters  # the measure sees the gradients
    for step in steps[::2]:
        assert step - sgd < 2 * parameters


IMAGES = """
torch.manual_seed(0)
widths, layers = (3, 32, 32, 64, 64, 128, 128), []
for index, (a, b) in enumerate(zip(widths, widths[1:])):
    layers += [nn.Conv2d(a, b, 3, stride=1 + index % 2, padding=1), nn.GroupNorm(8, b), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
samples = int(sys.argv[2])
inputs, targets = torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))
optimizer = getattr(woodbury, sys.argv[1])(model, nn.CrossEntropyLoss())
assert torch.isfinite(optimizer.step(inputs, targets).ratio)
print(peak())
"""


@takes_gigabytes
@needs_proc
@pytest.mark.parametrize("method, samples", [("NaturalGradient", 256), ("GaussNewton", 64)])
def test_step_of_a_convolutional_network_stays_within_two_gib(method, samples):
    """Six convolutions with norms on 32 x 32 images, 10 classes."""
    (peak,) = printed(START + IMAGES, method, str(samples))
    assert peak < 2 * 2**30


WORDS = """
torch.manual_seed(0)
class LanguageModel(nn.Module):
    def __init__(self, words=96, width=256, length=256, layers=4):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)
        self.head.weight = self.words.weight
    def forward(self, x):
        places = self.places(torch.arange(x.shape[1]).expand(x.shape))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.blocks(self.words(x) + places, mask=mask, is_causal=True)).transpose(1, 2)
words = torch.randint(96, (16, 257))
optimizer = woodbury.NaturalGradient(LanguageModel(), nn.CrossEntropyLoss())
assert torch.isfinite(optimizer.step(words[:, :-1], words[:, 1:]).ratio)
print(peak())
"""


@takes_gigabytes
@needs_proc
def test_step_of_a_language_model_stays_within_one_and_a_half_gib():
    """Four layers of width 256, 16 sequences of 256 positions, embedding tied to the head, one loss per token.

    torch itself takes a third of a GiB. A row of all parameters for each token would take 52.
    """
    (peak,) = printed(START + WORDS)
    assert peak < 1.5 * 2**30


GRAM = """
from woodbury.layers import EmbeddingRows, SharedRows
from woodbury.layers.positions import Part
def forms(n, k, s, o, i, limit):
    grads = torch.randn(n, k, s, 1, o)
    indices = torch.randint(5000, (n, s))
    return {
        "SharedRows": SharedRows((Part(torch.randn(n, s, 1, i).__getitem__, grads),), (o, i), max_bytes=limit),
        "EmbeddingRows": EmbeddingRows((Part(indices.__getitem__, grads),), (5000, o), max_bytes=limit),
    }
form, route = choose_in_forks(sys.argv[1:]).split(".")
small, large = forms(2, 2, 4, 4, 4, 2**20)[form], forms(48, 9, 64, 32, 32, 2**26)[form]
getattr(small, route)(small, torch.float32)  # whatever the libraries need
before = peak()
getattr(large, route)(large, torch.float32)
print(peak() - before)
"""
COMPUTED = "gram_by_pairs", "gram_by_gradients"
ROUTES = [f"{form}.{route}" for form in ("SharedRows", "EmbeddingRows") for route in COMPUTED]


@pytest.mark.slow
@needs_proc
def test_gram_of_shared_parameters_keeps_to_its_limit():
    """432 rows at 64 MiB: all pairs of positions would take 3 GB, all rows of the embedding 276 MB."""
    growths = printed(START + GRAM, *ROUTES)
    assert len(growths) == len(ROUTES)
    for route, growth in zip(ROUTES, growths, strict=True):
        assert growth < 2**26, route


LANGUAGE = """
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(500, 32), nn.Linear(32, 32), nn.Linear(32, 500)
    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.words(x)).cumsum(1))).transpose(1, 2)
inputs, targets = torch.randint(500, (8, 64)), torch.randint(500, (8, 64))
before = peak()
optimizer = woodbury.GaussNewton(Model(), nn.CrossEntropyLoss(), solver="products", solver_tolerance=1e-4)
assert optimizer.step(inputs, targets).accepted
assert optimizer.verify(inputs, targets) < 1e-2
print(peak() - before)
"""


@pytest.mark.slow
@needs_proc
def test_products_take_a_language_model_in_the_memory_of_its_outputs():
    """512 tokens of 500 classes: 255488 rows, whose columns would take 33 GB and whose Gram matrix 261 GB."""
    (growth,) = printed(START + LANGUAGE)
    assert growth < 2**28
