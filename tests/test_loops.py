"""Whatever a training loop does between its model's call and `step`: the step is that of its loss, or an error.

A case is what a loop does with the outputs, and the same as a function of the outputs, from which the dense step
follows by autograd; or a loop that no step on a batch can stand for, which must raise and leave the parameters.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import problems
import reference
import woodbury
from cases import every_pair
from checks import loop_step, refused, silence, told
from fuzz.dense import dense_parameters
from fuzz.loops import DAMPING, ENDINGS, LOSSES, STEPS, WAY_OUT, multiply
from fuzz.loops import Loop as RandomLoop
from fuzz.loops import main as run_loops
from fuzz.models import Parts

N, CLASSES = 8, 3


def network():
    return problems.network(4, 5, CLASSES, seed=1)


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator).double(), torch.rand(N, CLASSES, generator=generator).double()


STILL = {"damping": woodbury.Constant(DAMPING), "guard": None}


class Loop:
    """A model with its data, as a loop has them."""

    def __init__(self, how, method=woodbury.GaussNewton, model=None, dtype=torch.float64, **settings):
        self.how, self.model = how, network().to(dtype) if model is None else model
        self.inputs, self.targets = (own.to(dtype) for own in batch())
        self.optimizer = method(self.model, None, watch=how == "watch", **(settings or STILL))

    def outputs(self):
        return self.model(self.inputs)

    def step(self, body):
        def backward():
            body(self)

        return loop_step(self.optimizer, backward, self.how)


def plain(loop):
    F.mse_loss(loop.outputs(), loop.targets).backward()


def squares(y, t):
    return (y - t).square().mean()


def of_loss(loss):
    """A loop that sends a loss of the outputs back."""

    def body(loop):
        loss(loop.outputs(), loop.targets).backward()

    return body


def after_backward(change):
    def body(loop):
        plain(loop)
        change(loop)

    return body


def uneven(loop):
    for part in (slice(0, 3), slice(3, N)):
        loss = F.mse_loss(loop.model(loop.inputs[part]), loop.targets[part])
        (loss * len(loop.inputs[part]) / N).backward()


def by_weights(loop):
    values = (loop.outputs() - loop.targets).square().mean(1)
    values.backward(gradient=torch.arange(N).double() / N)


def hooked(change):
    def body(loop):
        y = loop.outputs()
        y.register_hook(change)
        F.mse_loss(y, loop.targets).backward()

    return body


def scaler(scale):
    def body(loop):
        own = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        own.scale(F.mse_loss(loop.outputs(), loop.targets)).backward()
        own.unscale_(loop.optimizer)

    return body


def forward_hook(loop):
    """Registered after the optimizer was made: part of the model."""
    loop.model.register_forward_hook(lambda module, args, outputs: outputs * 2)
    plain(loop)


def pre_hook(loop):
    loop.model.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    plain(loop)


RIGHT = {
    "in place after the loss": (
        of_loss(lambda y, t: (F.cross_entropy(y, t.softmax(1)), y.detach().zero_())[0]),
        lambda y, t: F.cross_entropy(y, t.softmax(1)),
    ),
    "in-place residuals": (of_loss(lambda y, t: y.sub_(t).pow_(2).mean()), squares),
    "uneven micro-batches": (uneven, squares),
    "weights of backward": (by_weights, lambda y, t: ((y - t).square().mean(1) * torch.arange(N) / N).sum()),
    "scaled hook": (hooked(lambda g: 2.5 * g), lambda y, t: 2.5 * squares(y, t)),
    "forward hook": (forward_hook, lambda y, t: squares(2 * y, t)),
    "hook that doubles the inputs": (pre_hook, squares),
}


def change_one(loop):
    loop.model[0].weight.grad.mul_(2)


def change_parameters(loop):
    with torch.no_grad():
        loop.model[2].weight.mul_(1.01)


def new_targets(change):
    def body(loop):
        kept = loop.targets
        loop.targets = kept.clone()
        plain(loop)
        change(loop.targets)
        loop.targets = kept

    return body


def module_hook(loop):
    twice = lambda m, given, got: tuple(2 * g for g in given if g is not None)  # noqa: E731
    handle = loop.model[0].register_full_backward_hook(twice)
    loop.inputs = loop.inputs.clone().requires_grad_()
    handle2 = loop.model[2].register_full_backward_hook(lambda m, given, got: (2 * given[0],))
    plain(loop)
    handle.remove(), handle2.remove()


def some_inputs(loop):
    F.mse_loss(loop.outputs(), loop.targets).backward(inputs=[loop.model[0].weight, loop.model[0].bias])


REFUSED = {
    "some inputs": some_inputs,
    "unseen call": after_backward(lambda loop: loop.model.forward(loop.inputs).square().mean().backward()),
    "targets changed": new_targets(lambda t: t.add_(1)),
    "targets changed unseen": new_targets(lambda t: t.data.add_(1)),
    "targets changed by NumPy": new_targets(lambda t: t.numpy().__iadd__(1)),
    "hook on modules": module_hook,
}
HOW, DTYPES = ["watch", "closure"], [torch.float32, torch.float64]
every_how = pytest.mark.parametrize("how", HOW)


def two_steps(loop, since):
    """Ordinary steps before the case: the steps after the first are not all compared."""
    for _ in range(since - 1):
        loop.step(plain)


def check_dense(expected, condition, model, steps=1, dtype=torch.float64):
    bound = bounds.rounding(len(expected), condition, steps, dtype)
    assert reference.relative_error(reference.theta(model), expected) <= bound


@every_pair(name=list(RIGHT), since=[1, 3], how=HOW)
def test_a_step_is_that_of_the_loss_of_the_loop(name, since, how):
    body, loss = RIGHT[name]
    loop = Loop(how)
    two_steps(loop, since)
    inputs = 2 * loop.inputs if body is pre_hook else loop.inputs
    expected, condition = dense_parameters(loop.model, inputs, lambda y: loss(y, loop.targets), DAMPING)
    with silence():
        loop.step(body)
    check_dense(expected, condition, loop.model, since)


@every_pair(name=list(REFUSED), since=[1, 3], how=HOW)
def test_what_no_step_can_stand_for_raises_and_changes_nothing(name, since, how):
    loop = Loop(how)
    two_steps(loop, since)
    with refused(loop.model, WAY_OUT):
        loop.step(REFUSED[name])


TABLES = {"nothing": STEPS, "mse": LOSSES, "backward": ENDINGS}  # by what is ordinary


@every_pair(own=[name for table in TABLES.values() for name in table], since=[1, 3], how=HOW)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_expression_of_the_random_loops_is_a_dense_step_or_raises(own, since, how):
    names = [own if own in table else ordinary for ordinary, table in TABLES.items()]
    with silence(RuntimeWarning):
        assert RandomLoop(1, names, ["mse"] * (since - 1), how).run() in ("right", "raised as it must")


@pytest.mark.filterwarnings("ignore")
def test_random_loops_take_dense_steps_or_raise():
    """A short form of `make fuzz-loops`."""
    results = run_loops(count=40, seed=5000)
    assert not [result for result in results if result.startswith("WRONG")]
    assert results["right"] >= 10 and results["raised as it must"] >= 10


def discriminator():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(CLASSES, 4), nn.LeakyReLU(0.2, inplace=True), nn.Linear(4, 1)).double()


def logistic(y, label):
    return F.binary_cross_entropy_with_logits(y, torch.full_like(y, label))


@pytest.mark.parametrize("detached", [True, False])
def test_two_watched_models_of_which_one_sees_the_outputs_of_the_other(detached):
    """A generative adversarial network: both steps are dense ones, whatever gradients the other leaves."""
    settings = {**STILL, "watch": True}
    maker, judge = network(), discriminator()
    of_maker = woodbury.GaussNewton(maker, None, **settings)
    of_judge = woodbury.GaussNewton(judge, None, **settings)
    noise, real = batch()
    for _ in range(3):
        made = maker(noise)
        of_judge.zero_grad()
        logistic(judge(real), 1.0).backward()
        logistic(judge(made.detach() if detached else made.clone()), 0.0).backward(retain_graph=not detached)
        seen = torch.cat([real, made.detach().as_subclass(torch.Tensor)])
        expected = dense_parameters(judge, seen, lambda y: logistic(y[:N], 1.0) + logistic(y[N:], 0.0), DAMPING)
        of_judge.step()
        check_dense(*expected, judge)
        of_maker.zero_grad()
        fixed = copy.deepcopy(judge)
        expected = dense_parameters(maker, noise, lambda y, fixed=fixed: logistic(fixed(y), 1.0), DAMPING)
        logistic(judge(maker(noise)), 1.0).backward()
        of_maker.step()
        check_dense(*expected, maker)


def test_a_watched_model_inside_another_and_two_optimizers_of_one_model():
    settings = {**STILL, "watch": True}
    whole = nn.Sequential(network(), nn.Tanh(), nn.Linear(CLASSES, CLASSES).double())
    inside, head = whole[0], whole[1:]
    optimizers = [
        (woodbury.GaussNewton(inside, None, **settings), inside, lambda y: copy.deepcopy(head)(y)),
        (woodbury.GaussNewton(whole, None, **settings), whole, lambda y: y),
        (woodbury.GaussNewton(whole, None, **settings), whole, lambda y: y),
    ]
    inputs, targets = batch()
    for _ in range(3):
        for optimizer, model, rest in optimizers:
            dense = dense_parameters(model, inputs, lambda y, rest=rest: squares(rest(y), targets), DAMPING)
            whole.zero_grad()
            F.mse_loss(whole(inputs), targets).backward()
            optimizer.step()
            check_dense(*dense, model)


@every_how
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_loss_function_runs_as_written_or_is_named(fullgraph, how):
    loop = Loop(how)
    torch._dynamo.reset()
    compiled = torch.compile(squares, backend="aot_eager", fullgraph=fullgraph)
    if fullgraph:
        with pytest.raises(RuntimeError, match="without fullgraph=True"):
            loop.step(of_loss(compiled))
        return
    for _ in range(3):
        expected = dense_parameters(loop.model, loop.inputs, lambda y: squares(y, loop.targets), DAMPING)
        loop.step(of_loss(compiled))
        check_dense(*expected, loop.model)


@every_pair(largest=[1e9, 0.01, 0.0012], scale=[1.0, 512.0, 1000.0], dtype=DTYPES, since=[1, 3], how=HOW)
def test_clipping_that_binds_warns_and_the_step_is_that_of_the_loss(largest, scale, dtype, since, how):
    """With a gradient scaler, too, which has taken back its scale before."""
    loop = Loop(how, dtype=dtype)
    two_steps(loop, since)
    expected, condition = dense_parameters(loop.model, loop.inputs, lambda y: squares(y, loop.targets), DAMPING)

    def clipped(loop):
        scaler(scale)(loop) if scale > 1 else plain(loop)
        nn.utils.clip_grad_norm_(loop.model.parameters(), largest)

    with told() as texts:
        loop.step(clipped)
    assert ["clipped" in text for text in texts] == [True] * (largest < 1)
    check_dense(expected, condition, loop.model, since, dtype)


@pytest.mark.parametrize(
    "number, dtype", [(2, torch.float32), (7, torch.float64), (100, torch.float32), (1000, torch.float64)]
)
def test_gradients_divided_by_a_number_are_not_taken_for_clipped_ones(number, dtype):
    loop = Loop("watch", dtype=dtype)
    dense = dense_parameters(loop.model, loop.inputs, lambda y: squares(y, loop.targets) / number, DAMPING)
    with silence():
        loop.step(after_backward(lambda loop: multiply(loop.model, 1 / number)))
    check_dense(*dense, loop.model, dtype=dtype)


@every_how
def test_loops_in_lower_precision_and_with_dropout_raise_no_false_alarm(how):
    """Dropout in two micro-batches, and passes in bfloat16; what is far beyond its digits is seen."""

    def body(loop):
        for x, t in zip(loop.inputs.float().split(4), loop.targets.float().split(4), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(loop.model(x), t) / 2
            loss.backward()

    for change in (None, change_one):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.ReLU(), nn.Linear(50, CLASSES))
        loop = Loop(how, model=model, damping=woodbury.LevenbergMarquardt())
        if change is None:
            for _ in range(16):
                loop.step(body)
            continue
        with pytest.raises(ValueError, match="not be that of the loop"):
            loop.step(lambda loop: (body(loop), change_one(loop)))


@pytest.mark.parametrize("method", [woodbury.NaturalGradient, woodbury.HessianFree, woodbury.KFAC])
@every_how
def test_every_method_believes_the_gradients(method, how):
    """The step of a loss that a hook has halved is that of half the loss; a changed gradient or weight raises."""
    steps = []
    for body in (hooked(lambda g: g / 2), of_loss(lambda y, t: F.mse_loss(y, t) / 2)):
        loop = Loop(how, method, seed=0)
        for _ in range(3):
            loop.step(body)
        steps.append(reference.theta(loop.model))
    assert reference.relative_error(*steps) <= bounds.rounding(len(steps[0]), 100, steps=3)
    with pytest.raises(ValueError, match="not be that of the loop"):
        loop.step(after_backward(change_one))
    with pytest.raises(ValueError, match="or parameters, were changed between"):
        loop.step(after_backward(change_parameters))


@every_pair(dtype=DTYPES, scale=[1e-6, 1.0, 1e6], how=HOW)
def test_no_false_alarm_near_a_minimum(dtype, scale, how):
    """Where the gradients of samples cancel, and residuals are differences of nearly equal numbers."""
    loop = Loop(how, dtype=dtype, damping=1e-3 * scale**2)
    loop.targets = scale * (loop.targets + 100)
    for _ in range(16):
        loop.step(plain)


def every_kind_of_rows():
    """A convolution, a norm, linear layers, and parameters of no layer."""

    def run(m, x):
        return m.scale * x @ m.mixed + m.layers(x + x * m.scale).flatten(1)[:, :CLASSES]

    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 2))
    scale, mixed = nn.Parameter(torch.ones(4)), nn.Parameter(torch.randn(4, CLASSES))
    return Parts(run, layers=layers, scale=scale, mixed=mixed).double()


def of_rows(model, inputs, targets, criterion):
    found = woodbury.rows(model, criterion, inputs, targets, fallback="autograd")
    return lambda: found.dense() @ found.rmatvec(torch.ones(found.shape[0]).double()).flat


def of_posterior(model, inputs, targets, criterion):
    found = woodbury.posterior(model, criterion, inputs, targets)
    new_inputs, new_targets = inputs + 1, 1 - targets
    results = lambda: (found.variance(new_inputs), found.influence(new_inputs, new_targets))  # noqa: E731
    return lambda: reference.flat(results())


def of_next_step(model, inputs, targets, criterion):
    """The rows of earlier batches, and what a watched loop has left."""
    optimizer = woodbury.GaussNewton(model, criterion, memory=1, watch=True, fallback="autograd")
    criterion(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    other = inputs + 1, 1 - targets
    return lambda: torch.cat([own.flatten() for own in optimizer.direction(*other).values()])


@every_pair(make=[every_kind_of_rows, network], keep=[of_rows, of_posterior, of_next_step])
def test_what_is_changed_later_changes_no_result(keep, make):
    results = []
    for changes in (False, True):
        model, (inputs, targets) = make(), batch()
        criterion = nn.BCEWithLogitsLoss(pos_weight=torch.ones(CLASSES).double())
        result = keep(model, inputs, targets, criterion)
        if changes:
            inputs.add_(1)
            targets.zero_()
            if keep is not of_next_step:  # whose model and loss are those of the step to come
                criterion.pos_weight.mul_(3)
                with torch.no_grad():
                    for own in model.parameters():
                        own.mul_(2)
        results.append(result())
    assert torch.equal(*results)
