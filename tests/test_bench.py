"""The measurements print what they promise; their figures are for a quiet machine, not for a test."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import __main__ as program
from benchmarks import beside, common, gpu, laplacian, peer_steps, peers, processes, scale, step, trajectories
from benchmarks.common import Network

ROOT = Path(__file__).parent.parent


@pytest.fixture
def printed(monkeypatch, capsys):
    """The JSON that a command prints as its last line, in this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else the measurements start themselves again

    def run(*arguments):
        assert program.main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


# -- times ----------------------------------------------------------------------------------------------------


def test_medians_are_those_of_steps_that_take_turns():
    now, calls = [0.0], []
    durations = {"a": iter([9, 1, 2, 60]), "b": iter([9, 5, 7, 6])}  # the first of each to warm up

    def make(name):
        def call():
            calls.append(name)
            now[0] += next(durations[name])

        return call

    steps = {name: make(name) for name in durations}
    assert common.median_seconds(steps, repeats=3, warmup=1, clock=lambda: now[0]) == {"a": 2, "b": 6}
    assert calls == ["a", "b"] + 3 * ["a", "b"]


def test_step_prints_ratios_to_sgd_of_every_network(printed, monkeypatch):
    """With a clock by which a step takes as long as its name."""

    def seconds(steps, *arguments, **options):
        for call in steps.values():
            call()
        return {name: float(len(name)) for name in steps}

    for name in ("NETWORKS", "SMALL_NETWORKS"):
        tiny = {
            key: replace(net, widths=(6, 5, net.widths[-1]), samples=8, curvature_samples=4, iterations=2)
            for key, net in getattr(step, name).items()
        }
        monkeypatch.setattr(step, name, tiny)
    monkeypatch.setattr(step, "median_seconds", seconds)
    monkeypatch.setattr(step, "medians_within", seconds)
    everywhere = {"sgd", "adam", "smw-gn", "smw-ng", "smw-ng-bd", "hf", "kfac"}
    ways = "step(x, y)", "step(closure)", "watch=True"
    doors = {f"smw-{kind}, {way}" for kind in ("ng", "gn") for way in ways}
    large, small = ["mnist", "cifar10", "webspam"], ["20-50-3", "8-50-50-1"]
    expected = dict.fromkeys(large, everywhere) | {key: everywhere | {*step.TRAINING} for key in small}
    by_doors = dict.fromkeys(large, {"sgd"} | doors)
    for options, rows in (([], expected), (["--module"], expected), (["--doors"], by_doors)):
        ratios = printed("step", "--repeats", "1", *options)
        assert {key: set(row) for key, row in ratios.items()} == rows
        for row in ratios.values():
            by_name = {name: len(name) / 3 for name in row}
            assert row == pytest.approx(by_name, rel=1e-4)  # printed with five digits


def test_laplacian_times_two_ways_to_the_same_numbers(printed, monkeypatch):
    monkeypatch.setattr(laplacian, "PROBLEMS", {(2, 4, 1): 8})
    result = printed("laplacian", "--quick")
    assert list(result) == [f"2-4-1, 8 points: {task}" for task in (*laplacian.TASKS, "rows by autograd")]
    ways = [laplacian.METHODS] * len(laplacian.TASKS) + [laplacian.WAYS]
    for row, own in zip(result.values(), ways, strict=True):
        assert set(row) == set(own) and min(row.values()) > 0


# -- growth ---------------------------------------------------------------------------------------------------


def test_predicted_cost_is_the_papers_table():
    """n = 3 x 4 + 5 x 2 = 22, N2 = 5, widths 2, 4, 2, written out."""
    network = Network((2, 4, 2), samples=9, curvature_samples=5, iterations=7)
    assert scale.predicted_cost("smw-ng", network) == 5 * 22 + 25 * 8 + 125
    assert scale.predicted_cost("smw-gn", network) == 10 * 22 + 100 * 8 + 1000
    assert scale.predicted_cost("hf", network) == 7 * 5 * 22
    assert scale.predicted_cost("kfac", network) == (8 + 64 + 8) + 5 * (4 + 16 + 4)


def test_scale_fits_every_sweep(printed, monkeypatch):
    values = (2.0, 4.0, 8.0)
    assert scale.exponent(values, [3 * value**1.7 for value in values]) == pytest.approx(1.7)
    tiny = [(samples, Network((20, 15, 4), samples, 5)) for samples in (10, 20, 40)]
    monkeypatch.setattr(scale, "SWEEPS", dict.fromkeys(scale.SWEEPS, tiny))
    monkeypatch.setattr(scale, "medians_within", lambda steps, seconds: common.median_seconds(steps, 1, warmup=0))
    sweeps = printed("scale", "--quick")
    assert set(sweeps) == {"n", "N1", "N2", "C", "width"}
    for row in sweeps.values():
        for name in scale.METHODS:
            entry = row[name]
            assert len(row["values"]) == len(row["sgd"]) == len(entry["seconds"]) == len(entry["sgd"]) == 2
            costs = scale.beyond_sgd(entry["seconds"], entry["sgd"])
            # Five digits are printed, of which a cost of a hundredth of SGD's step loses two: 2 * 1e-3 / log 2,
            # and half of the second digit after the point.
            assert entry["exponent"] == pytest.approx(scale.exponent(row["values"], costs), abs=0.01)
    assert all(sweeps["N1"][name]["predicted"] == 0 for name in scale.METHODS)
    assert "(0.00)" in scale.scale_table(sweeps)


