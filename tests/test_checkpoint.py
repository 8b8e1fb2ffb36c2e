"""fit(checkpoint=path, resume=path): after a kill it ends as if nothing had happened; interrupts lose nothing."""

import functools
import hashlib
import os
import random
import stat
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import problems
import reference
import woodbury
from checks import refused, through_a_file
from fuzz.models import Parts
from woodbury._files import sealed, write_whole
from woodbury.fit import checkpoint, run


class KilledError(BaseException):
    """What no part of a fit deals with."""


@pytest.fixture(autouse=True)
def always_due(monkeypatch):
    monkeypatch.setattr(checkpoint, "INTERVAL", 0.0)


def smooth(samples=60, seed=0):
    draws = torch.Generator().manual_seed(seed)
    inputs = 2 * torch.rand(samples, 2, generator=draws, dtype=torch.float64) - 1
    noise = 0.1 * torch.randn(samples, 1, generator=draws, dtype=torch.float64)
    return inputs, torch.sin(2 * inputs[:, :1]) * inputs[:, 1:] + noise


def network(*between, seed=0):
    torch.manual_seed(seed)
    first, activation, last = problems.mlp(2, 6, 1)
    return nn.Sequential(first, activation, *between, last).double()


def loader(generator=None, sampler=None, size=10):
    data = TensorDataset(*smooth())
    return DataLoader(data, size, shuffle=sampler is None, generator=generator, sampler=sampler)


def batches():
    return list(zip(*(own.split(10) for own in smooth()), strict=True))


def by_sampler():
    drawn = torch.utils.data.RandomSampler(range(60), replacement=True, generator=torch.Generator().manual_seed(3))
    return loader(sampler=drawn)


class Shuffled:
    """Batches in an order of Python's own."""

    def __iter__(self):
        yield from random.sample(batches(), 6)


def draw(count):
    inputs = 2 * torch.rand(count, 2, dtype=torch.float64) - 1
    return inputs, torch.sin(2 * inputs[:, :1])


def equations():
    return woodbury.Equations(
        inside=(lambda count: draw(count)[0], lambda model, x: woodbury.laplacian(model, x).laplacian - 1),
        middle=(torch.zeros(3, 2, dtype=torch.float64), lambda model, x: model(x)),
    )


OTHERS = smooth(25, 3)
TRAINING = {"epochs": 2, "curvature_samples": 5, "validation": OTHERS}
# the model, what fit takes beside it, after how many steps it is killed
FITS = {
    "a pair": (network, lambda: {"data": smooth(), "steps": 9, "metric": "diagonal"}, (2, 9)),
    "validation": (network, lambda: {"data": smooth(), "steps": 14, "validation": OTHERS}, (2, 13)),
    "a share": (network, lambda: {"data": smooth(), "steps": 8, "validation": 0.25, "seed": 4}, (3,)),
    "evidence": (network, lambda: {"data": smooth(), "steps": 90, "weight_decay": "evidence"}, (5, 45)),
    "batches": (network, lambda: {"data": batches(), **TRAINING}, (2, 6, 11)),
    "defaults": (network, lambda: {"data": DataLoader(TensorDataset(*smooth(1200)), 300), "epochs": 3}, (2, 7)),
    "shuffled": (network, lambda: {"data": loader(), **TRAINING}, (4, 6, 12)),
    "own generator": (network, lambda: {"data": loader(torch.Generator().manual_seed(5)), **TRAINING}, (3, 6, 9)),
    "validation loader": (network, lambda: {"data": loader(), **TRAINING, "validation": loader(size=7)}, (5, 9)),
    "own sampler": (network, lambda: {"data": by_sampler(), **TRAINING}, (3, 8)),
    "Python's order": (network, lambda: {"data": Shuffled(), **TRAINING}, (4, 9)),
    "workers": (
        network,
        lambda: {"data": DataLoader(TensorDataset(*smooth()), 20, shuffle=True, num_workers=1), **TRAINING},
        (4,),
    ),
    "dropout": (lambda: network(nn.Dropout(0.3)), lambda: {"data": loader(), **TRAINING}, (4, 6)),
    "sampler": (network, lambda: {"data": draw, "samples": 30, "steps": 6, "validation": OTHERS}, (2, 5)),
    "seeded sampler, any loss": (
        network,
        lambda: {"data": draw, "loss": nn.HuberLoss(), "samples": 30, "steps": 5, "seed": 2, "validation": OTHERS},
        (3,),
    ),
    # weights are balanced anew before the ninth step
    "equations": (network, lambda: {"loss": equations(), "samples": 20, "steps": 10}, (8, 9)),
}


def fitted(model, arguments, **more):
    settings = {"progress": False, "loss": nn.MSELoss(), **arguments, **more}
    return woodbury.fit(model, settings.pop("loss"), settings.pop("data", None), **settings)


def start(seed):
    torch.manual_seed(seed)
    random.seed(seed)


def kill_at(step):
    def callback(fit):
        if fit.steps == step:
            raise KilledError

    return callback


