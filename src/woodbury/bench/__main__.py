"""The measurements from the command line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from woodbury.bench.draw import draw
from woodbury.bench.gpu import PARTS, bench_gpu
from woodbury.bench.peer_steps import PEERS
from woodbury.bench.peers import OWN, PROBLEMS, bench_peers, line_of
from woodbury.bench.scale import bench_scale
from woodbury.bench.step import bench_step


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m woodbury.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="step cost against torch.optim.SGD on the paper's networks")
    step.add_argument("--repeats", type=int, default=200, help="timed steps of each optimizer (default 200)")
    step.add_argument("--module", action="store_true", help="the layers inside a module of one's own")
    gpu = commands.add_parser("gpu", help="steps on a CUDA device: eager, recorded, and up to 10^9 parameters")
    gpu.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default all)")
    scale = commands.add_parser("scale", help="growth of the step cost with n, N1, N2, classes and width")
    scale.add_argument("--quick", action="store_true", help="tiny networks, to see that it runs")
    peers = commands.add_parser("peers", help="steps of other libraries beside woodbury's")
    peers.add_argument("--limit", type=float, default=60.0, help="CPU seconds for each peer (default 60)")
    peers.add_argument("--quick", action="store_true", help="tiny networks, to see that it runs")
    peers.add_argument("--peer", action="append", choices=[*OWN, *PEERS], help="only this one; may be repeated")
    peers.add_argument("--problem", action="append", choices=list(PROBLEMS), help="only this one")
    for command in (step, scale, peers, gpu):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    figures = commands.add_parser("draw", help="figures from what the commands above print with --json")
    figures.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    figures.add_argument("--out", type=Path, default=Path(), help="folder for the figures (default: this one)")
    chosen = parser.parse_args(arguments)
    if chosen.command == "step" and chosen.repeats < 1:
        parser.error("--repeats must be at least 1")
    if chosen.command == "gpu":
        unknown = [part for part in chosen.parts if part not in PARTS]
        if unknown:
            parser.error(f"no part {unknown[0]!r}: one of {', '.join(PARTS)}")
        print(json.dumps(bench_gpu(tuple(chosen.parts or PARTS)), indent=None if chosen.json else 2))
        return 0
    if chosen.command == "peers" and not chosen.limit > 0:
        parser.error("--limit must be positive")
    if chosen.command == "draw":
        for path in draw(chosen.files, chosen.out):
            print(path)
        return 0
    if os.environ.get("OMP_NUM_THREADS") != "1":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        given = sys.argv[1:] if arguments is None else arguments
        return subprocess.run([sys.executable, "-m", "woodbury.bench", *given], env=environment).returncode
    if chosen.command == "step":
        _print(bench_step(chosen.repeats, chosen.module), _step_lines, chosen.json)
    elif chosen.command == "scale":
        _print(bench_scale(quick=chosen.quick, say=_say), _scale_lines, chosen.json)
    else:
        found = bench_peers(chosen.limit, chosen.peer or (), chosen.problem or (), chosen.quick, _say)
        _print(found, _peer_lines, chosen.json)
    return 0


def _print(result: dict[str, Any], lines: Any, as_json: bool) -> None:
    print(json.dumps(result) if as_json else "\n".join(lines(result)))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _step_lines(ratios: dict[str, dict[str, float]]) -> Sequence[str]:
    return [
        f"{network:8} " + "  ".join(f"{name} {ratio:.2f}x" for name, ratio in row.items())
        for network, row in ratios.items()
    ]


def _scale_lines(sweeps: dict[str, dict[str, Any]]) -> Sequence[str]:
    return [
        f"{sweep:6} {name:8} exponent {entry['exponent']:5.2f}, predicted {entry['predicted']:5.2f}"
        for sweep, row in sweeps.items()
        for name, entry in row.items()
        if isinstance(entry, dict)
    ]


def _peer_lines(result: dict[str, Any]) -> Sequence[str]:
    lines = []
    for problem in result["problems"].values():
        lines.append("{network}, {loss}, {samples} samples, {parameters} parameters".format(**problem))
        lines += [f"  {line_of(entry)}" for entry in problem["peers"]]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
