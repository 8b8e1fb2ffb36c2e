"""The measurements print what they promise; their figures are for a quiet machine, not for a test."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from woodbury.bench import draw, laplacian, models, peer_steps, peers, scale, step, tables
from woodbury.bench.__main__ import main
from woodbury.bench.timing import Network

import woodbury
from woodbury.experiments.models import parameter_count

RUN = [sys.executable, "-m", "woodbury.bench"]
ALONE = os.environ | {"OMP_NUM_THREADS": "1"}  # else the measurements start themselves again


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(peers, "_ROUNDS", 2)


@pytest.fixture
def printed(monkeypatch, capsys):
    """What a command prints, in this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else the measurements start themselves again

    def run(*arguments):
        assert main(arguments) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_step_benchmark_prints_one_object(printed, monkeypatch):
    small = {
        key: replace(network, widths=(50, 40, network.widths[-1]), iterations=2)
        for key, network in step.NETWORKS.items()
    }
    monkeypatch.setattr(step, "NETWORKS", small)
    check_ratios(printed("step", "--json", "--repeats", "1"))


@pytest.mark.slow
def test_step_benchmark_starts_itself_again_with_one_thread():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [*RUN, "step", "--json", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    check_ratios(json.loads(done.stdout))


def check_ratios(ratios):
    assert set(ratios) == {"mnist", "cifar10", "webspam"}
    for row in ratios.values():
        assert row["sgd"] == 1.0
        assert {"smw-gn", "smw-ng", "smw-ng-bd", "hf", "kfac"} <= set(row)
        assert all(0 < ratio < 1000 for ratio in row.values())


def test_layers_in_a_module_are_the_same_layers_and_no_chain():
    network = Network((5, 4, 3), 6, 3, iterations=2)
    inputs, _ = network.batch()
    plain, wrapped = network.build(), replace(network, in_module=True).build()
    assert torch.equal(plain(inputs), wrapped(inputs))
    optimizers = [woodbury.NaturalGradient(model, network.loss()) for model in (plain, wrapped)]
    assert [optimizer._structure.chain is not None for optimizer in optimizers] == [True, False]


def test_laplacian_benchmark_times_two_ways_to_the_same_numbers(printed):
    (times,) = printed("laplacian", "--quick", "--json").values()
    assert set(times) == set(laplacian.METHODS)
    assert all(set(row) == set(laplacian.TASKS) and min(row.values()) > 0 for row in times.values())
    assert "ratio" in tables.laplacian_table({"problem": times})
    model, points = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.rand(5, 3).double()
    for ours, theirs in zip(*(derive(model, points) for derive in laplacian.METHODS.values()), strict=True):
        # weights below 1, a few terms: numbers below 100
        torch.testing.assert_close(ours, theirs, rtol=0, atol=100 * 100 * torch.finfo(torch.float64).eps)


def test_models_benchmark_times_a_step_beside_adams(printed):
    result = printed("models", "--quick", "--json")
    assert set(result) == set(models.MODELS)
    assert all(set(row) == {models.REFERENCE, models.OWN} and min(row.values()) > 0 for row in result.values())
    assert "4.00" in tables.model_table({"model": {models.REFERENCE: 0.5, models.OWN: 2.0}})


@pytest.mark.parametrize("name", models.MODELS)
def test_models_of_the_benchmark_need_the_fallback_only_where_it_is_named(name):
    torch.manual_seed(0)
    sizes = models.Sizes(words=5, length=3, width=4, samples=3, steps=2, features=2)
    build, draw, settings = models.MODELS[name]
    optimizer = woodbury.NaturalGradient(build(sizes), nn.CrossEntropyLoss(), **settings)
    optimizer.step(*draw(sizes))
    assert (optimizer._plan().findings.fallback_method is not None) == bool(settings)


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


def test_scale_benchmark_fits_every_sweep():
    done = subprocess.run(
        [*RUN, "scale", "--quick", "--json"], capture_output=True, text=True, check=True, env=ALONE
    )
    sweeps = json.loads(done.stdout)
    assert set(sweeps) == set(scale.SWEEPS) == {"n", "N1", "N2", "C", "width"}
    assert "width = 32" in done.stderr  # how far it has come
    for row in sweeps.values():
        assert len(row["values"]) == len(row["sgd"]) == 2
        for name in scale.METHODS:
            entry = row[name]
            assert min(entry["seconds"]) > 0 and min(entry["sgd"]) > 0 and len(entry["seconds"]) == 2
            assert {"exponent", "predicted"} < set(entry)
    assert all(sweeps["N1"][name]["predicted"] == 0 for name in scale.METHODS)


@pytest.mark.parametrize("sweep", scale.SWEEPS)
def test_values_of_a_sweep_are_those_of_its_networks(sweep):
    read = {
        "n": lambda network: sum(parameter.numel() for parameter in network.build().parameters()),
        "N1": lambda network: network.samples,
        "N2": lambda network: network.curvature_samples,
        "C": lambda network: network.widths[-1],
        "width": lambda network: network.widths[0],
    }[sweep]
    for value, network in [*scale.QUICK[sweep], *scale.SWEEPS[sweep]]:
        assert value == read(network)
        assert network.curvature_samples <= network.samples


PLAIN = [peer for peer in peer_steps.PEERS.values() if peer.package is None]


@pytest.mark.parametrize("key", peers.SMALL)
@pytest.mark.parametrize("peer", PLAIN, ids=lambda peer: peer.versus)
def test_rows_by_torch_func_give_the_same_p(peer, key):
    """The goal is 1e-4 in float32; networks this small have smaller rounding errors."""
    entry = peers.measure(peers.SMALL[key], peer, limit=30.0, warmup=peers.SMALL[key])
    assert entry["difference"] <= 1e-5
    assert entry["seconds"] > 0 and entry["woodbury"] > 0 and entry["rounds"] >= 1


def test_rows_by_torch_func_give_the_same_p_at_a_small_damping_and_with_several_outputs():
    for loss in (nn.MSELoss, nn.CrossEntropyLoss):
        problem = replace(peers.SMALL["classes"], loss=loss, damping=0.05)
        for peer in PLAIN:
            assert peers.measure(problem, peer, limit=30.0, warmup=problem)["difference"] <= 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", peers.SMALL)
@pytest.mark.parametrize(
    "peer", [peer for peer in peer_steps.PEERS.values() if peer.package is not None], ids=lambda peer: peer.name
)
def test_installed_peers_that_compute_the_same_p_agree(peer, key):
    problem = peers.SMALL[key]
    if peers.describe(peer, problem)["status"] != "ok":
        pytest.skip(f"{peer.package} is not installed")
    entry = peers.measure(problem, peer, limit=30.0, warmup=problem)
    if peer.computes_for(problem.loss()) in (peer_steps.GN, peer_steps.NG):
        assert entry["difference"] <= 1e-4
    else:
        assert entry["difference"] is None


def test_the_problem_million_has_one_output_a_million_parameters_and_a_thousand_samples():
    problem = peers.PROBLEMS["million"]
    assert problem.widths[-1] == 1 and problem.samples == 1000
    parameters = parameter_count(problem.widths)
    assert parameters == pytest.approx(1e6, rel=0.01)
    assert sum(p.numel() for p in problem.task(problem.batch()).model.parameters()) == parameters


def test_a_missing_peer_is_reported_and_the_rest_measured(monkeypatch):
    absent = peer_steps.Peer(
        "absent", lambda task: None, "smw-gn", peer_steps.GN, "no-such-peer", ("no_such_peer",)
    )
    monkeypatch.setitem(peer_steps.PEERS, "absent", absent)
    monkeypatch.setattr(peers, "_run_process", peers.try_measure)  # in this process
    monkeypatch.setattr(peers, "_limit_memory", lambda: None)  # it would hold for the other tests too
    said = []
    names = ["absent", "woodbury.GaussNewton"]
    result = peers.bench_peers(limit=30.0, names=names, problems=["classes"], small=True, say=said.append)
    missing, own = result["problems"]["classes"]["peers"]
    assert missing["status"] == "not installed: pip install no-such-peer" and "seconds" not in missing
    assert own["status"] == "ok" and own["difference"] == 0 and own["ratio"] > 0
    assert any("not installed" in line for line in said)


@pytest.mark.parametrize(
    "error, status",
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (MemoryError(), "out of memory"),
        (TypeError("changed\nits mind"), "failed: TypeError: changed its mind"),
    ],
)
def test_a_peer_that_fails_is_reported(monkeypatch, error, status):
    def make(task):
        raise error

    monkeypatch.setitem(peer_steps.PEERS, "broken", peer_steps.Peer("broken", make, "smw-gn", peer_steps.GN))
    monkeypatch.setattr(peers, "_limit_memory", lambda: None)  # it would hold for the other tests too
    assert peers.try_measure("classes", "broken", 30.0, small=True) == {"status": status}


