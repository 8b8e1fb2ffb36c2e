"""Steps from a closure and from an unchanged loop are those of `step(inputs, targets)`."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import problems
import reference
import woodbury
from cases import every_pair
from checks import loop_step, refused, told
from fuzz.models import Parts

N, CLASSES = 12, 3
LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), F.cross_entropy, lambda g: torch.randint(CLASSES, (N,), generator=g)),
    "squared": (nn.MSELoss(), F.mse_loss, lambda g: torch.randn(N, CLASSES, generator=g).double()),
    "logistic": (
        nn.BCEWithLogitsLoss(),
        F.binary_cross_entropy_with_logits,
        lambda g: torch.rand(N, CLASSES, generator=g).double(),
    ),
}
METHODS = [woodbury.GaussNewton, woodbury.NaturalGradient, woodbury.HessianFree, woodbury.KFAC]
every_how = pytest.mark.parametrize("how", ["closure", "watch"])


def network(*between, outputs=CLASSES):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *between, nn.Linear(8, outputs)).double()


def batch(name, samples=N):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(N, 5, generator=generator).double()
    return inputs[:samples], LOSSES[name][2](generator)[:samples]


def two(how, loss, given=None, method=woodbury.GaussNewton, make=network, **settings):
    """An optimizer with a loss, and one for a loop of the user's own with the loss that is given, of twins."""
    return method(make(), loss, **settings), method(make(), given, watch=how == "watch", **settings)


def in_loop(optimizer, criterion, inputs, targets, how, model=None):
    model = optimizer.model if model is None else model

    def backward():
        loss = criterion(model(inputs), targets)
        loss.backward()
        return loss

    return loop_step(optimizer, backward, how)


def error_of(expected, optimizer):
    return reference.model_error(expected.model, optimizer.model)


def check_steps(expected, optimizer, criterion, data, how, told=None, exact=True):
    """Steps of the loop are those on a batch, whose loss needs other data than `told`, and report the same."""
    bound = bounds.of_verify(expected, *data, steps=3)
    for _ in range(3):
        a, b = expected.step(*data), in_loop(optimizer, criterion, *(told or data), how)
        assert b.as_dict() == pytest.approx(a.as_dict(), rel=bounds.of_info(a, bound))
    assert error_of(expected, optimizer) <= (0.0 if exact else bound)


@every_pair(method=METHODS, name=list(LOSSES), form=["module", "function"], how=["closure", "keyword", "watch"])
def test_steps_are_those_of_step_on_a_batch(method, name, form, how):
    module, function, _ = LOSSES[name]
    twins = two(how, module, module, method, curvature_samples=6, seed=0)
    check_steps(*twins, module if form == "module" else function, batch(name), how, exact=False)


def focal(outputs, targets):
    log = F.log_softmax(outputs, 1).gather(1, targets.unsqueeze(1)).squeeze(1)
    return -((1 - log.exp()) ** 2 * log)


def chosen(outputs, targets):
    """The outputs of the targets, without a second derivative."""
    return outputs.gather(1, targets.unsqueeze(1)).squeeze(1)


VALUES = {  # of each sample, and the loss of a loop; a constant factor is part of it
    "focal": (focal, lambda y, t: focal(y, t).mean()),
    "linear": (chosen, lambda y, t: chosen(y, t).mean()),
    "half as much again": (
        lambda y, t: 1.5 * F.cross_entropy(y, t, reduction="none"),
        lambda y, t: 3 * F.cross_entropy(y, t) / 2,
    ),
}


@every_pair(method=METHODS[:2], curvature_samples=[None, 5], name=list(VALUES), how=["closure", "watch"])
def test_any_loss_of_the_outputs_is_that_of_a_rule_for_it(method, how, curvature_samples, name):
    settings, (values, loss) = {"curvature_samples": curvature_samples, "seed": 0, "damping": 0.1}, VALUES[name]
    registered = problems.Own(values)
    check_steps(*two(how, registered, method=method, **settings), loss, batch("cross entropy"), how, exact=False)


@every_how
def test_a_loss_with_one_derivative_takes_natural_gradients(how):
    def values(outputs, targets):
        margins = (1 + outputs - chosen(outputs, targets).unsqueeze(1)).clamp_min(0)
        return (margins.sum(1) - 1) / outputs.shape[1]  # without that of the class itself

    registered = problems.Own(values)
    optimizers = two(how, registered, method=woodbury.NaturalGradient)
    check_steps(*optimizers, F.multi_margin_loss, batch("cross entropy"), how, exact=False)


