"""What a step must not touch, that it happens as a whole or not at all, and state that moves."""

import copy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import bounds
import problems
import woodbury
from cases import every_pair
from checks import assert_same, refused, state_of, unchanged
from fuzz.models import Parts
from test_optim_contract import RICH, SECOND_ORDER, build, every_second_order
from woodbury.optimizers import OPTIMIZERS

N = 6
ROOT = Path(woodbury.__file__).parent


def batch(*shape):
    return torch.randn(N, *shape, dtype=torch.float64)


# -- buffers ---------------------------------------------------------------------------------------------


class Running(nn.Module):
    """Running statistics by torch's own layer, in place and by assignment."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()))
        self.head = nn.Linear(15, 2)

    def forward(self, x):
        with torch.no_grad():
            self.total += 1
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return self.head(self.norm(x).flatten(1))


BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "total", "largest"]


@every_pair(
    kind=SECOND_ORDER,
    settings={"whole": {}, "part": {"subset": [3, 1]}, "loader": {"full": 2}},
    accepted=[True, False],
)
def test_a_step_leaves_the_buffers_of_one_ordinary_pass_or_rejected_those_of_before(kind, settings, accepted):
    """Over its own batch, whatever the loader has."""
    model, inputs, targets = Running().double(), batch(3, 5), batch(2)
    if "full" in settings:
        settings = {"full": [(batch(3, 5), batch(2)), (inputs, targets)]}
    optimizer = OPTIMIZERS[kind](model, nn.MSELoss(), damping=1.0, accept=None if accepted else float("inf"))
    for _ in range(2):
        twin = copy.deepcopy(model)
        if accepted:
            twin(inputs)
        head = model.head.weight.detach().clone()
        with unchanged(model):
            optimizer.direction(inputs, targets, **settings)
            if "full" not in settings:
                optimizer.verify(inputs, targets, **settings)
        assert bool(optimizer.step(inputs, targets, **settings).accepted) is accepted
        after, ordinary = state_of(model), state_of(twin)
        bound = bounds.rounding(inputs.numel()) if accepted else 0
        for name in BUFFERS:  # up to the order of the samples in sums of numbers about 1
            torch.testing.assert_close(after[name], ordinary[name], rtol=bound, atol=bound)
        assert accepted or torch.equal(after["head.weight"], head)


def test_passes_that_read_the_buffers_they_change_repeat_each_other():
    """spectral_norm in training mode improves its vectors in every pass."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs, targets = batch(3), batch(2)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), damping=1.0, fallback="autograd")
    twin = copy.deepcopy(model)
    assert optimizer.verify(inputs, targets) <= bounds.of_verify(optimizer, inputs, targets)
    info = optimizer.step(inputs, targets)
    torch.testing.assert_close(info.loss, nn.functional.mse_loss(twin(inputs), targets).detach())
    kept = [{k: v for k, v in state_of(own).items() if k.endswith(("_u", "_v"))} for own in (model, twin)]
    assert len(kept[0]) == 2
    assert_same(*kept)


def test_a_large_buffer_that_passes_leave_alone_is_not_copied_again():
    def run(m, x):
        if m.writes:
            m.table += 1
        return m.head(x * m.table[:3])

    torch.manual_seed(0)
    model = Parts(run, table=nn.Buffer(torch.randn(2**18)), head=nn.Linear(3, 2), writes=False).double()
    inputs = batch(3)
    optimizer = woodbury.GaussNewton(model, nn.MSELoss())
    optimizer.step(inputs)
    model.writes = True
    with pytest.warns(RuntimeWarning, match="buffer 'table' is large"):
        optimizer.direction(inputs)


@pytest.mark.parametrize("method", [woodbury.GaussNewton, woodbury.NaturalGradient])
def test_memory_written_again_by_the_trial_pass_is_refused_before_anything_changes(method):
    def run(m, x):
        """Writes the activations into the same memory at each pass."""
        with torch.no_grad():
            m.memory.copy_(torch.tanh(m.a(x)))
        return m.b(m.memory)

    model = Parts(run, a=nn.Linear(3, 4), b=nn.Linear(4, 2), memory=nn.Buffer(torch.zeros(7, 4)))
    optimizer = method(model, nn.MSELoss(), params=list(model.b.parameters()))
    with unchanged(model.b), pytest.raises(ValueError, match="layer 'b' was changed in place"):
        optimizer.step(torch.randn(7, 3), torch.randn(7, 2))


# -- types and hooks -------------------------------------------------------------------------------------


