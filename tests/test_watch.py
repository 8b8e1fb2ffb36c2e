"""Steps from a closure and from an unchanged loop are those of `step(inputs, targets)`."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bounds
import reference
import woodbury
from cases import every_pair

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


def network(*between, outputs=CLASSES):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *between, nn.Linear(8, outputs)).double()


def batch(name, samples=N):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(N, 5, generator=generator).double()
    return inputs[:samples], LOSSES[name][2](generator)[:samples]


def in_loop(optimizer, model, criterion, inputs, targets, how):
    """One step as a loop of the user's own takes it."""
    if how == "watch":
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        return optimizer.step()

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        return loss

    return optimizer.step(closure) if how == "closure" else optimizer.step(closure=closure)


@every_pair(method=METHODS, name=list(LOSSES), form=["module", "function"], how=["closure", "keyword", "watch"])
def test_twenty_steps_are_those_of_step_on_a_batch(method, name, form, how):
    module, function, _ = LOSSES[name]
    inputs, targets = batch(name)
    plain, model = network(), network()
    expected = method(plain, module, curvature_samples=6, seed=0)
    optimizer = method(model, module, curvature_samples=6, seed=0, watch=how == "watch")
    bound = bounds.of_verify(expected, inputs, targets, steps=20)
    for _ in range(20):
        a = expected.step(inputs, targets)
        b = in_loop(optimizer, model, module if form == "module" else function, inputs, targets, how)
        assert b.as_dict() == pytest.approx(a.as_dict(), rel=bounds.of_info(a, bound))
    assert reference.model_error(plain, model) <= bound


@pytest.mark.parametrize("how", ["closure", "watch"])
def test_no_loss_need_be_given(how):
    inputs, targets = batch("cross entropy")
    plain, model = network(), network()
    expected = woodbury.GaussNewton(plain, nn.CrossEntropyLoss())
    optimizer = woodbury.GaussNewton(model, None, watch=how == "watch")
    for _ in range(3):
        expected.step(inputs, targets)
        in_loop(optimizer, model, F.cross_entropy, inputs, targets, how)
    assert reference.model_error(plain, model) == 0
    with pytest.raises(ValueError, match="made without a loss"):
        optimizer.step(inputs, targets)


def focal(outputs, targets):
    log = F.log_softmax(outputs, 1).gather(1, targets.unsqueeze(1)).squeeze(1)
    return -((1 - log.exp()) ** 2 * log)


class Focal(nn.Module):
    def forward(self, outputs, targets):
        return focal(outputs, targets).mean()


@pytest.fixture
def focal_rule():
    @woodbury.register_loss(Focal)
    class Rule(woodbury.LossRule):
        def prepare(self, loss, outputs, targets):
            return targets

        def values(self, loss, outputs, targets):
            return focal(outputs, targets)

    yield
    from woodbury.losses import rules

    del rules._RULES[Focal]


@pytest.mark.parametrize("how", ["closure", "watch"])
@pytest.mark.parametrize("method", [woodbury.GaussNewton, woodbury.NaturalGradient])
@pytest.mark.parametrize("curvature_samples", [None, 5])
def test_any_loss_of_the_outputs_is_that_of_a_rule_for_it(method, how, curvature_samples, focal_rule):
    inputs, targets = batch("cross entropy")
    plain, model = network(), network()
    settings = {"curvature_samples": curvature_samples, "seed": 0, "damping": 0.1}
    expected = method(plain, Focal(), **settings)
    optimizer = method(model, None, watch=how == "watch", **settings)
    bound = bounds.of_verify(expected, inputs, targets, steps=5)
    for _ in range(5):
        a = expected.step(inputs, targets)
        b = in_loop(optimizer, model, lambda y, t: focal(y, t).mean(), inputs, targets, how)
        assert b.as_dict() == pytest.approx(a.as_dict(), rel=bounds.of_info(a, bound))
    assert reference.model_error(plain, model) <= bound


