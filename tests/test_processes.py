"""Steps of several processes are those of one process on all their samples."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

import bounds
import problems
import processes
import reference
import woodbury
from checks import loop_step
from fuzz.models import Parts
from woodbury.optimizers import OPTIMIZERS

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)

N = problems.N
SPREAD = {2: (4, 3), 4: (3, 2, 0, 2)}  # samples of each process


def tokens(m, x):
    """An embedding, attention and a tied weight."""
    hidden = m.embedding(x)
    hidden = m.norm(hidden + m.attention(hidden, hidden, hidden, need_weights=False)[0])
    return m.head(hidden).movedim(-1, 1)


def make(name):
    if name in problems.PROBLEMS:
        return problems.make(name)
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    layers = {"embedding": nn.Embedding(7, 4), "norm": nn.LayerNorm(4), "attention": attention}
    model = Parts(tokens, **layers, head=nn.Linear(4, 7, bias=False)).double()
    model.head.weight = model.embedding.weight
    words = torch.randint(7, (N, 4))
    targets = words.roll(1, 1)
    targets[::3, 1:] = -100  # another number of terms for every process
    return problems.Problem(model, nn.CrossEntropyLoss(), words, targets)


def whole():
    """A classification by an MLP: the model, the inputs and the targets of all processes."""
    problem = make("softmax")
    return problem.model, problem.inputs, problem.targets


CASES = [
    *((model, name, {}) for model in ("softmax", "pixels") for name in ("smw-gn", "smw-ng", "smw-ng-bd")),
    *(("pixels", "hf", {}), ("softmax", "kfac", {})),
    *(("softmax", name, {"weight_decay": 0.01}) for name in ("smw-gn", "smw-ng-bd", "hf", "kfac")),
    *(("pixels", name, {"momentum": 0.5}) for name in ("smw-gn", "smw-ng")),
    ("softmax", "smw-gn", {"momentum": 0.5, "solver": "cg", "solver_tolerance": 1e-14}),
    ("softmax", "smw-gn", {"damping": woodbury.LevenbergMarquardt(initial=0.01, relative=True)}),
    ("tokens, tied", "smw-ng", {}),
    ("tokens, tied", "smw-gn", {}),
]


STEPS = 2  # few: those of conjugate gradients amplify the errors of the ones before


def train(rank, world, sizes, turn):
    """The parameters, the damping, the last numbers and the iterations of each case.

    Half of each part is S2 in every other case.
    """
    results = []
    parts = torch.arange(N).split(list(sizes))
    for index, (kind, name, settings) in enumerate(CASES):
        half = (index + turn) % 2 == 0
        problem = make(kind)
        optimizer = OPTIMIZERS[name](problem.model, problem.loss, **{"damping": 0.3, **settings})
        own = parts[rank] if world > 1 else torch.arange(N)
        subset = None
        if half:
            subset = torch.arange(0, len(own), 2) if world > 1 else torch.cat([part[::2] for part in parts])
        iterations = 0  # of conjugate gradients, in all steps
        for _ in range(STEPS):
            info = optimizer.step(problem.inputs[own], problem.targets[own], subset=subset)
            iterations += getattr(optimizer, "iterations", 1)
        flat = reference.theta(problem.model)
        results.append((flat, optimizer.state["damping"], info.as_dict(), iterations))
    return results


@pytest.mark.parametrize("world, turn", [(2, 0), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_steps_of_several_processes_are_those_of_one(world, turn):
    """Also with uneven shards, and an empty one.

    Each case has all samples in S2 with one number of processes, and half of them with the other.
    """
    expected = train(0, 1, SPREAD[world], turn)
    everyone = processes.run(train, world, SPREAD[world], turn)
    for case, (flat, damping, info, iterations) in zip(CASES, expected, strict=True):
        index = CASES.index(case)
        given = {"damping": info["damping"], "steps": iterations}
        bound = bounds.of_step(*make(case[0]), **given)
        # f(theta) - f(theta + p) cancels in the ratio
        of_info = bound * max(1.0, abs(info["loss"] / (info["ratio"] * info["predicted"])))
        for own in everyone:
            assert reference.relative_error(own[index][0], flat) <= bound, case
            assert torch.equal(own[index][0], everyone[0][index][0]), case
            assert own[index][1] == everyone[0][index][1], case
            assert float(own[index][1]) == pytest.approx(float(damping), rel=bound), case
            assert own[index][2] == everyone[0][index][2], case
            assert own[index][2] == pytest.approx(info, rel=of_info, abs=0), case


def many_steps(rank, world):
    """24 steps in float32 with S2 drawn at random, momentum, dropout and uneven batches."""
    torch.manual_seed(rank)  # the models differ until the optimizer is made
    model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Dropout(0.1), nn.Linear(20, 3))
    settings = {"lr": 0.3, "momentum": 0.9, "curvature_samples": 0.5, "seed": rank}
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), **settings)
    generator = torch.Generator().manual_seed(10 + rank)
    losses = []
    for step in range(24):
        count = 1 + (step + 3 * rank) % 5
        inputs = torch.randn(count, 5, generator=generator)
        targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long()
        losses.append(float(optimizer.step(inputs, targets).loss))
    return losses, optimizer.state_dict(), [parameter.detach() for parameter in model.parameters()]


def test_processes_stay_bit_identical():
    (losses, state, parameters), (others, other_state, other_parameters) = processes.run(many_steps, 2)
    assert losses == others and len(set(losses)) == 24
    assert all(torch.equal(a, b) for a, b in zip(parameters, other_parameters, strict=True))
    assert torch.equal(state["state"]["generator"], other_state["state"]["generator"])
    assert float(state["state"]["damping"]) == float(other_state["state"]["damping"])


def five_steps(how, wrapped, optimizer, inputs, targets):
    for _ in range(5):
        if how == "step":
            optimizer.step(inputs, targets)
        else:
            loop_step(optimizer, lambda: optimizer.loss(wrapped(inputs), targets).backward(), how)


def in_a_loop(rank, world):
    """DistributedDataParallel around the model, and the loop that its users have."""
    results = []
    for how in ("step", "watch", "closure"):
        model, inputs, targets = whole()
        wrapped = nn.parallel.DistributedDataParallel(model)
        own = slice(0, 4) if rank == 0 else slice(4, None)
        optimizer = woodbury.GaussNewton(wrapped, nn.CrossEntropyLoss(), damping=0.3, watch=how == "watch")
        five_steps(how, wrapped, optimizer, inputs[own], targets[own])
        results.append(reference.theta(model))
    return results


def test_a_wrapped_model_takes_the_same_steps():
    model, inputs, targets = whole()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), damping=0.3)
    five_steps("step", model, optimizer, inputs, targets)
    expected = reference.theta(model)
    bound = bounds.of_step(whole()[0], nn.CrossEntropyLoss(), inputs, targets, damping=0.3, steps=5)
    for ways in processes.run(in_a_loop, 2):
        for parameters in ways:
            assert reference.relative_error(parameters, expected) <= bound


def message_of(call, *arguments, **settings):
    """What a call raises, if it does."""
    try:
        call(*arguments, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def with_a_fault(rank, world):
    model, inputs, targets = whole()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss())
    before = reference.theta(model)
    faults = inputs[:, :4], inputs * torch.nan, None
    messages = [message_of(optimizer.step, bad if rank == 1 else inputs, targets) for bad in faults]
    same = torch.equal(before, reference.theta(model))
    messages.append(message_of(optimizer.verify, inputs, targets))
    alone = ("smw-gn", {"search": woodbury.CurvedSearch()}), ("smw-gn", {"solver": "products"}), ("sgd", {})
    for name, settings in alone:
        messages.append(message_of(OPTIMIZERS[name], model, nn.CrossEntropyLoss(), **settings))
    return messages, same, bool(optimizer.step(inputs, targets).accepted)


def test_an_error_of_one_process_is_an_error_of_all():
    first, second = processes.run(with_a_fault, 2)
    for messages, same, accepted in (first, second):
        assert same and accepted and all("one process" in message for message in messages[3:])
    causes = "shapes cannot be multiplied", "nan or inf", "at least one"
    for shown, raised, cause in zip(first[0][:3], second[0][:3], causes, strict=True):
        assert shown.startswith("LostProcessError: process 1 of 2 failed")
        assert cause in shown and cause in raised


def bytes_of_steps(rank, world):
    """Of a step of each method: given, those of the parameters, and those of the rows of its curvature samples."""
    counted = []
    for method, columns in ((woodbury.NaturalGradient, 1), (woodbury.GaussNewton, 9)):
        model = nn.Sequential(nn.Linear(784, 500), nn.Tanh(), nn.Linear(500, 10))
        optimizer = method(model, nn.CrossEntropyLoss(), curvature_samples=0.25)
        inputs, targets = torch.randn(128, 784), torch.randint(10, (128,))
        optimizer.step(inputs, targets)
        before = optimizer._problems.group.bytes_given
        optimizer.step(inputs, targets)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        rows = 32 * (784 + 500) + 32 * columns * (500 + 10)  # v per sample, h per row
        counted.append((optimizer._problems.group.bytes_given - before, 4 * parameters, 4 * rows))
    return counted


def test_the_bytes_of_a_step_are_those_of_a_gradient_and_the_rows():
    for counted in processes.run(bytes_of_steps, 2):
        for given, gradient, rows in counted:
            assert gradient + rows <= given <= 1.3 * (gradient + rows)


def in_subgroups(rank, world):
    group = torch.distributed.new_group([0, 1])
    model, inputs, targets = whole()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), damping=0.3, process_group=group)
    half = slice(0, 3) if rank == 0 else slice(3, None)
    optimizer.step(inputs[half], targets[half])
    own = whole()[0]
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel"):
        wrapped = nn.parallel.DistributedDataParallel(whole()[0])
        woodbury.GaussNewton(wrapped, nn.CrossEntropyLoss(), process_group="self")
    with pytest.raises(ValueError, match="process_group"):
        woodbury.GaussNewton(own, nn.CrossEntropyLoss(), process_group="all")
    alone = woodbury.GaussNewton(own, nn.CrossEntropyLoss(), damping=0.3, process_group="self")
    alone.step(inputs, targets)
    return reference.theta(model), reference.theta(own)


def test_groups_of_processes_can_be_chosen():
    model, *batch = whole()
    bound = bounds.of_step(model, nn.CrossEntropyLoss(), *batch, damping=0.3)
    for joint, alone in processes.run(in_subgroups, 2):
        assert reference.relative_error(joint, alone) <= bound


def step_until_one_is_killed(rank, folder):
    place = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": 2}
    torch.distributed.init_process_group("gloo", **place, timeout=timedelta(seconds=20))
    model = nn.Linear(3, 2)
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss())
    for step in range(100):
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.step(torch.randn(4, 3), torch.randint(2, (4,)))
        except RuntimeError as error:
            print(type(error).__name__, step, error, flush=True)
            os._exit(3)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_process_that_is_killed_ends_the_others_with_a_message(tmp_path):
    started = time.monotonic()
    ranks = [processes.Started(step_until_one_is_killed, rank, tmp_path) for rank in range(2)]
    survivor, killed = (rank.wait(120) for rank in ranks)
    assert survivor.returncode == 3 and killed.returncode == -signal.SIGKILL
    assert survivor.stdout.startswith("LostProcessError 5 process 0 of 2 waited for the others in vain")
    assert "last checkpoint" in survivor.stdout and time.monotonic() - started < 100


# -- fit ----------------------------------------------------------------------------------------------------------

PLAIN = {"curvature_samples": None, "memory": 0, "metric": None, "progress": False}  # as with several processes


def regression(samples, seed=2):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :1].sin() + 0.3 * torch.randn(samples, 1, generator=generator, dtype=torch.float64)


def small():
    torch.manual_seed(3)
    return problems.mlp(3, 4, 1).double()


class Stream:
    """Batches without a length; at one of them something may happen."""

    def __init__(self, batches, at=None, happen=None):
        self.batches, self.at, self.happen = batches, at, happen

    def __iter__(self):
        for number, batch in enumerate(self.batches):
            if number == self.at:
                self.happen()
            yield batch


def parts(rank, world, lengths=(3, 3)):
    """Batches of 4 samples for each process; for one process those of the same steps, joined."""
    whole = regression(4 * sum(lengths))
    first = sum(lengths[:rank])
    batches = list(zip(*(own.split(4) for own in whole), strict=True))
    if world == 2:
        return batches[first : first + lengths[rank]]
    steps = [[own[k] for own in (batches[: lengths[0]], batches[lengths[0] :]) if k < len(own)] for k in range(9)]
    return [tuple(map(torch.cat, zip(*step, strict=True))) for step in steps if step]


def judged(rank, world):
    """Validation data that is far from the training data for the second process alone."""
    near, (inputs, targets) = regression(6, seed=4), regression(9, seed=5)
    both = near, (inputs, targets + inputs[:, 1:2])
    return both[rank] if world == 2 else tuple(map(torch.cat, zip(*both, strict=True)))


def raising(kind, at):
    def callback(fit):
        if fit.steps == at:
            raise kind("no more")

    return callback


class FullDisk:
    def step(self, info):
        raise OSError("the disk is full")


def interrupt():
    raise KeyboardInterrupt


def interrupted_forward(model, inputs, calls=count(1)):  # noqa: B008
    """Interrupts the second process at its twelfth call."""
    if torch.distributed.get_rank() == 1 and next(calls) == 12:
        interrupt()
    return model(inputs)


def fit_of(first=None, second=None, **both):
    """A fit of two processes with arguments of each, and of both."""
    return lambda rank: (parts(rank, 2), {**both, **((second if rank else first) or {})})


def on_second(**arguments):
    return fit_of(second=arguments, steps=3)


def stream_of_second(at, happen):
    """Something happens at a batch of the second process."""
    return lambda rank: (Stream(parts(rank, 2), at if rank else None, happen), {"validation": judged(rank, 2)})


def mean_square(outputs, targets):
    return (outputs - targets).square().mean()


# name: (loader, arguments) of a process; those of TOGETHER are the fit of one process too
TOGETHER = {
    "epochs": lambda rank, world: (parts(rank, world), {"epochs": 3}),
    "steps": lambda rank, world: (parts(rank, world), {"steps": 4}),
    "patience": lambda rank, world: (
        parts(rank, world),
        {"epochs": 40, "validation": judged(rank, world), "patience": 2, "metrics": {"mean square": mean_square}},
    ),
    "uneven": lambda rank, world: (parts(rank, world, (5, 3)), {"epochs": 2.5, "validation": judged(rank, world)}),
    "uneven streams": lambda rank, world: (Stream(parts(rank, world, (1, 4))), {"epochs": 3}),
    "tolerance": lambda rank, world: (parts(rank, world), {"epochs": 40, "tolerance": 0.2}),
}
APART = {
    "seconds": (fit_of(seconds=20.5), "seconds"),
    "seconds and epochs": (fit_of(seconds=20.5, epochs=90), "seconds"),
    "callback": (fit_of(second={"callback": lambda fit: fit.steps == 4}), "callback"),
    "callback interrupted": (fit_of(second={"callback": raising(KeyboardInterrupt, 4)}), "interrupted"),
    "signal": (stream_of_second(1, lambda: signal.raise_signal(signal.SIGINT)), "interrupted"),
    "loader interrupted": (stream_of_second(2, interrupt), "interrupted"),
    "step interrupted": (fit_of(forward=interrupted_forward), "interrupted"),
    "validation of one alone": (fit_of({"validation": [judged(0, 2)]}, {"validation": []}, epochs=2), "epochs"),
    "auto": (fit_of(epochs=9, curvature_samples="auto"), "epochs"),
}


NEAR = judged(0, 2)
METRICS = [{"validation": judged(rank, 2), "metrics": {"own": own}} for rank, own in enumerate((max, mean_square))]
# that arise in the midst of a fit, and say which process has failed
FAILING = {
    "a metric that fails": (fit_of(*METRICS), "metric 'own'"),
    "a loader that fails": (stream_of_second(2, lambda: 1 / 0), "division"),
    "an empty loader": (lambda rank: (Stream([] if rank else parts(0, 2)), {}), "no batches"),
    "a callback that fails": (fit_of(second={"callback": raising(OSError, 2)}), "no more"),
    "a full disk": (fit_of(first={"record": FullDisk()}), "disk is full"),
    "bad validation": (fit_of(validation=NEAR, second={"validation": (NEAR[0][:, 1:], NEAR[1])}), "not go with"),
}
REFUSED = {
    "pair and loader": (lambda rank: (regression(8) if rank else parts(0, 2), {"steps": 3}), "pass each a loader"),
    "pairs": (lambda rank: (regression(8), {"steps": 3}), "pass each a loader of its own samples"),
    "samplers": (lambda rank: (regression, {"steps": 3}), "pass each a loader of its own samples"),
    "evidence": (lambda rank: (regression(8), {"steps": 3, "weight_decay": "evidence"}), "one process"),
    "a bad iterator": (lambda rank: (iter(parts(rank, 2)) if rank else parts(0, 2), {}), "once only"),
    "no such file": (fit_of(resume="nowhere"), "there is no such file"),
    "no such folder": (fit_of(checkpoint="nowhere/fit"), "there is no folder"),
    "other steps": (on_second(steps=4), "steps: 3 (process 0), 4 (process 1)"),
    "seconds of one": (on_second(seconds=9.0), "seconds"),
    "validation of one": (on_second(validation=judged(0, 2)), "patience"),
    "negative seconds": (on_second(seconds=-1.0), "seconds must not be negative, got -1.0"),
    "a word for steps": (on_second(steps="3"), "steps must be a number"),
    "patience alone": (on_second(patience=3), "patience= is for validation data"),
    "validation of a number": (on_second(validation=0.2), "splits a pair"),
    "other tolerance": (on_second(tolerance=0.1), "tolerance: None (process 0), 0.1 (process 1)"),
    "other loss": (on_second(loss=nn.HuberLoss()), "HuberLoss"),
    "no loss": (on_second(loss=nn.ReLU()), "ReLU"),
    "other decay": (on_second(weight_decay=0.1), "weight_decay"),
    "evidence of one": (on_second(weight_decay="evidence"), "weight_decay='evidence' is for a pair"),
    "bad curvature samples": (on_second(curvature_samples="few"), "'auto'"),
    "bad fallback": (on_second(fallback="guess"), "fallback"),
    "other model": (on_second(model=lambda: small()[:1]), "parameter"),
    "no parameters": (on_second(model=lambda: small().requires_grad_(False)), "requires_grad"),
    "resume of one": (on_second(resume={"steps": 1}), "must be the state_dict"),
    "a path of one": (on_second(resume="nowhere"), "resume: False (process 0), True (process 1)"),
    "checkpoint of one": (on_second(checkpoint="fit"), "checkpoint: False (process 0), True (process 1)"),
}


class Clock:
    """The second process is twice as slow, and a second passes from one look to the next."""

    def __init__(self, rank):
        self.now, self.tick = 0.0, 1.0 + rank

    def perf_counter(self):
        self.now += self.tick
        return self.now


def told(result, model):
    """What a `Fit` says, and the parameters it left."""
    names = ("loss", "validation", "best_step", "steps", "seconds", "samples", "reason", "history")
    return {name: getattr(result, name) for name in names}, reference.flat(model.parameters()).detach()


def fitted(data, arguments):
    settings = {"progress": False} if isinstance(data, tuple) or callable(data) else PLAIN
    settings = {**settings, **arguments}
    model, loss = settings.pop("model", small)(), settings.pop("loss", nn.MSELoss())
    try:
        return told(woodbury.fit(model, loss, data, **settings), model)
    except Exception as error:
        return type(error).__name__, str(error)


def fit_all(rank, world, names):
    from woodbury.fit import run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    results = {}
    for name in names:
        apart = APART | FAILING | REFUSED
        case = TOGETHER[name](rank, world) if name in TOGETHER else apart[name][0](rank)
        run.time = Clock(rank)
        results[name] = fitted(*case)
    return results


def test_a_fit_of_several_processes_is_that_of_one():
    first, second = processes.run(fit_all, 2, list(TOGETHER))
    alone = fit_all(0, 1, list(TOGETHER))
    for name, (said, parameters) in alone.items():
        assert first[name][0] == second[name][0], name
        assert torch.equal(first[name][1], second[name][1]), name
        inputs, targets = map(torch.cat, zip(*parts(0, 1), strict=True))
        given = {"damping": 3e-4, "steps": said["steps"]}
        bound = bounds.of_step(small(), nn.MSELoss(), inputs, targets, **given)
        assert reference.relative_error(first[name][1], parameters) <= bound, name
        losses = [key for key in ("loss", "validation") if said[key] is not None]
        for key in losses:
            assert first[name][0][key] == pytest.approx(said[key], rel=bound), (name, key)
        for key in ("best_step", "steps", "samples", "reason"):
            assert first[name][0][key] == said[key], (name, key)
    seen = first["patience"][0]["history"]
    assert [own["mean square"] for own in seen] == pytest.approx([own["validation"] for own in seen])
    assert alone["patience"][0]["reason"] == "validation" and alone["tolerance"][0]["reason"] == "tolerance"
    assert alone["uneven"][0]["steps"] == 13 and alone["uneven streams"][0]["steps"] == 12


def test_processes_agree_on_when_a_fit_ends():
    first, second = processes.run(fit_all, 2, list(APART))
    for name, (_, reason) in APART.items():
        assert first[name][0] == second[name][0], name
        assert torch.equal(first[name][1], second[name][1]), name
        assert first[name][0]["reason"] == reason and first[name][0]["steps"], name
    assert first["callback"][0]["steps"] == first["callback interrupted"][0]["steps"] == 4
    assert first["signal"][0]["steps"] <= 2 and first["loader interrupted"][0]["steps"] <= 2


def test_what_one_process_cannot_fit_is_an_error_of_all():
    cases = FAILING | REFUSED
    first, second = processes.run(fit_all, 2, list(cases))
    for name, (_, cause) in cases.items():
        for kind, text in (first[name], second[name]):
            assert isinstance(kind, str) and kind.endswith("Error") and cause in text, (name, kind, text)
    for name in REFUSED:
        assert first[name] == second[name], name


class KilledError(BaseException):
    pass


def shuffled(rank):
    """Batches in an order of this process's own, and dropout with random numbers of its own."""
    generator = torch.Generator().manual_seed(rank)
    data = torch.utils.data.TensorDataset(*regression(12 + 8 * rank, seed=rank))
    return torch.utils.data.DataLoader(data, 4, shuffle=True, generator=generator)


