"""Models that torch.compile has compiled: the same steps as without, and nothing is compiled anew."""

import copy
import shutil
from functools import partial

import pytest
import torch
from torch import nn

import problems
import woodbury
from checks import loop_step
from fuzz.models import Parts
from woodbury._vector import flatten

N, CLASSES = 5, 3
OPTIMIZERS = {
    "gauss-newton": woodbury.GaussNewton,
    "natural gradient": woodbury.NaturalGradient,
    "hessian-free": woodbury.HessianFree,
    "kfac": woodbury.KFAC,
    "curved": partial(woodbury.GaussNewton, search=woodbury.CurvedSearch()),
}


class Inside(nn.Module):
    """A network with a function inside that may be compiled."""

    def __init__(self, compile_function=lambda function: function):
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, CLASSES)
        self.function = compile_function(lambda z: torch.tanh(z) * torch.sin(z) + z**2)

    def forward(self, x):
        return self.head(self.drop(self.function(self.first(x))))


def written():
    torch.manual_seed(1)
    return Inside().double()


def compile_whole(backend):
    return torch.compile(written(), backend=backend)


def compile_in_place(backend):
    model = written()
    model.compile(backend=backend)
    return model


def compile_part(backend):
    model = written()
    model.first = torch.compile(model.first, backend=backend)
    model.head.compile(backend=backend)
    return model


def compile_function(backend):
    torch.manual_seed(1)
    return Inside(lambda function: torch.compile(function, backend=backend)).double()


WAYS = [compile_whole, compile_in_place, compile_part, compile_function]
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def same(model, other):
    return all(torch.equal(*both) for both in zip(model.parameters(), other.parameters(), strict=True))


def batch(samples=N):
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)


@pytest.mark.parametrize(
    "way, name", [*((compile_whole, name) for name in OPTIMIZERS), *((way, "gauss-newton") for way in WAYS[1:])]
)
def test_steps_of_a_compiled_model_are_those_of_the_model_as_written(way, name):
    """Bit for bit, with dropout: the same random numbers are drawn and repeated; `verify` and `rows` too."""
    model, plain, loss = way("aot_eager"), written(), nn.CrossEntropyLoss()
    optimizers = [OPTIMIZERS[name](own, loss) for own in (model, plain)]
    for samples in (N, N, 3):
        losses = []
        for optimizer in optimizers:
            torch.manual_seed(7)
            losses.append((optimizer.verify(*batch(samples)), optimizer.step(*batch(samples)).loss))
        assert losses[0] == losses[1]
    assert same(model, plain)
    ours, theirs = (woodbury.rows(own.eval(), loss, *batch()).dense() for own in (model, plain))
    assert torch.equal(ours, theirs)


@every_way
def test_steps_compile_nothing_and_leave_what_is_compiled(way):
    model = way("aot_eager")
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss())
    inputs, targets = batch()
    nn.CrossEntropyLoss()(model(inputs), targets).backward()
    compiled = graphs()
    assert compiled > 0
    if way is compile_function:  # which shows in a first pass only
        optimizer.step(*batch())
        assert graphs() <= compiled + 1
        compiled = graphs()
    for samples in (N, 3, N):
        optimizer.step(*batch(samples))
    nn.CrossEntropyLoss()(model(inputs), targets).backward()
    assert graphs() == compiled


def test_a_model_compiled_after_its_optimizer_was_made():
    model, plain, loss = written(), written(), nn.CrossEntropyLoss()
    optimizers = [woodbury.GaussNewton(own, loss) for own in (model, plain)]
    for turn in range(3):
        if turn == 1:
            model.compile(backend="aot_eager")
        for optimizer in optimizers:
            torch.manual_seed(turn)
            optimizer.step(*batch())
    assert graphs() == 0 and same(model, plain)


def test_names_and_state_do_not_tell_that_a_model_is_compiled():
    loss = nn.CrossEntropyLoss()
    compiled = woodbury.GaussNewton(compile_whole("aot_eager"), loss, momentum=0.5)
    plain = woodbury.GaussNewton(written(), loss, momentum=0.5)
    assert list(compiled.direction(*batch())) == list(plain.direction(*batch()))
    compiled.step(*batch())
    saved = copy.deepcopy(compiled.state_dict())
    assert list(saved["state"]["momentum"]) == [name for name, _ in written().named_parameters()]
    plain.load_state_dict(saved)
    plain.model.load_state_dict(compiled.model.state_dict())
    for optimizer in (compiled, plain):
        torch.manual_seed(3)
        optimizer.step(*batch())
    assert same(compiled.model, plain.model)


def test_a_compiled_loss_is_the_loss_inside():
    loss = nn.CrossEntropyLoss()
    expected = woodbury.GaussNewton(written().eval(), loss).direction(*batch())
    found = woodbury.GaussNewton(written().eval(), torch.compile(loss, backend="aot_eager")).direction(*batch())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_fit_takes_a_compiled_model():
    inputs = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
    results = []
    for compiled in (False, True):
        model = problems.network(1, 5, 1)
        model = torch.compile(model, backend="aot_eager") if compiled else model
        fit = woodbury.fit(model, nn.MSELoss(), (inputs, inputs.sin()), steps=3, progress=False, seed=0)
        results.append(fit.loss)
    assert results[0] == results[1]


def test_what_a_user_compiles_elsewhere_stays_compiled():
    """A step ends with the setting it found, after an error too."""
    model = compile_whole("aot_eager")
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), forward=lambda m, x: m(x) / 0)
    with pytest.raises((ValueError, ArithmeticError)):
        optimizer.step(*batch())
    assert graphs() == 0
    model(batch()[0])
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_steps_of_a_model_compiled_to_machine_code():
    model, plain, loss = compile_whole("inductor"), written(), nn.CrossEntropyLoss()
    nn.CrossEntropyLoss()(model(batch()[0]), batch()[1]).backward()
    for own in (model, plain):
        torch.manual_seed(2)
        woodbury.GaussNewton(own, loss).step(*batch())
    assert same(model, plain)


@pytest.mark.parametrize(
    "way, door",
    [(compile_whole, "watch"), (compile_whole, "closure"), (compile_in_place, "closure"), (compile_part, "watch")],
)
def test_loops_with_a_compiled_model_take_the_steps_of_the_model_as_written(way, door):
    model, plain, loss = way("aot_eager").eval(), written().eval(), nn.CrossEntropyLoss()
    optimizer = woodbury.GaussNewton(model, loss, watch=door == "watch")
    alone = woodbury.GaussNewton(plain, loss)
    (inputs, targets), compiled_call = batch(), model._compiled_call_impl

    compiled = []
    for _ in range(6):
        loop_step(optimizer, lambda: loss(model(inputs), targets).backward(), door)
        alone.step(inputs, targets)
        compiled.append(graphs())
    assert compiled[1] == compiled[-1]  # whatever torch makes of calls that are not to be compiled
    assert door == "watch" or model._compiled_call_impl is compiled_call  # again, once nobody watches
    assert same(model, plain)


def with_loss(m, inputs, labels):
    """Computes its loss itself, as models of transformers do."""
    outputs = m.net(inputs)
    return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


def test_a_watched_model_compiled_later_with_its_loss_inside():
    results = []
    for compiled in (False, True):
        model = Parts(with_loss, net=written()).eval()
        optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=True)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        for _ in range(3):
            optimizer.zero_grad()
            run(*batch())["loss"].backward()
            optimizer.step()
        results.append(flatten(dict(model.named_parameters())).detach())
    assert torch.equal(*results)
