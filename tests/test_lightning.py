"""Inside Lightning: the steps are those of a plain loop, checkpoints go on bit by bit, numbers are logged."""

from functools import partial
from itertools import cycle, islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bounds
import problems
import reference
import woodbury

lightning = pytest.importorskip("lightning")
KINDS = ("UserWarning", "DeprecationWarning", "FutureWarning")
pytestmark = pytest.mark.filterwarnings(*(f"ignore::{kind}" for kind in KINDS))


def data(samples=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 5, generator=generator), torch.randint(3, (samples,), generator=generator)


network = partial(problems.network, 5, 8, 3, seed=1, dtype=torch.float32)


class Module(lightning.LightningModule):
    def __init__(self, **settings):
        super().__init__()
        self.net, self.settings = network(), settings

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        inputs, targets = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(inputs), targets))

    def configure_optimizers(self):
        return woodbury.GaussNewton(self.net, nn.CrossEntropyLoss(), curvature_samples=5, seed=0, **self.settings)


def trainer(path, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(default_root_dir=path, **{"enable_checkpointing": False, **quiet, **options})


def loader(size=10):
    return DataLoader(TensorDataset(*data()), batch_size=size)


def plain_steps(size, count, **settings):
    """The parameters after so many steps of a loop without Lightning."""
    model = network()
    optimizer = woodbury.GaussNewton(model, nn.CrossEntropyLoss(), curvature_samples=5, seed=0, **settings)
    for inputs, targets in islice(cycle(loader(size)), count):
        optimizer.step(inputs, targets)
    return reference.theta(model)


def test_ten_steps_are_ten_steps_and_those_of_a_plain_loop(tmp_path):
    model, run = Module(), trainer(tmp_path, max_steps=10)
    run.fit(model, loader(), loader())
    assert run.global_step == 10 and torch.equal(reference.theta(model), plain_steps(10, 10))


def test_a_checkpoint_goes_on_bit_by_bit(tmp_path):
    whole, part = Module(momentum=0.5), Module(momentum=0.5)
    trainer(tmp_path, max_epochs=4).fit(whole, loader())
    first = trainer(tmp_path, max_epochs=2, enable_checkpointing=True)
    first.fit(part, loader())
    path = tmp_path / "half.ckpt"
    first.save_checkpoint(path)
    resumed = Module(momentum=0.5)
    run = trainer(tmp_path, max_epochs=4)
    run.fit(resumed, loader(), ckpt_path=path)
    assert run.global_step == 16 and torch.equal(reference.theta(whole), reference.theta(resumed))


def test_accumulated_batches_are_one_batch_with_watch(tmp_path):
    model, run = Module(watch=True), trainer(tmp_path, max_epochs=3, accumulate_grad_batches=2)
    run.fit(model, loader())
    assert run.global_step == 6
    bound = bounds.of_step(network(), nn.CrossEntropyLoss(), *data(), damping=1.0, steps=6)
    assert reference.relative_error(reference.theta(model), plain_steps(20, 6)) <= bound


def test_accumulation_without_watch_raises_and_clipping_is_reported(tmp_path):
    with pytest.raises(ValueError, match="watch=True"):
        trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2).fit(Module(), loader())
    with pytest.warns(RuntimeWarning, match="clipped"):
        trainer(tmp_path, max_steps=1, gradient_clip_val=0.1).fit(Module(), loader())


def test_steps_are_logged(tmp_path):
    import woodbury.lightning

    model = Module()
    run = trainer(tmp_path, max_steps=3, callbacks=[woodbury.lightning.StepMonitor()])
    run.fit(model, loader())
    logged, last, one = run.logged_metrics, run.optimizers[0].last, bounds.rounding(1, dtype=torch.float32)
    for name in ("loss", "damping", "ratio", "step_norm", "accepted"):
        assert float(logged[f"woodbury/{name}"]) == pytest.approx(float(getattr(last, name)), rel=one)
    with pytest.raises(ValueError, match="every"):
        woodbury.lightning.StepMonitor(every=0)


def test_the_example_is_not_below_adam():
    pytest.importorskip("sklearn")
    import lightning_digits

    options = {"enable_progress_bar": False}
    assert lightning_digits.main(epochs=3, **options) >= lightning_digits.main(epochs=3, adam=True, **options)
