"""No object of size N2 x n: the peak memory of a step, seen from outside in fresh processes."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch, woodbury
from torch import nn
widths = (3072, 2048, 2048, 10)
torch.manual_seed(0)
layers = [m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.Sigmoid())][:-1]
model, loss = nn.Sequential(*layers), nn.CrossEntropyLoss()
inputs, targets = torch.randn(256, 3072), torch.randint(10, (256,))
if sys.argv[1] == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
else:
    optimizer = woodbury.NaturalGradient(model, loss, blocks=sys.argv[1])
    def step():
        assert optimizer.step(inputs, targets).accepted
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
before = peak()
for _ in range(3):
    step()
print(peak() - before, sum(p.numel() * 4 for p in model.parameters()))
"""


def growth(kind):
    """Bytes by which the peak memory grows in three steps, and the size of the parameters."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, check=True)
    peak, parameters = (int(word) for word in done.stdout.split())
    return peak, parameters


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_natural_gradient_step_needs_less_than_two_copies_of_the_parameters_more_than_sgd():
    sgd, parameters = growth("sgd")
    assert sgd > 0.9 * parameters  # the measure sees the gradients
    for blocks in ("full", "layer"):
        step, _ = growth(blocks)
        assert step - sgd < 2 * parameters