def told(fit, model):
    """All that a fit says and leaves, without times."""
    names = ("loss", "validation", "best_step", "steps", "samples", "reason", "noise", "log_evidence")
    history = [{key: own for key, own in entry.items() if key != "seconds"} for entry in fit.history]
    return {name: getattr(fit, name) for name in names}, history, reference.theta(model).tolist()


@pytest.mark.parametrize("name", FITS)
def test_a_fit_that_was_killed_ends_as_one_that_was_not(name, tmp_path):
    make, arguments, kills = FITS[name]
    model, path = make(), tmp_path / "fit.ckpt"
    start(1)
    whole = told(fitted(model, arguments()), model)
    for number, step in enumerate(kills):
        model = make(seed=7) if number and make is network else make()  # its parameters do not matter
        start(1 if not number else 50 + number)  # nor does what others have drawn
        with pytest.raises(KilledError):
            fitted(model, arguments(), checkpoint=path, resume=path, callback=kill_at(step))
    assert [own.name for own in tmp_path.iterdir()] == ["fit.ckpt"]
    model = make()
    start(99)
    assert told(fitted(model, arguments(), checkpoint=path, resume=path), model) == whole
    model = make()
    start(98)
    assert told(fitted(model, arguments(), resume=path), model) == whole  # of one that has ended: its end


def test_a_fit_by_evidence_goes_on_with_a_model_that_starts_elsewhere():
    data, ends = [own.float() for own in smooth()], []
    for stop in (10, 99):
        model = network().float()
        arguments = {"data": data, "steps": 20, "weight_decay": "evidence"}
        fit = fitted(model, arguments, callback=lambda fit, stop=stop: fit.steps == stop)
        if stop == 10:
            model = network(seed=7).float()
            fitted(model, arguments, resume=fit)
        ends.append(reference.theta(model))
    assert torch.equal(*ends)


def test_a_resume_leaves_random_numbers_alone_where_the_fit_draws_none(tmp_path):
    arguments = {"data": smooth(), "seed": 0}
    fitted(network(), arguments, steps=3, checkpoint=tmp_path / "fit")
    state = torch.get_rng_state()
    fitted(network(), arguments, steps=5, resume=tmp_path / "fit")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["a pair", "batches", "seeded sampler, any loss"])
def test_a_fit_itself_or_its_state_can_be_taken_up(name):
    arguments, whole, ends = {**FITS[name][1](), "seed": 2}, network(), []
    expected = told(fitted(whole, arguments), whole)
    for as_state in (False, True):
        other = network()
        part = fitted(other, arguments, callback=lambda fit: fit.steps == 4)
        resume = through_a_file(part.state_dict()) if as_state else part
        ends.append(told(fitted(other, arguments, resume=resume), other))
    assert ends == [expected] * 2


# -- files that hold no checkpoint of this fit --------------------------------------------------------------------


def damaged(content):
    yield from (b"", b"nothing", content[:40], content[:-1], content + b"x", content[1:])
    draws = random.Random(0)
    for _ in range(30):
        place = draws.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ (1 << draws.randrange(8))]) + content[place + 1 :]


def check_refused(path, message, error=ValueError, **arguments):
    """The error, with the model and torch's random numbers as they were."""
    model, state = network(), torch.get_rng_state()
    with refused(model, message, error) as raised:
        fitted(model, {"data": smooth(), "steps": 3, "seed": 0, **arguments}, resume=path)
    assert torch.equal(torch.get_rng_state(), state)
    return str(raised.value)


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path):
    path = tmp_path / "some.ckpt"
    fitted(network(), {"data": smooth(), "steps": 3}, checkpoint=path)
    content = path.read_bytes()
    for number, other in enumerate(damaged(content)):
        path.write_bytes(other)
        assert "some.ckpt" in check_refused(path, "is damaged|another (kind|version)"), number
        assert path.read_bytes() == other


