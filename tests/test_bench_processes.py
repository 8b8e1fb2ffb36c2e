"""`python -m benchmarks processes`: what is counted, the phases, and the fit of the cost model."""

import itertools
import json
import math

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import processes
from benchmarks.processes import METHODS, NETWORKS, QUICK, efficiency, predict, scaled, sizes_of

MODEL = {
    "fixed": 3e-3,
    "pass": 2e-10,
    "gram": 4e-10,
    "solve": 5e-10,
    "latency": 2e-4,
    "byte": 3e-9,
    "messages": 20.0,
}


def entries_of(model, cores):
    """What would be measured if the model were the truth."""
    entries = []
    for (name, network), method, count in itertools.product(NETWORKS.items(), METHODS, processes.COUNTS):
        parts = predict(model, sizes_of(network, method), count, cores)
        phases = {
            "passes and rows": parts["fixed"] + parts["passes"],
            "Gram": parts["Gram"],
            "solve": parts["solve"],
        }
        phases |= {"sum p": parts["bytes"], "agree": parts["latency"]} if count > 1 else {}
        entry = {"network": name, "method": method, "processes": count, "phases": phases}
        entries.append({**entry, "seconds": sum(parts.values()), "messages": 20.0 * (count > 1)})
    return entries


def test_the_fit_finds_the_model_that_made_the_measurements():
    fitted = processes.fit_model(entries_of(MODEL, cores=2), NETWORKS, cores=2)
    for name, value in MODEL.items():  # at most two unknowns at once, with columns scaled alike
        assert fitted[name] == pytest.approx(value, rel=1e-9)
    assert fitted["largest_error"] < 1e-9


def test_least_squares_are_those_over_all_x_that_are_not_negative():
    torch.manual_seed(0)
    matrix, goal = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    found = torch.tensor(processes.least_squares(matrix.tolist(), goal.tolist()), dtype=torch.float64)
    slope = matrix.T @ (matrix @ found - goal)
    # the conditions of Karush, Kuhn and Tucker, up to rounding of numbers of size 1
    assert (found >= 0).all() and (slope >= -1e-12).all() and (found * slope).abs().max() < 1e-12
    assert (found == 0).any()  # else nothing was tried


def test_an_efficient_batch_is_the_smallest_that_reaches_one_half():
    network = NETWORKS["mnist"]
    for rule in processes.RULES:
        found = processes.smallest_batch(MODEL, network, "smw-ng", rule, 8)
        if found is not None:
            assert efficiency(MODEL, scaled(network, "smw-ng", rule, found), 8) >= 0.5
            assert efficiency(MODEL, scaled(network, "smw-ng", rule, found // 2), 8) < 0.5
    assert processes.smallest_batch(MODEL, network, "smw-ng", "N2 fixed", 8) is not None
    assert efficiency(MODEL, sizes_of(network, "smw-gn"), 1) == 1.0


def test_time_inside_another_phase_counts_there_alone():
    watch = processes.Stopwatch()

    def step():
        with watch.phase("outer"):
            watch.messages += 1
            with watch.phase("inner"):
                watch.messages += 10
            watch.messages += 2

    totals = watch.measure(step)
    assert {phase: own[2] for phase, own in totals.items()} == {"other": 0, "outer": 3, "inner": 10}
    assert all(own[0] >= 0 for own in totals.values())


@pytest.mark.slow
def test_the_bytes_that_are_counted_are_those_of_the_formula(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert program.main(["processes", "--quick", "--json"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    result = json.loads(line)
    assert [entry["processes"] for entry in result["processes"]] == [1, 1, 2, 2]
    for entry in result["processes"]:
        sizes, count = sizes_of(QUICK[entry["network"]], entry["method"]), entry["processes"]
        assert math.isclose(
            entry["seconds"], sum(entry["phases"].values()), rel_tol=1e-4
        )  # five digits are printed
        if count == 1:
            assert sum(entry["bytes"].values()) == entry["ddp_bytes"] == entry["messages"] == 0
            continue
        assert entry["bytes"]["sum p"] == entry["ddp_bytes"] == 4 * sizes.parameters
        assert entry["bytes"]["gather Gram"] == 4 * sizes.factor_rows * sizes.columns_of_gram(count) / count
        # and the names of what is gathered, under a kilobyte
        assert 0 <= entry["bytes"]["gather rows"] - sizes.bytes_of_rows() / count < 1000
    shown = processes.processes_tables(result)
    assert "smw-gn" in shown and "1024 devices" in shown
    pytest.importorskip("matplotlib")
    (tmp_path / "result.json").write_text(line)
    assert program.main(["draw", "processes", str(tmp_path / "result.json"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "bench-processes.png").read_bytes().startswith(b"\x89PNG")