@every_pair(name=["softmax", "pictures"], kind=["smw-gn", "smw-ng", "hf"])
def test_a_model_brought_to_another_type_after_a_step_is_seen(kind, name):
    problem, fresh = problems.make(name), problems.make(name)
    optimizer = OPTIMIZERS[kind](problem.model, problem.loss, damping=1.0)
    for dtype in (torch.float32, torch.float64):
        optimizer.step(problem.inputs.to(next(problem.model.parameters()).dtype), problem.targets)
        problem.model.to(dtype)
        fresh.model.to(dtype).load_state_dict(problem.model.state_dict())
        inputs = problem.inputs.to(dtype)
        p = optimizer.direction(inputs, problem.targets)
        expected = OPTIMIZERS[kind](fresh.model, fresh.loss, damping=1.0).direction(inputs, problem.targets)
        assert all(value.dtype == dtype for value in p.values())
        if kind != "hf":  # which starts from its last p
            assert all(torch.equal(p[name], expected[name]) for name in p)
    for dtype in (torch.float16, torch.bfloat16) if kind != "hf" else ():
        problem.model.to(dtype)
        with pytest.raises(ValueError, match=rf"cannot be solved in {dtype}: pass gram_dtype=torch.float32"):
            optimizer.step(problem.inputs.to(dtype), problem.targets)


@pytest.mark.parametrize("kind", SECOND_ORDER)
def test_parameters_of_several_types_and_hooks_on_them_are_refused_by_name(kind):
    for name in ("softmax", "pictures") if kind != "kfac" else ("softmax",):
        problem = problems.make(name)
        optimizer = OPTIMIZERS[kind](problem.model, problem.loss)
        optimizer.step(problem.inputs, problem.targets)
        first, parameter = next(problem.model.named_parameters())
        for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
            handle = register(lambda grad: None)
            with pytest.raises(ValueError, match=f"parameter '{first}' has a hook on its gradient"):
                optimizer.step(problem.inputs, problem.targets)
            handle.remove()
            assert optimizer.step(problem.inputs, problem.targets).accepted
        list(problem.model.children())[-1].float()
        message = r"parameter '\w+\.weight' is of type torch.float32, another of torch.float64"
        with pytest.raises(ValueError, match=message):
            optimizer.step(problem.inputs, problem.targets)


# -- all or nothing --------------------------------------------------------------------------------------


