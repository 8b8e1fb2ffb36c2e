"""Many steps, with the memory and the time they take: both must stay flat.

    python -m tests.soak.steps --steps 50000
    python -m tests.soak.steps --steps 100000 --device cuda     one recorded step after the other

Batches change their size from step to step on the CPU. Every tenth of the run is a line: the median time of a
step, the memory of the process (on a GPU that which torch has allocated), live tensors and live objects. Exit
status 1 if the last line exceeds the second, past the warm-up, by more than the bounds below.
"""

import argparse
import gc
import os
import sys
import time
from statistics import median

import torch
from torch import nn

import woodbury

MEMORY = 16 * 2**20  # bytes: allocators keep what they have got, in pieces of some MiB
TENSORS = 50  # StepInfo and caches of bounded size
OBJECTS = 2000


def runs(device):
    """(name, optimizer); all take images (1, 8, 8) in ten classes."""
    loss = nn.CrossEntropyLoss()
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).to(device)
    yield "ng, chain", woodbury.NaturalGradient(mlp, loss, lr=0.1, curvature_samples=0.5)
    if device == "cpu":
        other = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
        yield "gn, momentum", woodbury.GaussNewton(other, loss, lr=0.1, momentum=0.9, curvature_samples=0.25)
        norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        layers = nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * 36, 10)
        yield "ng, images", woodbury.NaturalGradient(nn.Sequential(*layers), loss, lr=0.1)


def memory(device):
    if device != "cpu":
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live():
    gc.collect()
    objects = gc.get_objects()
    return sum(issubclass(type(own), torch.Tensor) for own in objects), len(objects)


def soak(optimizer, steps, device):
    """The lines of one run: (median microseconds, bytes, tensors, objects) of each tenth."""
    generator = torch.Generator().manual_seed(1)
    data, labels = torch.randn(64, 1, 8, 8, device=device), torch.randint(10, (64,), device=device)
    lines = []
    for _ in range(10):
        times = []
        for _ in range(steps // 10):
            size = int(torch.randint(4, 65, (), generator=generator)) if device == "cpu" else 60
            start = time.perf_counter()
            info = optimizer.step(data[:size], labels[:size])
            times.append(time.perf_counter() - start)
        if device != "cpu":
            torch.cuda.synchronize()
        lines.append((1e6 * median(times), memory(device), *live()))
        assert all(bool(torch.isfinite(p).all()) for p in optimizer.model.parameters()), info
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000, help="in all (default 50000)")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    optimizers = dict(runs(arguments.device))
    steps, grown = arguments.steps // len(optimizers), False
    for name, optimizer in optimizers.items():
        lines = soak(optimizer, steps, arguments.device)
        print(f"{name}: {steps:,} steps on {arguments.device}, torch {torch.__version__}")
        print("  tenth   us/step   MiB       tensors   objects")
        for tenth, (microseconds, size, tensors, objects) in enumerate(lines, 1):
            print(f"  {tenth:5}   {microseconds:7.0f}   {size / 2**20:7.1f}   {tensors:7}   {objects:7}")
        bounds = zip(lines[1][1:], lines[-1][1:], (MEMORY, TENSORS, OBJECTS), strict=True)
        if any(last > second + bound for second, last, bound in bounds):
            print("  grown")
            grown = True
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