RECOGNISED = {
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


@pytest.mark.parametrize("how", ["closure", "watch"])
@pytest.mark.parametrize("name", RECOGNISED)
def test_losses_of_torch_are_recognised(name, how):
    loss, kind = RECOGNISED[name]
    inputs, targets = batch(kind)
    plain, model = network(), network()
    expected = woodbury.GaussNewton(plain, loss)
    optimizer = woodbury.GaussNewton(model, None, watch=how == "watch")
    for _ in range(5):
        expected.step(inputs, targets)
        in_loop(optimizer, model, loss, inputs, targets, how)
    assert reference.model_error(plain, model) == 0


def test_gaussian_likelihood_with_its_variances():
    inputs, targets = batch("squared")
    variances = torch.rand(N, CLASSES).double() + 0.5
    plain, model = network(), network()
    expected = woodbury.GaussNewton(plain, nn.GaussianNLLLoss())
    optimizer = woodbury.GaussNewton(model, None)
    for _ in range(3):
        expected.step(inputs, torch.stack([targets, variances], 1))
        in_loop(optimizer, model, lambda y, t: nn.GaussianNLLLoss()(y, t, variances), inputs, targets, "closure")
    assert reference.model_error(plain, model) == 0


class Half(nn.Module):
    pass


@pytest.mark.parametrize("how", ["closure", "watch"])
def test_a_constant_factor_is_part_of_the_loss(how):
    """3 l / 2: as with a rule that says so."""

    @woodbury.register_loss(Half)
    class Rule(woodbury.LossRule):
        def prepare(self, loss, outputs, targets):
            return targets

        def values(self, loss, outputs, targets):
            return 1.5 * F.cross_entropy(outputs, targets, reduction="none")

    inputs, targets = batch("cross entropy")
    plain, model = network(), network()
    settings = {"damping": 0.1, "curvature_samples": 5, "seed": 0}
    expected = woodbury.GaussNewton(plain, Half(), **settings)
    optimizer = woodbury.GaussNewton(model, None, watch=how == "watch", **settings)
    for _ in range(5):
        expected.step(inputs, targets)
        in_loop(optimizer, model, lambda y, t: 3 * F.cross_entropy(y, t) / 2, inputs, targets, how)
    assert reference.model_error(plain, model) <= bounds.of_verify(expected, inputs, targets, steps=5)


class Tokens(nn.Module):
    """Logits (n, t, V) of a sequence of tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.double()

    def forward(self, tokens):
        return self.head(self.embedding(tokens).cumsum(1))


def shift(logits, tokens):
    return F.cross_entropy(logits[:, :-1].reshape(-1, 7), tokens[:, 1:].reshape(-1))


def by_transposing(logits, tokens):
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:])


def padded(logits, tokens):
    labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.view(-1, 7), labels.reshape(-1), ignore_index=-100)


@pytest.mark.parametrize("how", ["closure", "watch"])
@pytest.mark.parametrize("loss", [shift, padded])
@pytest.mark.parametrize("method", [woodbury.GaussNewton, woodbury.NaturalGradient])
def test_sliced_and_reshaped_outputs_are_recognised(method, loss, how):
    tokens = torch.randint(7, (5, 6), generator=torch.Generator().manual_seed(0))
    plain, model = Tokens(), Tokens()
    labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
    settings = {"damping": 1.0, "curvature_samples": 3, "seed": 0}
    expected = method(plain, nn.CrossEntropyLoss(), forward=lambda m, x: m(x).movedim(-1, 1), **settings)
    optimizer = method(model, None, watch=how == "watch", **settings)
    for _ in range(5):
        expected.step(tokens, labels)
        in_loop(optimizer, model, loss, tokens, tokens, how)
    assert reference.model_error(plain, model) <= bounds.of_verify(expected, tokens, labels, steps=5)


def test_a_loss_on_outputs_of_another_shape_has_no_rule_but_is_right():
    """The slice (n, V, t - 1) is no reshape of rows: its Hessian is formed."""
    tokens = torch.randint(7, (5, 6), generator=torch.Generator().manual_seed(0))
    plain, model = Tokens(), Tokens()
    expected = woodbury.GaussNewton(plain, nn.CrossEntropyLoss(), forward=lambda m, x: m(x)[:, :-1].movedim(-1, 1))
    optimizer = woodbury.GaussNewton(model, None)
    for _ in range(3):
        expected.step(tokens, tokens[:, 1:])
        in_loop(optimizer, model, by_transposing, tokens, tokens, "closure")
    assert reference.model_error(plain, model) <= bounds.of_verify(expected, tokens, tokens[:, 1:], steps=3)


@pytest.mark.parametrize("how", ["closure", "watch"])
def test_squeezed_outputs(how):
    inputs, targets = batch("squared")
    plain, model = network(outputs=1), network(outputs=1)
    expected = woodbury.GaussNewton(plain, nn.MSELoss())
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), watch=how == "watch")
    for _ in range(3):
        expected.step(inputs, targets[:, :1])
        in_loop(optimizer, model, lambda y, t: F.mse_loss(y.squeeze(1), t), inputs, targets[:, 0], how)
    assert reference.model_error(plain, model) == 0


class WithLoss(nn.Module):
    """Computes its own loss, from keywords, and returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.net = Tokens()

    def forward(self, tokens=None, labels=None, count=None):
        logits = self.net(tokens)
        loss = F.cross_entropy(logits.view(-1, 7), labels.view(-1), reduction="sum", ignore_index=-100)
        return {"loss": loss / count, "logits": logits}


@pytest.mark.parametrize("how", ["closure", "watch"])
@pytest.mark.parametrize("method", [woodbury.GaussNewton, woodbury.NaturalGradient])
def test_a_model_that_computes_its_loss(method, how):
    tokens = torch.randint(7, (5, 6), generator=torch.Generator().manual_seed(0))
    labels = F.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
    plain, model = Tokens(), WithLoss()
    settings = {"damping": 1.0, "curvature_samples": 3, "seed": 0}
    expected = method(plain, nn.CrossEntropyLoss(), forward=lambda m, x: m(x).movedim(-1, 1), **settings)
    optimizer = method(model, None, watch=how == "watch", **settings)
    count = torch.tensor(25)
    for _ in range(5):
        expected.step(tokens, labels)

        def closure():
            optimizer.zero_grad()
            loss = model(tokens=tokens, labels=labels, count=count)["loss"]
            loss *= 1
            loss.backward()

        if how == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert reference.model_error(plain, model.net) <= bounds.of_verify(expected, tokens, labels, steps=5)


@pytest.mark.parametrize("counts", [(6, 6), (4, 4, 4), (12,)])
def test_micro_batches_are_one_batch(counts):
    inputs, targets = batch("cross entropy")
    plain, model = network(), network()
    expected = woodbury.GaussNewton(plain, nn.CrossEntropyLoss())
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=True)
    for _ in range(5):
        expected.step(inputs, targets)
        optimizer.zero_grad()
        for x, y in zip(inputs.split(counts), targets.split(counts), strict=True):
            (F.cross_entropy(model(x), y) / len(counts)).backward()
        optimizer.step()
    assert reference.model_error(plain, model) <= bounds.of_verify(expected, inputs, targets, steps=5)


