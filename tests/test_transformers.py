"""Models of another library as they come, built from a config: BERT, GPT-2, Llama, Qwen, T5 and ViT."""

import sys

import pytest
import torch
from torch import nn

import bounds
import reference
import woodbury
from test_layers import CLASSES, METHODS, check_directions, check_ratio, check_rows, finish
from woodbury._vector import flatten
from woodbury.layers import ExplicitRows

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
transformers.logging.set_verbosity_error()

N, WORDS, LENGTH = 4, 7, 5
SIZES = {"hidden_size": 4, "intermediate_size": 5, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 6, "pad_token_id": 0}


def bert(kind):
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**TEXT, **dropout, num_labels=CLASSES)
    return getattr(transformers, f"BertFor{kind}")(config)


def gpt2(kind="GPT2LMHeadModel"):
    sizes = {"vocab_size": WORDS, "n_positions": 6, "n_embd": 4, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **dropout, num_labels=CLASSES, bos_token_id=0, eos_token_id=0)
    return getattr(transformers, kind)(config)


def t5():
    sizes = {"vocab_size": WORDS, "d_model": 4, "d_kv": 2, "d_ff": 5, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit():
    config = transformers.ViTConfig(**SIZES, image_size=4, patch_size=2, num_channels=2, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config)


MODELS = {
    "bert": lambda: bert("SequenceClassification"),
    "bert, tied head": lambda: bert("MaskedLM"),
    "gpt2": gpt2,
    "gpt2, classes": lambda: gpt2("GPT2ForSequenceClassification"),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=1)),
    "qwen2, tied head": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**TEXT, num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**TEXT, num_key_value_heads=1, head_dim=2)
    ),
    "t5": t5,
    "vit": vit,
}


class Doubled:
    """torch, with float64 where a module of transformers says float32: its norms cast to that type."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def doubled(monkeypatch):
    """Inside, float64 models of transformers compute in float64 throughout."""
    for kind in ("llama", "qwen2", "qwen3", "t5"):
        module = f"transformers.models.{kind}.modeling_{kind}"
        getattr(transformers, {"t5": "T5Model"}.get(kind, f"{kind.capitalize()}Model"))  # imports it
        monkeypatch.setattr(sys.modules[module], "torch", Doubled())


def logits(model, batch):
    """The outputs, classes on the second axis."""
    outputs = model(**batch).logits
    return outputs if outputs.dim() == 2 else outputs.transpose(1, 2)


def problem(name, dtype=torch.float64, samples=N):
    """A model away from its initial weights, a batch with padding, and targets, some of them ignored."""
    torch.manual_seed(3)
    model = MODELS[name]().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    if name == "vit":
        return model, {"pixel_values": torch.randn(samples, 2, 4, 4, dtype=dtype)}, _classes(samples)
    mask = torch.ones(samples, LENGTH, dtype=torch.long)
    mask[0, 3:] = 0
    batch = {"input_ids": torch.randint(1, WORDS, (samples, LENGTH)) * mask, "attention_mask": mask}
    if name == "t5":
        batch["decoder_input_ids"] = torch.randint(1, WORDS, (samples, LENGTH))
    words = torch.randint(WORDS, (samples, LENGTH))
    words[0, 3:] = -100
    return model, batch, _classes(samples) if logits(model, batch).dim() == 2 else words


def _classes(samples):
    return torch.randint(CLASSES, (samples,))


@pytest.mark.parametrize("name, samples", [*((name, LENGTH) for name in MODELS), ("bert", 1), ("vit", 1)])
def test_rows_of_a_model_are_those_of_a_loop_over_its_samples(name, samples, doubled):
    """No fallback, also where there are as many samples as positions: U^T U and gradients."""
    model, batch, targets = problem(name, samples=samples)
    loss = nn.CrossEntropyLoss()
    reference_samples = reference.per_sample(model, loss, batch, targets, logits)
    rows = woodbury.rows(model, loss, batch, targets, forward=logits)
    U, B = rows.dense(), reference.curvature_matrix(reference_samples, "gauss-newton")
    bound = bounds.rounding(sum(U.shape))
    assert reference.relative_error(U.T @ U, B) <= bound
    assert reference.relative_error(rows.gram(), U @ U.T) <= bound
    gradients = torch.stack([J.T @ r for J, r, _ in reference_samples]) / samples**0.5
    with bounds.known_apart():
        rows = woodbury.rows(model, loss, batch, targets, curvature="empirical", forward=logits)
    assert reference.relative_error(rows.dense(), gradients) <= bound


@pytest.mark.parametrize("index, name", list(enumerate(MODELS)))
def test_a_step_of_a_model_is_the_dense_one(index, name, doubled):
    """With methods and blocks in turn."""
    method, blocks = list(METHODS.values())[index % 2], ("full", "layer")[index // 2 % 2]
    model, batch, targets = problem(name)
    loss = nn.CrossEntropyLoss()
    solve = reference.dense_system(model, loss, batch, targets, [2, 0, 1], logits)
    optimizer = method(model, loss, damping=0.05, blocks=blocks, forward=logits)
    p = flatten(optimizer.direction(batch, targets, subset=[2, 0, 1]))
    expected, B, _ = solve(0.05, optimizer.curvature.name, blocks)
    assert reference.relative_error(p, expected) <= bounds.of_solve(B, 0.05)
    check_ratio(optimizer, batch, targets)


@pytest.mark.parametrize("index, name", list(enumerate(MODELS)))
def test_a_step_of_a_model_solves_its_system(index, name):
    """As transformers has it, with norms that cast float64 to float32, in training mode as well."""
    method, dtype = list(METHODS.values())[(index + 1) % 2], (torch.float32, torch.float64)[index // 2 % 2]
    model, batch, targets = problem(name, dtype)
    optimizer = method(model, nn.CrossEntropyLoss(), forward=logits)
    for mode in (True, False):
        model.train(mode)
        optimizer.step(batch, targets)
        assert optimizer.verify(batch, targets) <= bounds.of_verify(optimizer, batch, targets, dtype=torch.float32)


@pytest.mark.parametrize("shape, in_place", [((3,), False), ((2, 3), False), ((2, 3), True), ((2, 1, 3), True)])
def test_rows_of_conv1d_equal_dense_autograd_and_are_not_written_out(shape, in_place):
    """Also where the next layer writes into its outputs."""
    behind = nn.ReLU(inplace=True) if in_place else nn.Identity()
    inputs, targets = torch.randn(N, *shape, dtype=torch.float64), _classes(N)
    model = finish(nn.Sequential(transformers.pytorch_utils.Conv1D(2, 3), behind), inputs)
    check_rows(model, nn.CrossEntropyLoss(), inputs, targets)
    forms = woodbury.rows(model, nn.CrossEntropyLoss(), inputs, targets).forms
    assert not any(isinstance(form, ExplicitRows) for form in forms.values())
    check_directions(model, nn.CrossEntropyLoss(), inputs, targets, [3, 0])
