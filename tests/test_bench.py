"""The measurements print what they promise; their figures are for a quiet machine, not for a test."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import woodbury
from benchmarks import __main__ as program
from benchmarks import common, gpu, laplacian, models, peer_steps, peers, scale, step
from benchmarks.common import Network

ROOT = Path(__file__).parent.parent
EPS = torch.finfo(torch.float64).eps


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
    for name in ("NETWORKS", "SMALL_NETWORKS"):
        tiny = {
            key: replace(net, widths=(6, 5, net.widths[-1]), samples=8, curvature_samples=4, iterations=2)
            for key, net in getattr(step, name).items()
        }
        monkeypatch.setattr(step, name, tiny)
    monkeypatch.setattr(step, "_SLOW_SECONDS", 0.0)
    seen = {}

    def median_seconds(steps, *arguments, **options):
        seconds = common.median_seconds(steps, *arguments, **options)
        seen.update({tuple(steps): seconds})
        return seconds

    monkeypatch.setattr(step, "median_seconds", median_seconds)
    ratios = printed("step", "--repeats", "1")
    assert list(ratios) == ["mnist", "cifar10", "webspam", "20-50-3", "8-50-50-1"]
    everywhere = {"sgd", "adam", "smw-gn", "smw-ng", "smw-ng-bd", "hf", "kfac"}
    for key, row in ratios.items():
        assert set(row) == everywhere | ({*step.TRAINING} if key in step.SMALL_NETWORKS else set())
        assert row["sgd"] == 1.0 and min(row.values()) > 0
    names, seconds = list(seen.items())[-1]  # of the last network, all timed together
    assert names == ("sgd", "adam", *step.INTERLEAVED, *step.TRAINING)
    for name in names:  # printed with five digits
        assert ratios["8-50-50-1"][name] == pytest.approx(seconds[name] / seconds["sgd"], rel=1e-4)


def test_small_networks_are_those_of_the_page():
    classes, regression = (step.SMALL_NETWORKS[key] for key in ("20-50-3", "8-50-50-1"))
    assert (classes.name, classes.samples, classes.loss_type) == ("20-50-3", 60, nn.CrossEntropyLoss)
    assert (regression.name, regression.samples, regression.loss_type) == ("8-50-50-1", 64, nn.MSELoss)
    for network in (classes, regression):
        model = network.build()
        outputs = network.loss()(model(network.batch()[0]), network.batch()[1])
        assert outputs.dim() == 0 and sum(p.numel() for p in model.parameters()) == network.parameters


@pytest.mark.parametrize("option", ["--doors", "--columns"])
def test_other_steps_are_timed_beside_sgd(option, printed, monkeypatch):
    monkeypatch.setattr(step, "NETWORKS", {"tiny": Network((4, 3, 2), 5, 3)})
    monkeypatch.setattr(step, "MANY_CLASSES", Network((4, 3, 20), 5, 3))
    (row,) = printed("step", "--repeats", "1", option).values()
    ways = ("step(x, y)", "step(closure)", "watch=True")
    doors = {f"{name}, {way}" for name in ("smw-ng", "smw-gn") for way in ways}
    columns = {"smw-ng", "smw-gn", *(f"smw-gn, columns={count}" for count in (16, 4, 1))}
    assert row.keys() == {"sgd"} | (doors if option == "--doors" else columns) and min(row.values()) > 0


def test_layers_in_a_module_are_the_same_layers_and_no_chain():
    network = Network((5, 4, 3), 6, 3)
    inputs, _ = network.batch()
    plain, wrapped = network.build(), replace(network, in_module=True).build()
    assert torch.equal(plain(inputs), wrapped(inputs))
    optimizers = [woodbury.NaturalGradient(model, network.loss()) for model in (plain, wrapped)]
    assert [optimizer._structure.chain is not None for optimizer in optimizers] == [True, False]


def test_laplacian_times_two_ways_to_the_same_numbers(printed, monkeypatch):
    monkeypatch.setattr(laplacian, "PROBLEMS", {(2, 4, 1): 8})
    result = printed("laplacian", "--quick")
    assert list(result) == [f"2-4-1, 8 points: {task}" for task in laplacian.TASKS]
    assert all(set(row) == set(laplacian.METHODS) and min(row.values()) > 0 for row in result.values())
    model, points = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.rand(5, 3).double()
    for ours, theirs in zip(*(derive(model, points) for derive in laplacian.METHODS.values()), strict=True):
        # weights below 1, a few terms: numbers below 100
        torch.testing.assert_close(ours, theirs, rtol=0, atol=100 * 100 * EPS)


def test_models_are_timed_beside_adam_and_need_the_fallback_only_where_it_is_named(printed, monkeypatch):
    for name, value in {"_WORDS": 5, "_LENGTH": 3, "_WIDTH": 4, "_SAMPLES": 3}.items():
        monkeypatch.setattr(models, name, value)
    result = printed("models", "--quick")
    assert list(result) == list(models.MODELS)
    assert all(set(row) == {"Adam", "NaturalGradient"} and min(row.values()) > 0 for row in result.values())
    for build, draw, settings in models.MODELS.values():
        optimizer = woodbury.NaturalGradient(build(), nn.CrossEntropyLoss(), **settings)
        optimizer.step(*draw())
        assert (optimizer._plan().findings.fallback_method is not None) == bool(settings)


# -- growth ---------------------------------------------------------------------------------------------------


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


def test_scale_fits_every_sweep(printed, monkeypatch):
    monkeypatch.setattr(scale, "medians_within", lambda steps, seconds: common.median_seconds(steps, 1, warmup=0))
    sweeps = printed("scale", "--quick")
    assert set(sweeps) == set(scale.SWEEPS) == {"n", "N1", "N2", "C", "width"}
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


@pytest.mark.parametrize("sweep", scale.SWEEPS)
def test_values_of_a_sweep_are_those_of_its_networks(sweep):
    read = {
        "n": lambda network: network.parameters,
        "N1": lambda network: network.samples,
        "N2": lambda network: network.curvature_samples,
        "C": lambda network: network.widths[-1],
        "width": lambda network: network.widths[0],
    }[sweep]
    for value, network in [*scale.QUICK[sweep], *scale.SWEEPS[sweep]]:
        assert value == read(network) and network.curvature_samples <= network.samples


# -- other libraries ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", peers.SMALL)
@pytest.mark.parametrize("peer", peer_steps.PEERS.values(), ids=lambda peer: peer.name)
def test_peers_that_compute_the_same_p_agree(peer, key, monkeypatch):
    """The goal is 1e-4 in float32; rows by torch, on networks this small, have smaller rounding errors."""
    network = peers.SMALL[key]
    if peers.describe(peer, network)["status"] != "ok":
        pytest.skip(f"{peer.package} is not installed")
    monkeypatch.setattr(peers, "_ROUNDS", 1)
    entry = peers.measure(peer, network, limit=30.0, warmup=network)
    assert entry["ratio"] == entry["seconds"] / entry["woodbury"] > 0
    if peer.computes_for(network.loss()) in (peer_steps.GN, peer_steps.NG):
        assert entry["difference"] <= (1e-5 if peer.package is None else 1e-4)
    else:
        assert entry["difference"] is None


def test_rows_by_torch_func_give_the_same_p_at_a_small_damping_and_with_several_outputs(monkeypatch):
    monkeypatch.setattr(peers, "_ROUNDS", 1)
    for loss in (nn.MSELoss, nn.CrossEntropyLoss):
        network = replace(peers.SMALL["classes"], loss_type=loss)
        for peer in [peer for peer in peer_steps.PEERS.values() if peer.package is None]:
            assert peers.measure(peer, network, limit=30.0, warmup=network, damping=0.05)["difference"] <= 1e-5


def test_the_problem_million_has_one_output_a_million_parameters_and_a_thousand_samples():
    network = peers.PROBLEMS["million"]
    assert network.widths[-1] == 1 and network.samples == network.curvature_samples == 1000
    assert network.parameters == pytest.approx(1e6, rel=0.01)


def test_peers_are_measured_in_processes_and_a_missing_one_is_reported(printed, monkeypatch, capsys):
    absent = peer_steps.Peer("absent", lambda task: None, "smw-gn", peer_steps.GN, "no-such-peer", ("no_such",))
    monkeypatch.setitem(peer_steps.PEERS, "absent", absent)
    names = ["--peer", "absent", "--peer", "torch.func rows, GN"]
    result = printed("peers", "--quick", "--limit", "2", "--problem", "million", *names)
    missing, timed = result["problems"]["million"]["peers"]
    assert missing["status"] == "not installed: pip install no-such-peer" and "seconds" not in missing
    assert timed["status"] == "ok" and timed["difference"] <= 1e-5 and timed["ratio"] > 0
    assert timed["memory"] is None or timed["memory"] >= 0


@pytest.mark.parametrize(
    "code, message, status",
    [
        (1, "RuntimeError: DefaultCPUAllocator: can't allocate memory", "out of memory"),
        (-9, "", "out of memory"),
        (1, "Traceback\nTypeError: changed its mind", "failed: TypeError: changed its mind"),
    ],
)
def test_a_peer_that_fails_is_reported(monkeypatch, code, message, status):
    done = subprocess.CompletedProcess([], code, stdout="", stderr=message)
    monkeypatch.setattr(peers.subprocess, "run", lambda *arguments, **options: done)
    assert peers._run_process("classes", "SINGD, dense", 30.0, small=True) == {"status": status}


def test_a_peer_over_the_limit_is_reported():
    peer, network = peer_steps.PEERS["torch.func rows, GN"], peers.SMALL["classes"]
    assert peers.measure(peer, network, limit=0.0, warmup=network) == {"status": "over 0 s"}


HOLDS_64_MIB = """
import torch
from benchmarks import peer_steps, peers
torch.ones(2**26)
peer = peer_steps.Peer("", lambda task: lambda: torch.ones(2**24), "smw-gn", "nothing")
print(peers.measure_memory(peer, peers.SMALL["classes"], warmup=peers.SMALL["classes"]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads the peak memory from /proc")
def test_memory_of_a_step_is_its_peak_or_none_if_freed_memory_is_held(monkeypatch):
    """A step that holds 64 MiB for a moment, in a process whose peak has been higher before."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | peers.RETURNS_MEMORY
    command = [sys.executable, "-c", HOLDS_64_MIB]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert 60 * 2**20 < int(done.stdout) < 80 * 2**20
    held, ones = [], torch.ones
    monkeypatch.setattr(peers.torch, "ones", lambda *sizes: held.append(ones(*sizes)))
    assert not peers._sees_memory()


# -- the command line, tables and figures ---------------------------------------------------------------------


def test_a_measurement_starts_a_process_with_one_thread(monkeypatch):
    calls = []

    def fake_run(command, env):
        calls.append((command, env))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("subprocess.run", fake_run)
    assert program.main(["step", "--json"]) == 3
    ((command, environment),) = calls
    assert command == [sys.executable, "-m", "benchmarks", "step", "--json"]
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["step", "--repeats", "0"], "--repeats: must be a whole number from 1 on, got '0'"),
        (["gpu", "tiny"], "no part 'tiny': one of small, large"),
        (["draw", "step", "absent.json"], "absent.json: No such file or directory"),
        (["draw", "gpu", "absent.json"], "invalid choice: 'gpu'"),
        (["paint"], "invalid choice: 'paint'"),
        ([], "arguments are required: COMMAND"),
    ],
)
def test_wrong_usage_is_named_and_ends_with_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        program.main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("part", gpu.PARTS)
def test_parts_of_gpu_run_on_the_cpu_with_a_tiny_network(part, printed, monkeypatch):
    """What they do on a device but for its clock and its memory."""
    for name in ("SMALL", "PRECISE", "MIXED"):
        monkeypatch.setattr(gpu, name, Network((4, 3, 2), 6, 3))
    large = partial(gpu._one_step, Network((4, 3, 2), 6, 3), torch.float64)
    parts = {"large": large, "largest": large, "long": partial(gpu.long, steps=1000)}
    monkeypatch.setattr(gpu, "PARTS", gpu.PARTS | parts)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "_clock", time.perf_counter)
    monkeypatch.setattr(gpu, "_medians", lambda steps, rounds, block: common.median_seconds(steps, 1, warmup=1))
    answers = {"is_available": True, "get_device_name": "none", "memory_allocated": 0, "max_memory_allocated": 0}
    answers |= {"reset_peak_memory_stats": None, "empty_cache": None}
    for name, answer in answers.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda answer=answer: answer)
    numbers = printed("gpu", part)[part]
    if part == "small":
        assert numbers["sgd"]["over_sgd"] == 1.0 and {"smw-gn", "smw-gn recorded"} < set(numbers)
    elif part in ("large", "largest"):
        assert numbers["parameters"] == 23 and numbers["residual"] < 1e-4 and numbers["ratio"] > 0
    elif part == "precision":
        assert 0 <= numbers["gram float64"]["error"] < 1
    elif part == "mixed":
        assert 0 < numbers["error_of_p"] < 1 and numbers["smw-ng bfloat16"]["ms"] > 0
    else:
        assert numbers["recorded"]["bytes_gained"] == 0 and numbers["eager"]["us_last_1000"] > 0


def test_gpu_says_that_there_is_no_device():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        program.main(["gpu", "small"])


def test_tables_are_aligned_plain_text():
    entry = {"peer": "theirs", "computes": "KFAC", "status": "ok", "seconds": 0.0123, "ratio": 2.5}
    problem = {"network": "2-1", "loss": "MSELoss", "samples": 3, "parameters": 1003}
    problem["peers"] = [entry | {"memory": None, "difference": None}, {"peer": "b", "status": "not installed"}]
    assert step.step_table({"mnist": {"sgd": 1.0, "hf": 20.25}, "webspam": {"sgd": 1.0}}).splitlines()[2:] == [
        "optimizer  mnist  webspam",
        "---------  -----  -------",
        "sgd            1        1",
        "hf          20.2        -",
    ]
    assert peers.peer_tables({"problems": {"one": problem}}).splitlines() == [
        "2-1, MSELoss, 3 samples, 1,003 parameters",
        "",
        "step    computes  seconds  x woodbury  MiB  p differs",
        "------  --------  -------  ----------  ---  ---------",
        "theirs  KFAC       0.0123         2.5    -          -",
        "b: not installed",
    ]
    assert common.ratio_table("ms", {"a": {"x": 0.5, "y": 2.0}}).splitlines()[-1].split() == [
        "a",
        "500",
        "2,000",
        "4",
    ]


def test_draw_writes_a_figure_of_each_kind(tmp_path, printed):
    pytest.importorskip("matplotlib")
    method = {"seconds": [2.0, 5.0], "sgd": [1.0, 2.0], "exponent": 1.6, "predicted": 1}
    entry = {"peer": "a", "computes": "exact GN", "status": "ok", "seconds": 2.0, "ratio": 3.0}
    missing = {"peer": "b", "computes": "exact GN", "status": "not installed: pip install b"}
    problem = {"network": "2-1", "loss": "MSELoss", "samples": 3, "parameters": 3, "peers": [entry, missing]}
    contents = {
        "step": {"mnist": {"sgd": 1.0, "smw-gn": 2.0, "hf": 20.0}, "small": {"sgd": 1.0, "smw-gn-memory": 4.0}},
        "scale": {"N2": {"values": [1, 2], "sgd": [1.0, 2.0]} | dict.fromkeys(scale.METHODS, method)},
        "peers": {"machine": {}, "problems": {"one": problem}},
    }
    for kind, content in contents.items():
        (tmp_path / "result.json").write_text("a line before\n" + json.dumps(content) + "\n")
        files = [str(tmp_path / "result.json")] * 2
        result = printed("draw", kind, *files, "--out", str(tmp_path / "figures"))
        assert result == {"figure": str(tmp_path / "figures" / f"bench-{kind}.png")}
        assert Path(result["figure"]).read_bytes().startswith(b"\x89PNG")