def test_a_peer_over_the_limit_is_reported():
    entry = peers.measure(peers.SMALL["classes"], PLAIN[0], limit=0.0, warmup=peers.SMALL["classes"])
    assert entry == {"status": "over 0 s"}


HOLDS_64_MIB = """
import torch
from woodbury.bench import peer_steps, peers
torch.ones(2**26)
peer = peer_steps.Peer("", lambda task: lambda: torch.ones(2**24), "smw-gn", "nothing")
problem = peers.SMALL["classes"]
print(peers.measure_memory(problem, peer, warmup=problem))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads the peak memory from /proc")
def test_memory_of_a_step_is_its_peak():
    """A step that holds 64 MiB for a moment, in a process whose peak has been higher before."""
    command, environment = [sys.executable, "-c", HOLDS_64_MIB], ALONE | peers.RETURNS_MEMORY
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert 60 * 2**20 < int(done.stdout) < 80 * 2**20


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads the peak memory from /proc")
def test_memory_is_not_reported_if_the_allocator_holds_on_to_what_is_freed(monkeypatch):
    tensors = []
    ones = torch.ones

    def make_and_hold(*sizes):
        tensors.append(ones(*sizes))
        return tensors[-1]

    monkeypatch.setattr(peers.torch, "ones", make_and_hold)
    assert not peers._sees_memory()


def test_peers_benchmark_prints_one_object(printed):
    """Two processes measure the first of these, one its time and one its memory."""
    names = ["--peer", "torch.func rows, GN", "--peer", "torch-levenberg-marquardt"]
    result = printed("peers", "--quick", "--json", "--limit", "30", "--problem", "million", *names)
    problem = result["problems"]["million"]
    assert [entry["peer"] for entry in problem["peers"]] == ["torch.func rows, GN", "torch-levenberg-marquardt"]
    assert problem["peers"][0]["difference"] <= 1e-5
    assert problem["peers"][0]["memory"] is None or problem["peers"][0]["memory"] >= 0
    assert problem["peers"][1]["status"] == "ok" or "pip install torch-levenberg" in problem["peers"][1]["status"]


def test_tables_are_aligned_plain_text():
    entry = {"peer": "theirs", "computes": "KFAC", "status": "ok", "seconds": 0.0123, "ratio": 2.5}
    problem = {"network": "2-1", "loss": "MSELoss", "samples": 3, "parameters": 1003}
    problem["peers"] = [entry | {"memory": None, "difference": None}, {"peer": "b", "status": "not installed"}]
    sweeps = {"N2": {"values": [16, 2048], "sgd": [0.1, 0.2], "smw-ng": {"exponent": 1.23, "predicted": 1.0}}}
    shown = {
        tables.step_table({"mnist": {"sgd": 1.0, "hf": 20.0}, "webspam": {"sgd": 1.0}}): """
