"""State that moves: to other devices, into torch.distributed.checkpoint, through accelerate."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp

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
def test_the_generator_may_come_from_another_device(kind, how):
    problem, optimizer = trained(kind)
    other, resumed = untrained(kind, problem.model)
    saved = copy.deepcopy(optimizer.state_dict())
    elsewhere = Elsewhere.hiding(saved["state"]["generator"])
    if how == "loaded":
        saved["state"]["generator"] = elsewhere
    resumed.load_state_dict(saved)
    if how == "moved in place":
        resumed.state["generator"] = elsewhere
    assert_goes_on(problem, optimizer, other, resumed)
    assert type(resumed.state["generator"]) is torch.Tensor


@every_second_order
def test_a_state_dict_is_not_changed_by_loading_it(kind):
    problem, optimizer = trained(kind)
    saved = copy.deepcopy(optimizer.state_dict())
    _, resumed = untrained(kind, problem.model)
    kept = {**saved, "state": dict(saved["state"])}
    resumed.load_state_dict(saved)
    assert saved["state"].keys() == kept["state"].keys()
    assert all(saved["state"][key] is value for key, value in kept["state"].items())


OPTIONS = {
    "plain": {},
    "full": {"full_state_dict": True},
    "full, offloaded": {"full_state_dict": True, "cpu_offload": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_second_order
@every_option
def test_the_state_goes_through_torch_checkpoints(kind, options):
    problem, optimizer = trained(kind)
    own = dcp.StateDictOptions(**options)
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(problem.model, optimizer, options=own))
    assert set(saved["state"]) == {name for name, _ in problem.model.named_parameters()}
    other, resumed = untrained(kind, problem.model)
    dcp.set_optimizer_state_dict(other.model, resumed, saved, options=own)
    assert set(resumed.state) == set(optimizer.state)
    assert_goes_on(problem, optimizer, other, resumed)


@every_second_order
def test_the_state_goes_through_torch_checkpoints_on_disk(kind, tmp_path):
    problem, optimizer = trained(kind)
    checkpoint.save(_both(problem.model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    other, resumed = untrained(kind, problem.model)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    saved = _both(other.model, resumed)
    checkpoint.load(saved, checkpoint_id=tmp_path, no_dist=True)
    dcp.set_state_dict(other.model, resumed, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    assert_goes_on(problem, optimizer, other, resumed)


def _both(model, optimizer):
    parameters, state = dcp.get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": state}


@every_second_order
def test_torch_checkpoints_of_groups_and_frozen_parameters(kind):
    def groups(model):
        model[0].weight.requires_grad_(False)
        return [{"params": list(model[0].parameters()), "lr": 0.25}, {"params": list(model[2].parameters())}]

    def make():
        problem = problems.make("softmax")
        return problem, build(kind, problem, {"curvature_samples": 4}, params=groups(problem.model))

    problem, optimizer = make()
    for _ in range(STEPS):
        optimizer.step(problem.inputs, problem.targets)
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(problem.model, optimizer))
    other, resumed = make()
    other.model.load_state_dict(problem.model.state_dict())
    resumed.param_groups[0]["lr"] = 0.0
    dcp.set_optimizer_state_dict(other.model, resumed, saved)
    assert [group["lr"] for group in resumed.param_groups] == [0.25, optimizer.param_groups[1]["lr"]]
    assert_goes_on(problem, optimizer, other, resumed)


@every_second_order
def test_no_one_else_gets_the_state_by_parameter(kind):
    """Beside a torch checkpoint the state dict is the one by names, and holds the same objects."""
    problem, optimizer = trained(kind)
    before = optimizer.state_dict()["state"]
    dcp.get_optimizer_state_dict(problem.model, optimizer)
    after = optimizer.state_dict()["state"]
    assert list(before) == list(after) and all(before[key] is after[key] for key in before)
    assert set(optimizer.state) == set(before)


def test_what_torch_cannot_flatten_it_refuses():
    problem, optimizer = trained("smw-gn")
    with pytest.raises(NotImplementedError, match="Flattening"):
        dcp.get_optimizer_state_dict(
            problem.model, optimizer, options=dcp.StateDictOptions(flatten_optimizer_state_dict=True)
        )


@every_second_order
def test_the_state_loads_by_weights_alone_on_a_named_device(kind):
    problem, optimizer = trained(kind)
    content = io.BytesIO()
    torch.save(optimizer.state_dict(), content)
    content.seek(0)
    other, resumed = untrained(kind, problem.model)
    resumed.load_state_dict(torch.load(content, map_location="cpu", weights_only=True))
    assert_goes_on(problem, optimizer, other, resumed)


# -- accelerate --------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    made = accelerate.Accelerator(cpu=True)
    yield made
    made.free_memory()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@every_second_order
def test_a_prepared_optimizer_takes_the_same_steps(kind, accelerator):
    problem, optimizer = trained(kind)
    other, twin = untrained(kind, problem.model)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model, prepared = accelerator.prepare(other.model, twin)
    assert model is other.model and prepared.optimizer is twin
    assert_goes_on(problem, optimizer, other, twin)


@every_second_order
def test_accelerate_saves_and_resumes(kind, accelerator, tmp_path):
    problem, optimizer = trained(kind)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    accelerator.prepare(problem.model, optimizer, schedule)
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


def test_torch_checkpoints_of_a_prepared_optimizer(accelerator):
    problem, optimizer = trained("smw-gn")
    model, prepared = accelerator.prepare(problem.model, optimizer)
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, prepared))
    other, resumed = untrained("smw-gn", problem.model)
    dcp.set_optimizer_state_dict(other.model, resumed, saved)
    assert_goes_on(problem, optimizer, other, resumed)


def test_torch_checkpoints_of_a_compiled_model():
    problem, optimizer = trained("smw-gn")
    compiled = torch.compile(problem.model, backend="eager")
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(compiled, optimizer))
    assert set(saved["state"]) == {name for name, _ in problem.model.named_parameters()}
    other, resumed = untrained("smw-gn", problem.model)
    assert isinstance(other.model, nn.Module)
    dcp.set_optimizer_state_dict(other.model, resumed, saved)
    assert_goes_on(problem, optimizer, other, resumed)
