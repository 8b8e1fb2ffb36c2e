"""Hugging Face Trainer: exact second-order steps on tiny models; the only new line makes the optimizer.

Run it: python examples/huggingface.py (a minute), or with some of bert, gpt2, llama, vit
"""

import sys
import tempfile

import torch
import transformers
from torch.utils.data import Dataset

import woodbury

WORDS, LENGTH, CLASSES = 12, 8, 3
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": LENGTH, "pad_token_id": 0}


class Samples(Dataset):
    """Samples as Trainer takes them: dictionaries of what the model is called with."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


def sentences(count):
    """Sentences of random words with one of three key words somewhere, which is the label."""
    words, labels = torch.randint(1 + CLASSES, WORDS, (count, LENGTH)), torch.randint(CLASSES, (count,))
    words[torch.arange(count), torch.randint(LENGTH, (count,))] = 1 + labels
    return Samples(input_ids=words, labels=labels)


def scales(count):
    """Sequences that go up or down by the same step, round and round: the first two words tell the rest."""
    start, step = torch.randint(WORDS, (count, 1)), torch.randint(-3, 4, (count, 1))
    words = (start + step * torch.arange(LENGTH)) % WORDS
    return Samples(input_ids=words, labels=words)


def pictures(count):
    """Noise with one of three corners bright."""
    labels, corners = torch.randint(CLASSES, (count,)), torch.tensor([[0, 0], [0, 4], [4, 0]])
    pixels = torch.randn(count, 1, 8, 8)
    for picture, (row, column) in zip(pixels, corners[labels].tolist(), strict=True):
        picture[0, row : row + 4, column : column + 4] += 2
    return Samples(pixel_values=pixels, labels=labels)


def bert():
    config = transformers.BertConfig(**TEXT, num_labels=CLASSES)
    return transformers.BertForSequenceClassification(config), sentences


def gpt2():
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config), scales


def llama():
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config), scales


def vit():
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_channels=1, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config), pictures


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit}


def main(name="bert", epochs=5, samples=512):
    transformers.set_seed(0)
    model, draw = MODELS[name]()
    train, test = draw(samples), draw(256)

    optimizer = woodbury.NaturalGradient(
        model,
        torch.nn.CrossEntropyLoss(),
        lr=0.3,
        momentum=0.9,
        damping=woodbury.LevenbergMarquardt(initial=0.1),
        watch=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            max_grad_norm=0,  # the damping bounds a step; clipped gradients would not be used
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=train, optimizers=(optimizer, None))
        before = trainer.evaluate(test)["eval_loss"]
        trainer.train()
        after = trainer.evaluate(test)["eval_loss"]
    print(
        f"{name}: loss on other samples {before:.3f} before, {after:.3f} after {trainer.state.global_step} steps"
    )
    return trainer, before, after


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        main(chosen)