def test_micro_batches_of_other_sizes_are_weighted_by_sample_with_a_warning():
    inputs, targets = batch("cross entropy")
    plain, model = network(), network()
    expected = woodbury.GaussNewton(plain, nn.CrossEntropyLoss())
    expected.step(inputs, targets)
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=True)
    for x, y in zip(inputs.split((9, 3)), targets.split((9, 3)), strict=True):
        (F.cross_entropy(model(x), y) / 2).backward()
    with pytest.warns(RuntimeWarning, match="every sample the same weight"):
        optimizer.step()
    assert reference.model_error(plain, model) <= bounds.of_verify(expected, inputs, targets)


def test_sums_that_are_divided_by_all_terms_are_one_mean():
    inputs, targets = batch("cross entropy")
    plain, model = network(), network()
    expected = woodbury.GaussNewton(plain, nn.CrossEntropyLoss())
    expected.step(inputs, targets)
    optimizer = woodbury.GaussNewton(model, None, watch=True)
    for x, y in zip(inputs.split((9, 3)), targets.split((9, 3)), strict=True):
        (F.cross_entropy(model(x), y, reduction="sum") / torch.tensor(12)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert reference.model_error(plain, model) <= bounds.of_verify(expected, inputs, targets)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, shift):
        return self.net(x) + shift


