"""What a block of a test does beside its own asserts: change nothing, warn of nothing, say what it warned of."""

import io
import pickle
import random
import warnings
from contextlib import contextmanager

import numpy
import pytest
import torch


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@contextmanager
def unchanged(owner):
    """A model stays as it is; of an optimizer its model, its state and what it says of its last step."""
    is_optimizer = isinstance(owner, torch.optim.Optimizer)
    model = owner.model if is_optimizer else owner
    before = state_of(model)
    state, last = (pickle.dumps(owner.state_dict()), owner.last) if is_optimizer else (None, None)
    yield
    assert_same(state_of(model), before)
    if is_optimizer:
        assert pickle.dumps(owner.state_dict()) == state and owner.last is last


@contextmanager
def refused(owner, message, error=ValueError):
    """Raises this error, and the owner is `unchanged`."""
    with unchanged(owner), pytest.raises(error, match=message) as raised:
        yield raised


def loop_step(optimizer, backward, how):
    """One step as a loop of the user's own takes it: from a closure, or watched, after a backward pass."""

    def closure():
        optimizer.zero_grad()
        return backward()

    if how == "closure":
        return optimizer.step(closure)
    if how == "keyword":
        return optimizer.step(closure=closure)
    closure()
    return optimizer.step()


@contextmanager
def silence(category=Warning, message=""):
    """A warning of this kind is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message, category)
        yield


@contextmanager
def told():
    """The warnings as texts, with their classes, when the block has ended."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def through_a_file(value, **options):
    """What torch.load makes of what torch.save has written."""
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return torch.load(content, weights_only=True, **options)


def random_states():
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def restore(states):
    random.setstate(states[0]), numpy.random.set_state(states[1]), torch.set_rng_state(states[2])