RECOGNISED = {
    "plain": (nn.CrossEntropyLoss(), "cross entropy"),
    "class weights": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), label_smoothing=0.1),
        "cross entropy",
    ),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), "cross entropy"),
    "huber": (nn.HuberLoss(delta=0.5), "squared"),
    "smooth": (nn.SmoothL1Loss(beta=0.3), "squared"),
    "absolute": (nn.L1Loss(), "squared"),
    "sum of squares": (nn.MSELoss(reduction="sum"), "squared"),
    "counts": (nn.PoissonNLLLoss(), "logistic"),
    "positive weights": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]).double()), "logistic"),
}


@every_how
@pytest.mark.parametrize("name", RECOGNISED)
def test_losses_of_torch_are_recognised(name, how):
    """Without one for the optimizer, which a step on a batch needs."""
    loss, kind = RECOGNISED[name]
    expected, optimizer = two(how, loss)
    check_steps(expected, optimizer, loss, batch(kind), how)
    with pytest.raises(ValueError, match="made without a loss"):
        optimizer.step(*batch(kind))


def test_gaussian_likelihood_with_its_variances():
    inputs, targets = batch("squared")
    variances = torch.rand(N, CLASSES).double() + 0.5
    data, loss = (inputs, torch.stack([targets, variances], 1)), nn.GaussianNLLLoss()
    told = (inputs, targets)
    check_steps(*two("closure", loss), lambda y, t: loss(y, t, variances), data, "closure", told=told)


def token_model():
    """Logits (n, t, V) of a sequence of tokens."""
    torch.manual_seed(2)
    layers = {"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 7)}
    return Parts(lambda m, tokens: m.head(m.embedding(tokens).cumsum(1)), **layers).double()


def token_batch():
    """Tokens, and those that follow."""
    tokens = torch.randint(7, (5, 6), generator=torch.Generator().manual_seed(0))
    return tokens, F.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()


def shift(logits, tokens):
    return F.cross_entropy(logits[:, :-1].reshape(-1, 7), tokens[:, 1:].reshape(-1))


def padded(logits, tokens):
    labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.view(-1, 7), labels.reshape(-1), ignore_index=-100)


class WithLoss(Parts):
    """Computes its own loss, from keywords, and returns a dictionary."""

    def __init__(self):
        super().__init__(net=token_model())

    def forward(self, tokens=None, labels=None, count=None):
        logits = self.net(tokens)
        F.mse_loss(logits.detach(), torch.zeros_like(logits))  # a number to report: nothing is sent back from it
        loss = F.cross_entropy(logits.view(-1, 7), labels.view(-1), reduction="sum", ignore_index=-100)
        return {"loss": loss / count, "logits": logits}


@every_pair(loss=[shift, padded, "of the model"], method=METHODS[:2], how=["closure", "watch"])
def test_sliced_and_reshaped_outputs_and_losses_of_models_are_recognised(method, loss, how):
    tokens, labels = token_batch()
    settings = {"damping": 1.0, "curvature_samples": 3, "seed": 0}
    classes_second = lambda model, tokens: model(tokens).movedim(-1, 1)  # noqa: E731
    expected = method(token_model(), nn.CrossEntropyLoss(), forward=classes_second, **settings)
    model = WithLoss() if loss == "of the model" else token_model()
    optimizer = method(model, None, watch=how == "watch", **settings)
    count = torch.tensor(25)
    for _ in range(3):
        expected.step(tokens, labels)
        if loss == "of the model":
            own = lambda _: model(tokens=tokens, labels=labels, count=count)  # noqa: E731
            in_loop(optimizer, lambda outputs, _: outputs["loss"].mul_(1), tokens, labels, how, own)
        else:
            in_loop(optimizer, loss, tokens, tokens, how)
    assert error_of(expected, optimizer) <= bounds.of_verify(expected, tokens, labels, steps=3)


def test_a_loss_on_outputs_of_another_shape_has_no_rule_but_is_right():
    """The slice (n, V, t - 1) is no reshape of rows: its Hessian is formed."""
    tokens, _ = token_batch()
    forward = lambda m, x: m(x)[:, :-1].movedim(-1, 1)  # noqa: E731
    expected = woodbury.GaussNewton(token_model(), nn.CrossEntropyLoss(), forward=forward)
    data, told, optimizer = (tokens, tokens[:, 1:]), (tokens, tokens), woodbury.GaussNewton(token_model(), None)
    loss = lambda y, t: F.cross_entropy(y[:, :-1].transpose(1, 2), t[:, 1:])  # noqa: E731
    check_steps(expected, optimizer, loss, data, "closure", told=told, exact=False)