def test_micro_batches_with_another_constant_raise():
    inputs, targets = batch("cross entropy")
    model = Shifted()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=True)
    for x, y, shift in zip(inputs.split(4), targets.split(4), (0.0, 1.0, 0.0), strict=True):
        F.cross_entropy(model(x, shift), y).backward()
    with pytest.raises(ValueError, match="without a sample axis differ between the batches for one step"):
        optimizer.step()


def test_other_passes_do_no_harm():
    """Validation with and without gradients, a pass whose loss goes nowhere, zero_grad of the model."""
    inputs, targets = batch("cross entropy")
    plain, model = network(), network()
    expected = woodbury.GaussNewton(plain, nn.CrossEntropyLoss())
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=True)
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
        optimizer.step()
        optimizer.zero_grad()
    assert reference.model_error(plain, model) == 0


def test_a_gradient_scaler_changes_nothing():
    inputs, targets = batch("cross entropy")
    plain, model = network().float(), network().float()
    inputs = inputs.float()
    expected = woodbury.GaussNewton(plain, nn.CrossEntropyLoss())
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for _ in range(6):
        expected.step(inputs, targets)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
    # a power of two more or less: exact
    assert reference.model_error(plain, model) == 0


@pytest.mark.parametrize("how", ["closure", "watch"])
def test_dropout_masks_are_those_of_the_loop(how):
    inputs, targets = batch("cross entropy")
    plain, model = network(nn.Dropout(0.5)), network(nn.Dropout(0.5))
    expected = woodbury.GaussNewton(plain, nn.CrossEntropyLoss())
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=how == "watch")
    for step in range(5):
        torch.manual_seed(step)
        expected.step(inputs, targets)
        after = torch.rand(1)
        torch.manual_seed(step)
        in_loop(optimizer, model, F.cross_entropy, inputs, targets, how)
        assert torch.equal(torch.rand(1), after)
    assert reference.model_error(plain, model) == 0


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.net(x)


@pytest.mark.parametrize("how", ["closure", "watch"])
def test_buffers_are_left_as_the_loop_left_them(how):
    inputs, targets = batch("cross entropy")
    model = Counting()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=how == "watch")
    for step in range(3):
        in_loop(optimizer, model, F.cross_entropy, inputs, targets, how)
        assert float(model.passes) == step + 1


# -- what is refused ------------------------------------------------------------------------------------------


def mixing(outputs, targets):
    return F.mse_loss(outputs / outputs.square().mean().sqrt(), targets)


@pytest.mark.parametrize("how", ["closure", "watch"])
def test_a_loss_that_mixes_samples_raises(how):
    inputs, targets = batch("squared")
    model = network()
    before = copy.deepcopy(model)
    optimizer = woodbury.GaussNewton(model, None, watch=how == "watch")
    with pytest.raises(ValueError, match="mixes samples"):
        in_loop(optimizer, model, mixing, inputs, targets, how)
    assert reference.model_error(model, before) == 0


@pytest.mark.parametrize("how", ["closure", "watch"])
def test_a_penalty_on_the_weights_raises(how):
    inputs, targets = batch("squared")
    model = network()
    optimizer = woodbury.GaussNewton(model, None, watch=how == "watch")

    def penalised(outputs, targets):
        return F.mse_loss(outputs, targets) + 1e-4 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(ValueError, match="weight_decay"):
        in_loop(optimizer, model, penalised, inputs, targets, how)


def test_a_penalty_with_a_backward_pass_of_its_own_raises():
    inputs, targets = batch("squared")
    for late in (False, True):
        model = network()
        optimizer = woodbury.GaussNewton(model, nn.MSELoss(), watch=True)
        penalty = sum(p.square().sum() for p in model.parameters())
        with pytest.raises(ValueError, match=r"weight_decay|not watched"):
            if not late:
                penalty.backward()
            F.mse_loss(model(inputs), targets).backward()
            if late:
                penalty.backward()
            optimizer.step()


@pytest.mark.parametrize("how", ["closure", "watch"])
def test_two_calls_of_the_model_raise(how):
    inputs, targets = batch("squared")
    model = network()
    optimizer = woodbury.GaussNewton(model, None, watch=how == "watch")
    with pytest.raises(ValueError, match="two calls"):
        in_loop(optimizer, model, lambda y, t: F.mse_loss(y, model(inputs + 1)), inputs, targets, how)


