"""The Trainer of transformers, and accelerate: the loops as they are, with steps of ours."""

import copy
import warnings

import pytest
import torch
from torch import nn

import bounds
import reference
import woodbury
from cases import every_pair

pytest.importorskip("transformers", reason="the package transformers is not installed")
pytest.importorskip("accelerate", reason="the package accelerate is not installed")

import accelerate
import transformers

import huggingface
from test_transformers import MODELS, WORDS, logits, problem

N, DAMPING = 8, 1.0
IN_FLOAT32 = ("gpt2", "llama", "qwen2, tied head", "qwen3")  # the losses of these language models


@pytest.fixture(autouse=True)
def forget_devices():
    """accelerate remembers its settings for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def labels_of(name, batch, targets):
    """What the model itself is given, for targets with one entry for each position or sample."""
    if name in ("gpt2", "llama"):  # which shift them
        return nn.functional.pad(targets, (1, 0), value=-100)[:, :-1]
    return targets


def whole_batch(name, dtype):
    """A model, a batch with targets that its own loss can have, and the samples as Trainer takes them."""
    model, batch, targets = problem(name, dtype, samples=N)
    if name in ("gpt2", "llama"):
        targets[:, -1] = -100  # the last position predicts nothing
    samples = huggingface.Samples(**batch, labels=labels_of(name, batch, targets))
    return model, batch, targets, samples


def train(model, optimizer, samples, folder, steps=2, accumulate=1, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=N // accumulate,
        gradient_accumulation_steps=accumulate,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{"max_grad_norm": 0, "save_strategy": "no", **options},
    )
    data = {"train_dataset": samples, "eval_dataset": samples}
    trainer = transformers.Trainer(model, arguments, **data, optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return trainer


def factor(name, accumulate):
    """What the loss of Trainer is beside the mean over all samples or tokens.

    The models of BERT take the mean of each micro-batch, and Trainer adds these up. It divides the loss of GPT-2
    by the number of labels that are not -100; the first label of a sequence, which nothing predicts, is -100 here.
    """
    return accumulate if name.startswith("bert") else 1


def bound_of(name, optimizer, batch, targets, steps=1):
    """For steps of models in float64, some with a softmax over the words in float32."""
    short = {"dtype": torch.float32, "size": WORDS} if name in IN_FLOAT32 else {}
    return bounds.of_verify(optimizer, batch, targets, steps=steps, **short)


@every_pair(
    name=["bert", "bert, tied head", "gpt2", "llama", "vit"],
    accumulate=[1, 2],
    method=[woodbury.GaussNewton, woodbury.NaturalGradient],
)
def test_trainer_takes_the_steps_on_its_batches(name, accumulate, method, tmp_path):
    """c f has the step of f with lambda / c, and by natural gradient, where B is that of c r, 1 / c of that with
    lambda / c^2."""
    model, batch, targets, samples = whole_batch(name, torch.float64)
    if accumulate == 2 and targets.dim() == 2:  # the same number of tokens in every half
        targets = targets.clone()
        targets[0] = targets[1]
        targets[0, 3:] = targets[1, 3:] = -100
        targets[2:, 3:] = -100
        samples = huggingface.Samples(**batch, labels=labels_of(name, batch, targets))
    twin, start, loss = copy.deepcopy(model), reference.theta(model), nn.CrossEntropyLoss()
    c = factor(name, accumulate)
    trained = method(model, loss, damping=DAMPING, guard=None, watch=True)
    train(model, trained, samples, tmp_path, accumulate=accumulate)
    natural = method is woodbury.NaturalGradient
    lr, damping = (1 / c, DAMPING / c**2) if natural else (1.0, DAMPING / c)
    alone = method(twin, loss, lr=lr, damping=damping, guard=None, forward=logits)
    twin.train()
    bound = bound_of(name, alone, batch, targets, steps=2)
    for _ in range(2):
        alone.step(batch, targets)
    found, expected = reference.theta(model), reference.theta(twin)
    assert (found - expected).norm() <= bound * (expected - start).norm()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "t5"])  # which makes inputs from labels
def test_a_loss_inside_the_model_has_the_step_of_the_same_loss_outside(name):
    """loss = model(**batch).loss; loss.backward(); optimizer.step(), without Trainer, for every model."""
    model, batch, targets, samples = whole_batch(name, torch.float64)
    labels = samples.columns["labels"]
    if name in ("qwen2, tied head", "qwen3"):
        targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    twin, loss = copy.deepcopy(model), nn.CrossEntropyLoss()
    optimizer = woodbury.GaussNewton(model, loss, damping=DAMPING, watch=True)
    model(**batch, labels=labels).loss.backward()
    optimizer.step()
    alone = woodbury.GaussNewton(twin, loss, damping=DAMPING, forward=logits)
    alone.step(batch, targets)
    assert reference.model_error(model, twin) <= bound_of(name, alone, batch, targets)


def test_trainer_resumes_bit_for_bit(tmp_path):
    """From the checkpoint of a whole run on, with other settings to begin with."""

    def begin(**settings):
        model, _, _, samples = whole_batch("bert", torch.float32)
        fixed = {"curvature_samples": 4, "watch": True}
        return model, woodbury.NaturalGradient(model, nn.CrossEntropyLoss(), **fixed, **settings), samples

    model, optimizer, samples = begin(lr=0.5, momentum=0.5, seed=1)
    train(model, optimizer, samples, tmp_path, steps=4, accumulate=2, save_strategy="steps", save_steps=2)
    resumed, optimizer, samples = begin(lr=0.1, momentum=0.1, seed=7)
    checkpoint = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    train(resumed, optimizer, samples, tmp_path / "resumed", steps=4, accumulate=2, **checkpoint)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(reference.theta(model), reference.theta(resumed))


def test_clipping_of_trainer_is_reported(tmp_path):
    model, _, _, samples = whole_batch("bert", torch.float32)
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), watch=True)
    with pytest.warns(RuntimeWarning, match="max_grad_norm=0"):
        train(model, optimizer, samples, tmp_path, steps=1, max_grad_norm=1e-3)


PRECISIONS = [(woodbury.GaussNewton, dtype, None) for dtype in (torch.float32, torch.float64)]
PRECISIONS.append((woodbury.NaturalGradient, torch.float32, torch.float64))


@pytest.mark.parametrize("name", list(huggingface.MODELS))
def test_the_example_learns_two_epochs_with_every_model(name, capsys):
    """And steps from there solve their systems."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "gradients were", RuntimeWarning)
        trainer, before, after = huggingface.main(name, epochs=2, samples=128)
    assert trainer.state.global_step == 8 and after < before
    assert f"{name}: loss on other samples" in capsys.readouterr().out
    residuals = []
    for method, dtype, gram_dtype in PRECISIONS:
        model = copy.deepcopy(trainer.model).to(dtype)
        inputs = {key: value[:4] for key, value in trainer.train_dataset.columns.items()}
        targets = inputs.pop("labels")
        inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
        optimizer = method(model, nn.CrossEntropyLoss(), gram_dtype=gram_dtype, forward=logits)
        residuals.append(float(optimizer.verify(inputs, targets)))
        precision = torch.float32 if name == "llama" else dtype  # its norms compute in float32
        width = model.config.hidden_size  # the length of most sums
        assert residuals[-1] <= bounds.of_verify(optimizer, inputs, targets, dtype=precision, size=width)
    print(f"{name}: verify", *(f"{value:.1e}" for value in residuals))


def test_a_loop_of_accelerate_takes_the_same_steps():
    model, batch, targets, samples = whole_batch("bert", torch.float64)
    twin, loss = copy.deepcopy(model), nn.CrossEntropyLoss()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = woodbury.GaussNewton(model, loss, momentum=0.5, watch=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    alone = woodbury.GaussNewton(twin, loss, momentum=0.5, forward=logits)
    for _ in range(4):
        optimizer.zero_grad()
        accelerator.backward(model(**batch, labels=samples.columns["labels"]).loss)
        optimizer.step()
        alone.step(batch, targets)
    assert reference.model_error(model, twin) <= bounds.of_verify(alone, batch, targets, steps=4)
