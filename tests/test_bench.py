"""`woodbury.bench step` prints what it promises; the ratios are for a quiet machine, not for a test."""

import json
import os
import subprocess
import sys

import pytest


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