@every_how
def test_squeezed_outputs(how):
    inputs, targets = batch("squared")
    twins = two(how, nn.MSELoss(), nn.MSELoss(), make=lambda: network(outputs=1))
    data, told = (inputs, targets[:, :1]), (inputs, targets[:, 0])
    check_steps(*twins, lambda y, t: F.mse_loss(y.squeeze(1), t), data, how, told=told)


@pytest.mark.parametrize("reduction, divisor", [("mean", 2), ("sum", torch.tensor(12))])
def test_micro_batches_of_other_sizes_are_weighted_by_sample_with_a_warning_unless_they_sum(reduction, divisor):
    """Sums that are divided by all terms are one mean."""
    inputs, targets = batch("cross entropy")
    loss = nn.CrossEntropyLoss()
    expected, optimizer = two("watch", loss, loss if reduction == "mean" else None)
    expected.step(inputs, targets)
    for x, y in zip(inputs.split((9, 3)), targets.split((9, 3)), strict=True):
        (F.cross_entropy(optimizer.model(x), y, reduction=reduction) / divisor).backward()
    with told() as texts:
        optimizer.step()
    assert len(texts) == (reduction == "mean")
    assert all(re.match("RuntimeWarning: .*every sample the same weight", text) for text in texts)
    assert error_of(expected, optimizer) <= bounds.of_verify(expected, inputs, targets)


def test_micro_batches_with_another_constant_raise():
    inputs, targets = batch("cross entropy")
    model = Parts(lambda m, x, shift: m.net(x) + shift, net=network())
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=True)
    for x, y, shift in zip(inputs.split(4), targets.split(4), (0.0, 1.0, 0.0), strict=True):
        F.cross_entropy(model(x, shift), y).backward()
    with pytest.raises(ValueError, match="without a sample axis differ between the batches for one step"):
        optimizer.step()


def test_other_passes_do_no_harm():
    """Validation with, without gradients, transforms, a pass whose loss goes nowhere, zero_grad of the model."""
    inputs, targets = batch("cross entropy")
    expected, optimizer = two("watch", nn.CrossEntropyLoss(), nn.CrossEntropyLoss())
    model = optimizer.model
    for _ in range(4):
        expected.step(inputs, targets)
        model(inputs)
        F.cross_entropy(model(inputs[:3]), targets[:3]).backward()
        model.zero_grad()  # that backward pass is gone
        loss = F.cross_entropy(model(inputs), targets)
        with torch.no_grad():
            assert type(model(inputs)) is torch.Tensor
            F.cross_entropy(model(inputs), targets)
        loss.backward()
        model.eval()
        F.cross_entropy(model(inputs), targets)
        model.train()
        torch.func.vmap(model)(inputs)
        optimizer.step()
        optimizer.zero_grad()
    assert error_of(expected, optimizer) == 0
    for transformed in (
        torch.jit.trace(model, inputs),
        torch.export.export(model, (inputs,), strict=False).module(),
    ):
        assert torch.allclose(transformed(inputs), model(inputs))