CPU time of a step divided by that of torch.optim.SGD

optimizer  mnist  webspam
---------  -----  -------
sgd         1.00     1.00
hf         20.00        -
""",
        tables.scale_table(sweeps): """
Exponent of the cost beyond SGD's step: measured (from the paper's cost table)

                    N2
optimizer  16 to 2,048
---------  -----------
smw-ng     1.23 (1.00)
""",
        tables.peer_tables({"problems": {"one": problem}}): """
2-1, MSELoss, 3 samples, 1,003 parameters

step    computes  seconds  x woodbury  MiB  p differs
------  --------  -------  ----------  ---  ---------
theirs  KFAC       0.0123         2.5    -          -
b: not installed
""",
    }
    for table, expected in shown.items():
        assert table == expected.strip("\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["step", "--repeats", "none"], "--repeats: must be a whole number from 1 on, got 'none'"),
        (["peers", "--limit", "-1"], "--limit: must be a positive number, got '-1'"),
        (["peers", "--limit", "long"], "--limit: must be a positive number, got 'long'"),
        (["gpu", "tiny"], "no part 'tiny': one of small, large"),
        (["paint"], "invalid choice: 'paint'"),
    ],
)
def test_wrong_usage_is_named_and_ends_with_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_without_a_command_there_is_help_and_status_2(capsys):
    assert main([]) == 2
    printed = capsys.readouterr().err
    assert all(name in printed for name in ("step", "scale", "peers", "laplacian", "gpu", "draw"))


def test_draw_writes_a_figure_for_each_kind(tmp_path):
    pytest.importorskip("matplotlib")
    methods = {
        name: {"seconds": [2.0, 5.0], "sgd": [1.0, 2.0], "exponent": 1.6, "predicted": 1} for name in ("hf",)
    }
    entry = {"peer": "a", "computes": "exact GN", "status": "ok", "seconds": 2.0, "ratio": 3.0}
    missing = {"peer": "b", "computes": "exact GN", "status": "not installed: pip install b"}
    problem = {"network": "2-1", "loss": "MSELoss", "samples": 3, "parameters": 3, "peers": [entry, missing]}
    contents = {
        "step": {"mnist": {"sgd": 1.0, "smw-gn": 2.0, "hf": 20.0}},
        "again": {"mnist": {"sgd": 1.0, "smw-gn": 2.2, "hf": 25.0}},
        "scale": {"N2": {"values": [1, 2], "sgd": [1.0, 2.0]} | methods},
        "peers": {"machine": {}, "problems": {"one": problem}},
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    written = draw.draw([tmp_path / f"{name}.json" for name in contents], tmp_path / "figures")
    assert [path.name for path in written] == ["bench-step.png", "bench-scale.png", "bench-peers.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_draw_raises_an_error_for_other_json(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}')
    with pytest.raises(ValueError, match="not the JSON of bench"):
        draw.draw([path], tmp_path)


def test_doors_benchmark_times_the_same_step_three_ways(monkeypatch):
    monkeypatch.setattr(step, "NETWORKS", {"tiny": step.Network((4, 3, 2), 5, 3, iterations=1)})
    (row,) = step.bench_doors(1).values()
    ways = ("step(x, y)", "step(closure)", "watch=True")
    assert row.keys() == {"sgd", *(f"{name}, {way}" for name in ("smw-ng", "smw-gn") for way in ways)}
    assert all(ratio > 0 for ratio in row.values())
