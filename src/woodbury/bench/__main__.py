"""The measurements from the command line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import woodbury.bench as package
from woodbury.bench.gpu import PARTS, bench_gpu
from woodbury.bench.scale import bench_scale
from woodbury.bench.step import bench_step


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m woodbury.bench", description=package.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="step cost against torch.optim.SGD on the paper's networks")
    step.add_argument("--repeats", type=int, default=200, help="timed steps of each optimizer (default 200)")
    scale = commands.add_parser("scale", help="growth of the step cost with N2, classes and width")
    gpu = commands.add_parser("gpu", help="steps on a CUDA device: eager, recorded, and up to 10^9 parameters")
    gpu.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default all)")
    for command in (step, scale, gpu):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    if chosen.command == "step" and chosen.repeats < 1:
        parser.error("--repeats must be at least 1")
    if chosen.command == "gpu":
        unknown = [part for part in chosen.parts if part not in PARTS]
        if unknown:
            parser.error(f"no part {unknown[0]!r}: one of {', '.join(PARTS)}")
        figures = bench_gpu(tuple(chosen.parts or PARTS))
        print(json.dumps(figures, indent=None if chosen.json else 2))
        return 0
    if os.environ.get("OMP_NUM_THREADS") != "1":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        given = sys.argv[1:] if arguments is None else arguments
        return subprocess.run([sys.executable, "-m", "woodbury.bench", *given], env=environment).returncode
    if chosen.command == "step":
        ratios = bench_step(chosen.repeats)
        lines = [
            f"{network:8} " + "  ".join(f"{name} {ratio:.2f}x" for name, ratio in row.items())
            for network, row in ratios.items()
        ]
        print(json.dumps(ratios) if chosen.json else "\n".join(lines))
        return 0
    sweeps = bench_scale()
    lines = [
        f"{sweep:6} {name:8} exponent {entry['exponent']:5.2f}, predicted {entry['predicted']:5.2f}"
        for sweep, row in sweeps.items()
        for name, entry in row.items()
        if isinstance(entry, dict)
    ]
    print(json.dumps(sweeps) if chosen.json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
