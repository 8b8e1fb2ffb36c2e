"""Inside Trainer and accelerate: the steps are those of a plain loop, and none goes through the fallback."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import woodbury

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SAMPLES, LENGTH, WORDS = 20, 8, 30


def texts():
    return torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))


def bert():
    config = transformers.BertConfig(
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SIZES,
    )
    labels = torch.arange(SAMPLES) % 3
    return transformers.BertForSequenceClassification(config), {"input_ids": texts(), "labels": labels}


def vit():
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **SIZES)
    pictures = torch.randn(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(SAMPLES) % 3
    return transformers.ViTForImageClassification(config), {"pixel_values": pictures, "labels": labels}


def llama():
    config = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SIZES)
    return transformers.LlamaForCausalLM(config), {"input_ids": texts(), "labels": texts()}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": texts(), "labels": texts()}


MODELS = {"BERT": bert, "ViT": vit, "Llama": llama, "GPT-2": gpt2}


def make(name):
    torch.manual_seed(1)
    model, batch = MODELS[name]()
    return model, batch


def logits(model, inputs):
    """Of classes, or of the next words with these in the second axis."""
    out = model(**inputs).logits
    return out if out.dim() == 2 else out.movedim(-1, 1)


def targets_of(labels):
    return labels if labels.dim() == 1 else F.pad(labels, (0, 1), value=-100)[:, 1:]


def train(model, batch, folder, optimizer, epochs=2, **options):
    """The batches that Trainer drew, in their order."""
    drawn = []

    def collate(samples):
        drawn.append({name: torch.stack([sample[name] for sample in samples]) for name in samples[0]})
        return dict(drawn[-1])

    data = [{name: own[index] for name, own in batch.items()} for index in range(SAMPLES)]
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        **{"max_grad_norm": 0, **options},
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=8)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, data_collator=collate, optimizers=(optimizer, schedule)
    )
    trainer.train()
    return trainer, drawn


def difference(a, b):
    """The largest relative difference of a parameter."""
    return max(
        float((p - q).detach().norm() / p.detach().norm().clamp_min(1e-3))
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
def test_two_epochs_of_trainer_are_steps_of_a_plain_loop(name, tmp_path):
    model, batch = make(name)
    plain = copy.deepcopy(model)
    # GPT-2 in Trainer divides by all labels, of which the first of each text has no prediction
    factor = (LENGTH - 1) / LENGTH if name == "GPT-2" else 1.0
    expected = woodbury.NaturalGradient(plain, nn.CrossEntropyLoss(), lr=0.3, damping=0.5, forward=logits)
    optimizer = woodbury.NaturalGradient(model, None, lr=0.3, damping=0.5, watch=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainer, drawn = train(model, batch, tmp_path, optimizer)
    assert trainer.state.global_step == len(drawn) == 8
    if factor != 1.0:
        # c l has the system c^2 F + lambda: that of l with lambda / c^2, and a step 1 / c times as long
        expected.damping = woodbury.Constant(0.5 / factor**2)
        expected.state["damping"] = torch.tensor(0.5 / factor**2, dtype=torch.float64)
    schedule = torch.optim.lr_scheduler.LinearLR(expected, 1.0, 0.5, total_iters=8)
    for own in drawn:
        labels = own.pop("labels")
        for group in expected.param_groups:
            group["lr"] = group["lr"] / factor
        expected.step(own, targets_of(labels))
        for group in expected.param_groups:
            group["lr"] = group["lr"] * factor
        schedule.step()
    assert difference(model, plain) < 1e-3  # eight steps in float32
    assert expected.verify(own, targets_of(labels)) < 1e-6


@pytest.mark.parametrize("name", ["Llama", "ViT"])
def test_accumulated_micro_batches_are_one_batch(name, tmp_path):
    model, batch = make(name)
    plain = copy.deepcopy(model)
    expected = woodbury.NaturalGradient(plain, nn.CrossEntropyLoss(), lr=0.3, damping=0.5, forward=logits)
    optimizer = woodbury.NaturalGradient(model, None, lr=0.3, damping=0.5, watch=True)
    trainer, drawn = train(model, batch, tmp_path, optimizer, gradient_accumulation_steps=2)
    assert trainer.state.global_step == 4
    schedule = torch.optim.lr_scheduler.LinearLR(expected, 1.0, 0.5, total_iters=8)
    for first, second in zip(drawn[::2], drawn[1::2], strict=True):
        own = {name: torch.cat([first[name], second[name]]) for name in first}
        labels = own.pop("labels")
        expected.step(own, targets_of(labels))
        schedule.step()
    assert difference(model, plain) < 1e-3


def test_the_clipping_that_trainer_does_by_default_is_reported(tmp_path):
    model, batch = make("BERT")
    optimizer = woodbury.NaturalGradient(model, None, watch=True)
    with pytest.warns(RuntimeWarning, match="max_grad_norm=0"):
        train(model, batch, tmp_path, optimizer, epochs=1, max_grad_norm=1e-3)


def test_gauss_newton_in_trainer_with_dropout(tmp_path):
    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=3, **SIZES)
    model, batch = transformers.BertForSequenceClassification(config), bert()[1]
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), lr=0.3, watch=True)
    trainer, _ = train(model, batch, tmp_path, optimizer, epochs=6, logging_steps=4)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_accelerate_takes_the_steps_of_a_plain_loop():
    model, batch = make("BERT")
    plain = copy.deepcopy(model)
    labels = batch.pop("labels")
    expected = woodbury.NaturalGradient(plain, nn.CrossEntropyLoss(), damping=0.5, forward=logits)
    optimizer = woodbury.NaturalGradient(model, None, damping=0.5, watch=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model, prepared = accelerator.prepare(model, optimizer)
    for _ in range(4):
        expected.step(batch, labels)
        prepared.zero_grad()
        accelerator.backward(F.cross_entropy(model(**batch).logits, labels))
        prepared.step()
    assert difference(model, plain) < 1e-5