@pytest.mark.parametrize("how", ["closure", "watch"])
def test_clipping_is_reported(how):
    inputs, targets = batch("squared")
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), watch=how == "watch")

    def closure():
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    with pytest.warns(RuntimeWarning, match="clipped"):
        if how == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def test_clipping_that_changes_nothing_is_not():
    inputs, targets = batch("squared")
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), watch=True)
    F.mse_loss(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_step_that_nobody_watched_says_what_to_do():
    inputs, targets = batch("squared")
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss())
    F.mse_loss(model(inputs), targets).backward()
    for call in (optimizer.step, lambda: optimizer.step(None)):
        with pytest.raises(TypeError, match="watch=True"):
            call()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), watch=True)
    with pytest.raises(ValueError, match="watch=True"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"no loss\.backward"):
        woodbury.GaussNewton(model, nn.MSELoss()).step(lambda: None)
    with pytest.raises(TypeError, match="not both"):
        woodbury.GaussNewton(model, nn.MSELoss()).step(inputs, closure=lambda: None)


def test_gradients_of_an_earlier_step_raise():
    inputs, targets = batch("squared")
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), watch=True)
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="zero_grad"):
        F.mse_loss(model(inputs), targets).backward()


def test_gradients_accumulated_outside_a_closure_raise():
    inputs, targets = batch("squared")
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss())
    F.mse_loss(model(inputs), targets).backward()
    with pytest.raises(ValueError, match="watch=True"):
        optimizer.step(lambda: F.mse_loss(model(inputs), targets).backward())


def test_inputs_that_change_before_the_step_raise():
    inputs, targets = batch("squared")
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), watch=True)
    F.mse_loss(model(inputs), targets).backward()
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
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), watch=True)
    in_loop(optimizer, model, F.mse_loss, inputs, targets, "watch")
    other, twin = copied((optimizer, model))
    in_loop(optimizer, model, F.mse_loss, inputs, targets, "watch")
    in_loop(other, twin, F.mse_loss, inputs, targets, "watch")
    assert reference.model_error(model, twin) == 0
    lone = copied(model)
    assert type(lone(inputs)) is torch.Tensor


def test_schedulers_and_checkpoints_go_on_in_a_watched_loop():
    inputs, targets = batch("squared")
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.MSELoss(), watch=True, momentum=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            in_loop(optimizer, model, F.mse_loss, inputs, targets, "watch")
            schedule.step()
    twin = copy.deepcopy(model)
    resumed = woodbury.GaussNewton(twin, nn.MSELoss(), watch=True, momentum=0.5)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.5
    in_loop(optimizer, model, F.mse_loss, inputs, targets, "watch")
    in_loop(resumed, twin, F.mse_loss, inputs, targets, "watch")
    assert reference.model_error(model, twin) == 0


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
    assert torch.equal(part, model[0].weight.grad)
    assert f"{loss:.3f}" and repr(outputs)
    assert float(optimizer.step().loss) == pytest.approx(loss.item())


@pytest.mark.parametrize("how", ["closure", "watch"])
@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
def test_compiled_models_in_a_loop(how, in_place):
    """The steps of the model as it was written, and no new compilation once the first have been taken."""
    dynamo = pytest.importorskip("torch._dynamo")
    dynamo.reset()
    inputs, targets = batch("cross entropy")
    plain, model = network(), network()
    expected = woodbury.GaussNewton(plain, nn.CrossEntropyLoss())
    if in_place:
        model.compile(backend="aot_eager")
    called = model if in_place else torch.compile(model, backend="aot_eager")
    optimizer = woodbury.GaussNewton(called, nn.CrossEntropyLoss(), watch=how == "watch")
    counts = []
    for _ in range(6):
        expected.step(inputs, targets)
        in_loop(optimizer, called, F.cross_entropy, inputs, targets, how)
        counts.append(dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[2:] == counts[2:3] * 4
    assert reference.model_error(plain, model) <= bounds.of_verify(expected, inputs, targets, steps=6)
    dynamo.reset()