# -- other libraries ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", peers.SMALL)
@pytest.mark.parametrize("peer", peer_steps.PEERS, ids=lambda peer: peer.name)
def test_peers_that_compute_the_same_p_agree(peer, key, monkeypatch):
    """The goal is 1e-4 in float32; rows by torch, on networks this small, have smaller rounding errors."""
    network = peers.SMALL[key]
    if peer.squares_only and network.loss_type is not nn.MSELoss:
        pytest.skip("another p")
    monkeypatch.setattr(peers, "_ROUNDS", 1)
    try:
        entry = peers.measure(peer, network, limit=30.0, warmup=network)
    except ModuleNotFoundError:
        pytest.skip(f"{peer.package} is not installed")
    assert entry["ratio"] == entry["seconds"] / entry["woodbury"] > 0
    assert entry["difference"] <= (1e-5 if peer.package is None else 1e-4)
    if peer.package is None:  # also with several outputs, at a small damping
        several = replace(peers.SMALL["classes"], loss_type=network.loss_type)
        assert peers.measure(peer, several, limit=30.0, warmup=several, damping=0.05)["difference"] <= 1e-5
    assert peers.measure(peer, network, limit=0.0, warmup=network) == {"status": "over 0 s"}


@pytest.mark.slow
def test_peers_are_measured_in_processes_and_a_missing_one_is_reported(printed, monkeypatch):
    absent = peer_steps.Peer("absent", lambda task: None, "smw-gn", "no-such-peer")
    monkeypatch.setitem(peers.ALL, "absent", absent)
    monkeypatch.setattr(peers, "_START_SECONDS", 500.0)  # on a busy machine
    names = ["--peer", "absent", "--peer", "torch.func rows, GN"]
    result = printed("peers", "--quick", "--limit", "2", "--problem", "million", *names)
    assert "absent: not installed" in peers.peer_tables(result)
    missing, timed = result["problems"]["million"]["peers"]
    assert missing["status"] == "not installed: pip install no-such-peer" and "seconds" not in missing
    assert timed["status"] == "ok" and timed["difference"] <= 1e-5 and timed["ratio"] > 0
    assert timed["memory"] >= 0


# -- another commit beside the work tree ----------------------------------------------------------------------


@pytest.mark.slow
def test_the_work_tree_is_equal_to_itself(monkeypatch, capsys):
    """Every run of every problem, each under a name of its own; `export` gives the very same files."""
    monkeypatch.setattr(beside, "export", lambda commit, folder: ROOT / "src")
    monkeypatch.setattr(beside, "_STARTS", 2)
    assert program.main(["beside", "HEAD", "--steps", "1"]) == 0
    count = sum(map(len, trajectories.CASES.values()))
    assert capsys.readouterr().out.splitlines()[-1] == f"{count} runs are equal to rounding"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_a_commit_is_exported_and_an_unknown_one_named(tmp_path):
    assert (beside.export("HEAD", tmp_path) / "woodbury" / "__init__.py").is_file()
    with pytest.raises(SystemExit, match="no-such-commit"):
        beside.export("no-such-commit", tmp_path)


# -- the command line, tables and figures ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["step", "--repeats", "0"], "--repeats: must be a whole number from 1 on, got '0'"),
        (["gpu", "tiny"], "no part 'tiny': one of small, large"),
        (["problems", "--only", "none"], "argument --only: invalid choice: 'none'"),
        (["paint"], "invalid choice: 'paint'"),
        ([], "arguments are required: COMMAND"),
    ],
)
def test_wrong_usage_is_named_and_ends_with_status_2(arguments, message, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as caught:
        program.main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="needs a CUDA device"):
            program.main(["gpu", "small"])


def test_parts_of_gpu_run_on_the_cpu_with_a_tiny_network(printed, monkeypatch):
    """What they do on a device but for its clock and its memory."""
    tiny = Network((4, 3, 2), 6, 3)
    large = partial(gpu._one_step, tiny, torch.float64)
    values = {"SMALL": tiny, "PARTS": gpu.PARTS | {"large": large, "largest": large}, "DEVICE": "cpu"}
    for name, value in (values | {"_clock": time.perf_counter, "ROUNDS": 1, "BLOCK": 1}).items():
        monkeypatch.setattr(gpu, name, value)
    answers = {"is_available": True, "get_device_name": "none", "max_memory_allocated": 0}
    answers |= {"reset_peak_memory_stats": None, "empty_cache": None}
    for name, answer in answers.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda answer=answer: answer)
    result = printed("gpu")
    assert list(result) == ["device", "torch", *gpu.PARTS]
    assert result["small"]["sgd"]["over_sgd"] == 1.0 and {"smw-gn", "smw-gn recorded"} < set(result["small"])
    assert result["large"]["parameters"] == 23 and result["large"]["residual"] < 1e-4


# -- several processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_are_timed_with_the_bytes_they_give(printed):
    """How many of them there are is counted in tests/test_processes.py."""
    result = printed("processes", "--quick")
    assert [entry["processes"] for entry in result["processes"]] == [1, 1, 2, 2]
    for entry in result["processes"]:
        parameters = 4 * (13 * 8 + 9 * 4)  # of 12-8-4 in float32
        assert entry["seconds"] > 0 and entry["ddp_bytes"] == (parameters if entry["processes"] > 1 else 0)
        assert entry["bytes"] > entry["ddp_bytes"] or entry["processes"] == 1
    assert "smw-gn" in processes.processes_table(result)
