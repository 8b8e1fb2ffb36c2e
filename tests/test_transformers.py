"""A language model of another library, as it comes: GPT-2 with tied embeddings and layers no rule knows."""

import pytest
import torch
from torch import nn

import reference
import woodbury
from woodbury._vector import flatten

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")

N, WORDS, LENGTH = 4, 7, 5


def tiny_gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=8,
        n_embd=6,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).double()


def last_logits(model, batch):
    return model(**batch).logits[:, -1]


def all_logits(model, batch):
    return model(**batch).logits.transpose(1, 2)


def next_words():
    """One target a sample, the last word; or one a token, some of them ignored."""
    targets = torch.randint(WORDS, (N, LENGTH))
    ignored = targets.clone()
    ignored[0, 2:] = -100
    return {"last": (last_logits, targets[:, -1]), "tokens": (all_logits, ignored)}


@pytest.mark.parametrize("method", [woodbury.GaussNewton, woodbury.NaturalGradient])
@pytest.mark.parametrize("blocks", ["full", "layer"])
@pytest.mark.parametrize("kind", ["last", "tokens"])
def test_a_step_of_gpt2_is_the_dense_one(method, blocks, kind):
    model, loss = tiny_gpt2(), nn.CrossEntropyLoss()
    batch = {"input_ids": torch.randint(WORDS, (N, LENGTH))}
    forward, targets = next_words()[kind]
    optimizer = method(model, loss, damping=0.05, blocks=blocks, forward=forward, fallback="autograd")
    p = flatten(optimizer.direction(batch, targets, subset=[2, 0, 1]))
    expected, _, _ = reference.dense_direction(
        model, loss, batch, targets, [2, 0, 1], 0.05, optimizer.curvature.name, blocks=blocks, forward=forward
    )
    assert reference.relative_error(p, expected) <= 1e-10
    assert optimizer.verify(batch, targets) <= 1e-9
    before = loss(forward(model, batch), targets).detach()
    info = optimizer.step(batch, targets)
    after = loss(forward(model, batch), targets).detach()
    torch.testing.assert_close(info.ratio, (before - after) / info.predicted)