def test_what_is_no_checkpoint_of_this_fit_is_refused_by_name(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(sealed("checkpoint", 7, {"step": 3}))  # of `woodbury train`
    check_refused(path, r"other' is a file of another kind \(checkpoint\)")
    path.write_bytes(sealed("fit", 99, {"step": 3}))
    check_refused(path, "other' was written by another version of woodbury")
    path.write_bytes(sealed("fit", checkpoint.FORMAT, {"steps": 3}))
    check_refused(path, r"must be the state_dict\(\) of an earlier Fit")
    content = b"not of torch.save"
    header = f"woodbury fit {checkpoint.FORMAT} {hashlib.sha256(content).hexdigest()}\n".encode()
    path.write_bytes(header + content)
    check_refused(path, "other' cannot be read")
    check_refused(tmp_path / "nothing", "there is no such file", FileNotFoundError)
    path.unlink()
    fitted(network(), {"data": batches(), "steps": 3}, checkpoint=path)
    check_refused(path, "a fit to a loader, and this is one to a pair")
    check_refused(path, "a fit to a loader, and this is one to samples that are drawn", data=draw)
    path.unlink()
    fitted(nn.Linear(2, 1).double(), {"data": smooth(), "steps": 3}, checkpoint=path)
    check_refused(path, "resume is of another model")


def test_a_checkpoint_is_not_written_over_other_files(tmp_path):
    (tmp_path / "data.csv").write_text("1, 2\n")
    model = network()
    with refused(model, r"data.csv' is a file of another kind"):
        fitted(model, {"data": smooth()}, checkpoint=tmp_path / "data.csv")
    with refused(model, "there is no folder", FileNotFoundError):
        fitted(model, {"data": smooth()}, checkpoint=tmp_path / "nowhere" / "fit")
    assert (tmp_path / "data.csv").read_text() == "1, 2\n"


def test_a_full_disk_is_said_and_the_fit_goes_on(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "write_whole", fail)
    with pytest.warns(RuntimeWarning, match=r"cannot be written \(no space left\); the fit goes on"):
        fit = fitted(network(), {"data": smooth(), "steps": 4}, checkpoint=tmp_path / "fit")
    assert fit.steps == 4


def test_it_is_written_after_the_first_step_every_30_seconds_and_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "INTERVAL", 30.0)
    written, clock = [], [0.0]
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(checkpoint, "write_whole", lambda *file: written.append(clock[0]))

    def pass_time(fit):
        clock[0] += 7.0

    fitted(network(), {"data": smooth(), "steps": 10}, checkpoint=tmp_path / "fit", callback=pass_time)
    assert written == [7.0, 42.0, 70.0]


# -- interrupts -----------------------------------------------------------------------------------------------


class Interrupt:
    """Ctrl-C at one of many places, by number; where there are fewer of them nothing happens."""

    def __init__(self, place, at):
        self.place, self.left = place, at

    def at(self, place):
        if place == self.place:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


class Loader:
    def __init__(self, data, interrupt, place):
        self.data, self.interrupt, self.place = data, interrupt, place

    def __iter__(self):
        for batch in zip(*(own.split(20) for own in self.data), strict=True):
            self.interrupt.at(self.place)
            yield batch


def interrupted(kind, place, at):
    interrupt = Interrupt(place, at)

    def watched(layer, inputs):
        interrupt.at("training" if layer.training else "evaluation")
        return inputs

    def sampler(count):
        interrupt.at("sampler")
        return draw(count)

    model = network(Parts(watched))
    data = {"pair": smooth(), "loader": Loader(smooth(), interrupt, "loader"), "sampler": sampler}[kind]
    settings = {"data": data, "validation": OTHERS, "steps": 8, "patience": 8}
    if kind == "loader":
        settings = {"data": data, "validation": Loader(OTHERS, interrupt, "validation loader"), "epochs": 4}
    elif kind == "sampler":
        settings["samples"] = 30
    fit = fitted(model, settings, callback=lambda fit: interrupt.at("callback"), seed=0)
    interrupt.place = None
    return fit, model


@functools.cache
def undisturbed(kind):
    return interrupted(kind, "nowhere", 0)[0]


ALWAYS = ("training", "evaluation", "callback")
PLACES = {"pair": ALWAYS, "loader": (*ALWAYS, "loader", "validation loader"), "sampler": (*ALWAYS, "sampler")}


@pytest.mark.parametrize(
    "kind, place, at",
    [
        *((kind, place, at) for kind, places in PLACES.items() for place in places for at in (1, 4, 13)),
        ("pair", "evaluation", 1 + 2 * 8 + 1),  # after the last of 8 steps
    ],
)
def test_an_interrupt_anywhere_leaves_the_best_parameters(kind, place, at):
    fit, model = interrupted(kind, place, at)
    assert all(own.training for own in model.modules())
    judged = [entry["validation"] for entry in fit.history if "validation" in entry]
    with torch.no_grad():
        loss = nn.functional.mse_loss(model.eval()(OTHERS[0]), OTHERS[1]).item()
    assert len(fit.history) == fit.steps or kind == "loader"
    if judged:
        assert fit.validation is not None and loss <= min(judged) * (1 + 1e-12)
        assert fit.validation == pytest.approx(loss, rel=1e-12)
    whole = undisturbed(kind)
    assert fit.reason == "interrupted" or (fit.reason == whole.reason and fit.steps == whole.steps)
    ours, theirs = ([own.get("loss") for own in one.history] for one in (fit, whole))
    assert ours == theirs[: len(ours)]


# -- files are there whole or not at all ----------------------------------------------------------------


def test_the_content_is_on_disk_before_it_takes_the_name_and_the_name_before_the_call_ends(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def note(file):
        calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else os.fstat(file).st_size)
        fsync(file)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append(Path(old).parent), replace(old, new)))
    write_whole(tmp_path / "file", b"content")
    assert calls == [len(b"content"), tmp_path, "folder"]


def test_a_file_is_replaced_and_what_a_kill_left_behind_goes(tmp_path):
    (tmp_path / ".unfinished").write_bytes(b"half a file")
    for content in (b"first", bytearray(b"second, and longer"), b""):
        write_whole(tmp_path / "file", content)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(call, error, tmp_path, monkeypatch):
    def fail(*arguments):
        raise error

    write_whole(tmp_path / "file", b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        write_whole(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"old"