class Interrupter:
    """Raises KeyboardInterrupt before line `at` of the package that is run inside; counts the lines."""

    def __init__(self, at):
        self.at, self.lines = at, 0

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _call(self, frame, event, arg):
        return self._line if frame.f_code.co_filename.startswith(str(ROOT)) else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def everything(model, optimizer):
    """Parameters, buffers and state, as plain values to compare."""
    return plain({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def plain(value):
    if isinstance(value, dict):
        return {key: plain(own) for key, own in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def with_running_statistics():
    torch.manual_seed(0)
    return Running().double(), nn.MSELoss(), batch(3, 5), batch(2)


plain_chain = partial(problems.make, "softmax")
CASES = {
    "chain": (plain_chain, "smw-ng", {"curvature_samples": 4}, 37),
    "momentum": (plain_chain, "smw-gn", {"momentum": 0.5, "weight_decay": 0.1, "curvature_samples": 4}, 47),
    "buffers": (with_running_statistics, "smw-gn", {"curvature_samples": 4}, 167),
    "hf": (with_running_statistics, "hf", {"curvature_samples": 4}, 839),
    "kfac": (plain_chain, "kfac", {}, 97),
}


@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line_leaves_what_was_before_the_step_or_comes_after(case):
    make, kind, settings, stride = CASES[case]

    def prepared():
        model, loss, inputs, targets = make()
        optimizer = OPTIMIZERS[kind](model, loss, damping=woodbury.LevenbergMarquardt(), seed=0, **settings)
        with bounds.known_apart():
            for _ in range(2):  # with a momentum, and past the first looks at the model
                optimizer.step(inputs, targets)
        return model, optimizer, inputs, targets

    for _ in range(2):  # the second finds what is kept between optimizers, as all later ones do
        model, optimizer, inputs, targets = prepared()
        before = everything(model, optimizer)
        with Interrupter(at=0) as counter:
            optimizer.step(inputs, targets)
    after = everything(model, optimizer)
    assert before != after
    outcomes = set()
    # every stride-th line, and each of the last ones, where things are changed by code that all methods share
    last = counter.lines - (40 if case in ("momentum", "buffers") else 8)
    lines = sorted({*range(1, counter.lines, stride), *range(last, counter.lines + 1)})
    for at in lines:
        model, optimizer, inputs, targets = prepared()
        with pytest.raises(KeyboardInterrupt), Interrupter(at):
            optimizer.step(inputs, targets)
        left = everything(model, optimizer)
        assert left in (before, after), at
        assert not any("forward" in vars(module) for module in model.modules())
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        outcomes.add(left == after)
    assert outcomes == {True, False}


def test_rows_and_errors_leave_everything_as_it_was():
    model, loss, inputs, targets = with_running_statistics()
    optimizer = woodbury.GaussNewton(model, loss, curvature_samples=4, seed=0)
    optimizer.step(inputs, targets)
    before, left = everything(model, optimizer), []
    woodbury.rows(model, loss, inputs, targets)
    with pytest.raises(ValueError, match="do not fit outputs"):
        optimizer.step(inputs, targets[:, :1])
    assert everything(model, optimizer) == before

    def fail(*_):
        if left.pop():
            raise RuntimeError("out of order")

    model.head.register_forward_hook(fail)
    for good_passes in (0, 1, 2):
        left[:] = [True] + [False] * good_passes
        random = torch.get_rng_state()
        with pytest.raises((RuntimeError, ValueError), match="out of order"):
            optimizer.step(inputs, targets)
        assert everything(model, optimizer) == before and torch.equal(torch.get_rng_state(), random)


@every_pair(name=["softmax", "pictures"], kind=list(OPTIMIZERS))
def test_two_equal_runs_are_bit_identical(kind, name):
    ends = []
    for _ in range(2):
        problem = problems.make(name, torch.float32)
        if kind == "kfac" and name in problems.SHARED:
            pytest.skip("KFAC has no factors for parameters shared over positions")
        settings = {} if kind in ("sgd", "adam") else {"curvature_samples": 4, "seed": 3}
        optimizer = OPTIMIZERS[kind](problem.model, problem.loss, **settings)
        losses = [optimizer.step(problem.inputs, problem.targets).loss.item() for _ in range(3)]
        ends.append((losses, state_of(problem.model)))
    assert ends[0][0] == ends[1][0]
    assert_same(ends[0][1], ends[1][1])


# -- several processes -----------------------------------------------------------------------------------


def test_models_spread_over_devices_or_processes_are_refused():
    model = problems.mlp(3, 4, 2)
    with pytest.raises(ValueError, match="wrapped in DataParallel"):
        woodbury.GaussNewton(nn.DataParallel(model), nn.MSELoss())
    with pytest.raises(ValueError, match="wrapped in DataParallel"):
        woodbury.rows(nn.Sequential(nn.DataParallel(model)), nn.MSELoss(), torch.randn(2, 3))


# -- accelerate --------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    made = accelerate.Accelerator(cpu=True)
    yield made
    made.free_memory()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@every_second_order
def test_a_state_of_another_model_or_of_another_kind_of_optimizer_is_refused_when_it_is_loaded(kind):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, RICH)
    optimizer.step(problem.inputs, problem.targets)
    state = optimizer.state_dict()
    adam = torch.optim.Adam(problem.model.parameters()).state_dict()
    with refused(optimizer, "no damping: it is not that of a second-order optimizer"):
        optimizer.load_state_dict(adam)
    if "momentum" not in state["state"]:
        return
    name, own = next(iter(state["state"]["momentum"].items()))
    others = {f"other.{name}": "none of that name", name: rf"it as \({own.shape[0]}"}
    for other, message in others.items():
        wrong = {**state, "state": {**state["state"], "momentum": {other: own[:1]}}}
        with refused(optimizer, f"that of another model: its parameter '{other}' .* this model has {message}"):
            optimizer.load_state_dict(wrong)


@every_second_order
def test_accelerate_prepares_saves_and_resumes(kind, accelerator, tmp_path):
    problem = problems.make("softmax")
    optimizer = build(kind, problem, RICH, seed=3)
    for _ in range(3):
        optimizer.step(problem.inputs, problem.targets)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, prepared, _ = accelerator.prepare(problem.model, optimizer, schedule)
    assert model is problem.model and prepared.optimizer is optimizer
    accelerator.save_state(str(tmp_path))
    twin = copy.deepcopy(optimizer)
    for _ in range(2):
        optimizer.step(problem.inputs, problem.targets)
        schedule.step()
    accelerator.load_state(str(tmp_path))
    for _ in range(3):
        a = optimizer.step(problem.inputs, problem.targets)
        assert str(a.as_dict()) == str(twin.step(problem.inputs, problem.targets).as_dict())
    assert_same(state_of(problem.model), state_of(twin.model))
