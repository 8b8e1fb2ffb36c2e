"""State that moves: to other devices, through files, through accelerate."""

import copy

import pytest
import torch

import problems
from test_optim_contract import RICH, assert_same, build, every_second_order, state_of

STEPS = 3


def trained(kind, **options):
    """A problem and its optimizer, with all the state there can be."""
    problem = problems.make("softmax")
    optimizer = build(kind, problem, RICH, {"seed": 3}, **options)
    for _ in range(STEPS):
        optimizer.step(problem.inputs, problem.targets)
    return problem, optimizer


def untrained(kind, model, **options):
    """The same, before any step, with the parameters of a model."""
    problem = problems.make("softmax")
    problem.model.load_state_dict(model.state_dict())
    return problem, build(kind, problem, RICH, {"seed": 99}, **options)


def assert_goes_on(problem, optimizer, other, resumed):
    for _ in range(STEPS):
        a = optimizer.step(problem.inputs, problem.targets)
        b = resumed.step(other.inputs, other.targets)
        assert str(a.as_dict()) == str(b.as_dict())
    assert_same(state_of(problem.model), state_of(other.model))


class Elsewhere(torch.Tensor):
    """A stand-in for a tensor on another device: its numbers are seen by `cpu` and `to` alone."""

    @staticmethod
    def hiding(tensor):
        hidden = torch.zeros_like(tensor).as_subclass(Elsewhere)
        hidden.shown = tensor
        return hidden

    def cpu(self):
        return self.shown

    def to(self, *args, **kwargs):
        return self.shown.to(*args, **kwargs)


@every_second_order
@pytest.mark.parametrize("how", ["loaded", "moved in place"])
def test_the_generator_may_come_from_another_device_and_loading_changes_no_state_dict(kind, how):
    problem, optimizer = trained(kind)
    other, resumed = untrained(kind, problem.model)
    saved = copy.deepcopy(optimizer.state_dict())
    elsewhere = Elsewhere.hiding(saved["state"]["generator"])
    if how == "loaded":
        saved["state"]["generator"] = elsewhere
    kept = dict(saved["state"])
    resumed.load_state_dict(saved)
    assert saved["state"].keys() == kept.keys()
    assert all(saved["state"][key] is value for key, value in kept.items())
    if how == "moved in place":
        resumed.state["generator"] = elsewhere
    assert_goes_on(problem, optimizer, other, resumed)
    assert type(resumed.state["generator"]) is torch.Tensor


# -- accelerate --------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    made = accelerate.Accelerator(cpu=True)
    yield made
    made.free_memory()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@every_second_order
def test_accelerate_prepares_saves_and_resumes(kind, accelerator, tmp_path):
    problem, optimizer = trained(kind)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, prepared, _ = accelerator.prepare(problem.model, optimizer, schedule)
    assert model is problem.model and prepared.optimizer is optimizer
    accelerator.save_state(str(tmp_path))
    twin = copy.deepcopy(optimizer)
    for _ in range(2):
        optimizer.step(problem.inputs, problem.targets)
        schedule.step()
    accelerator.load_state(str(tmp_path))
    for _ in range(STEPS):
        a = optimizer.step(problem.inputs, problem.targets)
        assert str(a.as_dict()) == str(twin.step(problem.inputs, problem.targets).as_dict())
    assert_same(state_of(problem.model), state_of(twin.model))