def test_a_gradient_scaler_changes_nothing():
    inputs, targets = batch("cross entropy")
    inputs = inputs.float()
    loss = nn.CrossEntropyLoss()
    expected, optimizer = two("watch", loss, loss, make=lambda: network().float())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for _ in range(6):
        expected.step(inputs, targets)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(optimizer.model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
    # a power of two more or less: exact
    assert error_of(expected, optimizer) == 0


@every_how
def test_dropout_masks_and_buffers_are_those_of_the_loop(how):
    inputs, targets = batch("cross entropy")
    loss, make = nn.CrossEntropyLoss(), lambda: problems.Counting(network(nn.Dropout(0.5)))
    expected, optimizer = two(how, loss, loss, make=make)
    for step in range(5):
        torch.manual_seed(step)
        expected.step(inputs, targets)
        after = torch.rand(1)
        torch.manual_seed(step)
        in_loop(optimizer, F.cross_entropy, inputs, targets, how)
        assert torch.equal(torch.rand(1), after) and float(optimizer.model.passes) == step + 1
    assert error_of(expected, optimizer) == 0


# -- what is refused ------------------------------------------------------------------------------------------


@every_how
@pytest.mark.parametrize(
    "loss, message",
    [
        (lambda y, t, model: F.mse_loss(y / y.square().mean().sqrt(), t), "mixes samples"),
        (lambda y, t, model: F.mse_loss(y, t) + 1e-4 * model[0].weight.square().sum(), "weight_decay"),
        (lambda y, t, model: F.mse_loss(y, model(torch.ones(N, 5).double())), "two calls"),
        (lambda y, t, model: F.multi_margin_loss(y * y.mean(), t.argmax(1)), "mixes samples"),
        (
            lambda y, t, model: F.multi_margin_loss(y, t.argmax(1)),
            r"loss \(multi_margin_loss\) has no second derivative .* NaturalGradient, .*register_loss",
        ),
    ],
)
def test_a_loss_of_more_than_the_outputs_of_each_sample_raises(loss, message, how):
    model = network()
    optimizer = woodbury.GaussNewton(model, None, watch=how == "watch")
    with refused(model, message):
        in_loop(optimizer, lambda y, t: loss(y, t, model), *batch("squared"), how)


def watched(seen=True):
    """A model, its optimizer, and a function that runs it forward and backward on a batch."""
    inputs, targets = batch("squared")
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), watch=seen)
    return model, optimizer, inputs, lambda: F.mse_loss(model(inputs), targets).backward()


def test_a_step_that_nobody_watched_says_what_to_do():
    model, optimizer, inputs, backward = watched(seen=False)
    backward()
    for call in (optimizer.step, lambda: optimizer.step(None)):
        with pytest.raises(TypeError, match="watch=True"):
            call()
    with pytest.raises(ValueError, match="watch=True"):  # gradients accumulated outside a closure
        optimizer.step(backward)
    with pytest.raises(ValueError, match="watch=True"):
        woodbury.GaussNewton(model, nn.MSELoss(), watch=True).step()
    with pytest.raises(ValueError, match=r"no loss\.backward"):
        woodbury.GaussNewton(model, nn.MSELoss()).step(lambda: None)
    with pytest.raises(TypeError, match="not both"):
        woodbury.GaussNewton(model, nn.MSELoss()).step(inputs, closure=lambda: None)


def test_gradients_of_an_earlier_step_and_inputs_that_change_before_the_step_raise():
    _, optimizer, _, backward = watched()
    backward()
    optimizer.step()
    backward()
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.step()
    _, optimizer, inputs, backward = watched()
    backward()
    inputs.add_(1)
    with pytest.raises(ValueError, match="changed in place"):
        optimizer.step()


def test_large_outputs_without_a_rule_raise():
    model = nn.Linear(3, 2000)
    optimizer = woodbury.GaussNewton(model, None)
    inputs = torch.randn(4, 3)
    with pytest.raises(ValueError, match="2000 outputs"):
        optimizer.step(lambda: (model(inputs) ** 4).mean().backward())


# -- copies and the rest of a training loop ----------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_watch_their_own_model(copied):
    inputs, targets = batch("squared")
    optimizer = woodbury.GaussNewton(network(), nn.MSELoss(), watch=True)
    in_loop(optimizer, F.mse_loss, inputs, targets, "watch")
    other, twin = copied((optimizer, optimizer.model))
    assert other.model is twin
    for own in (optimizer, other):
        in_loop(own, F.mse_loss, inputs, targets, "watch")
    assert error_of(optimizer, other) == 0
    lone = copied(optimizer.model)
    assert type(lone(inputs)) is torch.Tensor


def test_outputs_in_a_loop_behave_as_tensors():
    inputs, targets = batch("cross entropy")
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=True)
    outputs = model(inputs)
    assert isinstance(outputs, torch.Tensor) and outputs.shape == (N, CLASSES)
    assert type(outputs.detach()) is torch.Tensor and type(outputs.argmax(1)) is torch.Tensor
    assert outputs.detach().numpy().shape == (N, CLASSES)
    loss = F.cross_entropy(outputs, targets)
    assert loss.item() == pytest.approx(float(F.cross_entropy(outputs.detach(), targets)))
    (part,) = torch.autograd.grad(loss, [model[0].weight], retain_graph=True)
    loss.backward()
    assert torch.equal(part, model[0].weight.grad) and f"{loss:.3f}" and repr(outputs)
    assert float(optimizer.step().loss) == pytest.approx(loss.item())