def with_dropout(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(*problems.mlp(3, 4, 1)[:2], nn.Dropout(0.3), nn.Linear(4, 1)).double()


def killed_and_taken_up(rank, world, folder):
    from woodbury.fit import checkpoint

    checkpoint.INTERVAL = 0.0
    # only the first process can reach its file
    own = Path(folder) / ("fit" if rank == 0 else "no/such/folder/fit")
    results = []
    for kills in ((), (4, 9)):
        for seed, step in enumerate((*kills, None)):
            model = with_dropout(3 + seed)  # whose parameters do not matter
            torch.manual_seed(10 * seed + rank)

            def kill(fit, step=step):
                if fit.steps == step:
                    raise KilledError

            settings = {**PLAIN, "epochs": 3, "validation": judged(rank, world), "callback": kill}
            paths = {"checkpoint": own, "resume": own} if kills else {}
            try:
                fit = woodbury.fit(model, nn.MSELoss(), shuffled(rank), **settings, **paths)
            except KilledError:
                continue
            results.append(told(fit, model))
    return results, sorted(path.name for path in Path(folder).iterdir())


def test_a_fit_of_two_processes_goes_on_after_a_kill_bit_by_bit(tmp_path):
    first, second = processes.run(killed_and_taken_up, 2, str(tmp_path))
    assert first[1] == second[1] == ["fit"]
    for own in (first[0], second[0]):
        (whole, parameters), (again, others) = own
        for said in (whole, again):
            said.pop("seconds")
            said["history"] = [{**entry, "seconds": 0} for entry in said["history"]]
        assert whole == again and whole["steps"] == 15 and torch.equal(parameters, others)
    assert first[0][1][0] == second[0][1][0] and torch.equal(first[0][1][1], second[0][1][1])


# -- processes that differ ----------------------------------------------------------------------------------------


def made(method=woodbury.GaussNewton, loss=None, width=4, bias=True, dtype=torch.float64, **settings):
    torch.manual_seed(3)
    model = problems.mlp(5, width, 4, bias=bias).to(dtype)
    return method(model, loss or nn.CrossEntropyLoss(), **settings)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
# what the second process makes otherwise: how, and what the error names
DIFFERENT = {
    "dtype": ({"dtype": torch.float32}, "0.weight torch.float32 (4, 5) (process 1)"),
    "shape": ({"width": 6}, "parameter 0 (of group 0): 0.weight torch.float64 (4, 5) (process 0), 0.weight"),
    "parameters": ({"bias": False}, "0.bias torch.float64 (4,) (process 0), "),
    "loss": ({"loss": nn.MSELoss()}, "MSELoss"),
    "option": ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "label_smoothing=0.1"),
    "reduction": ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "reduction='sum'"),
    "class weights": ({"loss": nn.CrossEntropyLoss(weight=WEIGHTS)}, "[1.0, 2.0, 3.0, 4.0]"),
    "damping": ({"damping": 0.5}, "damping"),
    "lr": ({"lr": 0.5}, "lr (of parameter group 0): 1.0 (process 0), 0.5 (process 1)"),
    "momentum": ({"momentum": 0.5}, "momentum"),
    "curvature samples": ({"curvature_samples": 0.5}, "curvature_samples: None (process 0), 0.5 (process 1)"),
    "method": ({"method": woodbury.NaturalGradient}, "method"),
    "search": ({"search": woodbury.CurvedSearch()}, "search"),
    "forward": ({"forward": interrupted_forward}, "forward"),
}


