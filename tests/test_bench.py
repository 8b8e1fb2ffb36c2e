"""`woodbury.bench step` prints what it promises; the ratios are for a quiet machine, not for a test."""

import json
import os
import subprocess
import sys

import pytest

from woodbury.bench import scale
from woodbury.bench.timing import Network


@pytest.mark.parametrize("threads", [None, "1"])
def test_step_benchmark_prints_one_object(threads):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads:
        environment["OMP_NUM_THREADS"] = threads
    command = [sys.executable, "-m", "woodbury.bench", "step", "--json", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    ratios = json.loads(done.stdout)
    assert set(ratios) == {"mnist", "cifar10", "webspam"}
    for row in ratios.values():
        assert row["sgd"] == 1.0
        assert {"smw-gn", "smw-ng", "smw-ng-bd", "hf", "kfac"} <= set(row)
        assert all(0 < ratio < 1000 for ratio in row.values())


def test_exponent_is_the_slope_in_logarithms():
    values = (2.0, 4.0, 8.0)
    assert scale.exponent(values, [3 * value**1.7 for value in values]) == pytest.approx(1.7)


def test_predicted_cost_is_the_papers_table():
    """n = 3 x 4 + 5 x 2 = 22, N2 = 5, widths 2, 4, 2, written out."""
    network = Network((2, 4, 2), samples=9, curvature_samples=5, iterations=7)
    assert scale.predicted_cost("smw-ng", network) == 5 * 22 + 25 * 8 + 125
    assert scale.predicted_cost("smw-gn", network) == 10 * 22 + 100 * 8 + 1000
    assert scale.predicted_cost("hf", network) == 7 * 5 * 22
    assert scale.predicted_cost("kfac", network) == (8 + 64 + 8) + 5 * (4 + 16 + 4)


def test_scale_benchmark_fits_every_sweep(monkeypatch):
    sweep = ((2, 4), lambda m: Network((6, 5, 3), samples=8, curvature_samples=m, iterations=3))
    monkeypatch.setattr(scale, "SWEEPS", {"N2": sweep})
    monkeypatch.setattr(scale, "_SECONDS", 0.01)
    row = scale.bench_scale()["N2"]
    assert row["values"] == [2, 4] and len(row["sgd"]) == 2
    for name in ("smw-gn", "smw-ng", "hf", "kfac"):
        assert len(row[name]["seconds"]) == 2 and min(row[name]["seconds"]) > 0
        assert {"exponent", "predicted"} < set(row[name])