CHANGED = {  # after a step, by the second process: a setting
    "setting": (lambda made: setattr(made, "damping", woodbury.LevenbergMarquardt(initial=0.2)), "damping"),
    "rate": (
        lambda made: made.param_groups[0].update(lr=0.25),
        "lr (of parameter group 0): 1.0 (process 0), 0.25 (process 1)",
    ),
    "loss changed": (lambda made: setattr(made.loss, "label_smoothing", 0.2), "label_smoothing=0.2"),
    "batch": (lambda made: None, "dtype of inputs: torch.float64 (process 0), torch.float32 (process 1)"),
}


def differ(rank, world):
    messages = {}
    for name, (settings, _) in DIFFERENT.items():
        messages[name] = message_of(made, **(settings if rank else {}))
    _, inputs, targets = whole()
    for name, (change, _) in CHANGED.items():
        optimizer = made()
        optimizer.step(inputs, targets)
        before = reference.theta(optimizer.model)
        if rank:
            change(optimizer)
        other = inputs.float() if rank and name == "batch" else inputs
        messages[name] = message_of(optimizer.step, other, targets)
        assert torch.equal(before, reference.theta(optimizer.model))
        if not rank:
            change(optimizer)
        assert optimizer.step(inputs, targets).accepted
    return messages


def test_processes_that_differ_raise_the_same_error():
    first, second = processes.run(differ, 2)
    assert first == second
    for name, (_, cause) in (DIFFERENT | CHANGED).items():
        assert first[name].startswith("ValueError: processes that train together must have the same"), first[name]
        assert cause in first[name], (name, first[name])


ENDS = """
import os
from pathlib import Path

import torch
import woodbury

torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = woodbury.NaturalGradient(model, torch.nn.MSELoss())
import torch._dynamo  # and much else
torch.distributed.all_reduce(torch.ones(1))
threads = lambda: [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
assert any("gloo" in name for name in threads()), threads()
torch.distributed.destroy_process_group()
assert not any("gloo" in name for name in threads()), threads()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at its threads in /proc")
def test_no_thread_of_a_destroyed_group_is_left_to_abort_the_end_of_the_process():
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port())}
    alone |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment = os.environ | alone
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
