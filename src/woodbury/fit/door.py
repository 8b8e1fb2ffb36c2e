"""`woodbury.fit`: data, a sampler or a loader in, a fitted model out. The kind of data decides which fit it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from woodbury._choice import check_whole_number, part_named
from woodbury.fit import sources
from woodbury.fit.checkpoint import Where
from woodbury.fit.equations import Equations, TermSource
from woodbury.fit.evidence import EvidenceRun
from woodbury.fit.limits import Limits, Progress
from woodbury.fit.precise import DEFAULT_STEPS, PATIENCE, PreciseRun
from woodbury.fit.result import Fit
from woodbury.fit.run import PLAIN, SEARCH, Callback, Metric, Run, Validation
from woodbury.fit.solving import SolvingRun
from woodbury.fit.sources import Conversion, Data, Draw, Drawn, MiniBatches, as_pair, is_batches
from woodbury.fit.training import DEFAULT_EPOCHS, TrainingRun, is_by_time, training_optimizer
from woodbury.losses.rules import as_module
from woodbury.model.capture import call_model
from woodbury.model.compiled import written_model
from woodbury.model.fallback import Forward
from woodbury.optim import GaussNewton
from woodbury.optim.settings import check_model_and_loss
from woodbury.parallel.group import all_processes, raised_by_all
from woodbury.policies.search import CurvedSearch


@raised_by_all
def fit(
    model: nn.Module,
    loss: nn.Module | Callable[..., Any] | Equations,
    data: Data | Draw | Iterable[Any] | None = None,
    *others: NoReturn,
    forward: Forward | None = None,
    fallback: str | None = "autograd",
    weight_decay: float | str = 0.0,
    steps: int | None = None,
    epochs: float | None = None,
    seconds: float | None = None,
    tolerance: float | None = None,
    samples: int | None = None,
    points: str = "by residual",
    validation: Data | Iterable[Any] | float | None = None,
    patience: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    curvature_samples: int | float | str | None = "auto",
    memory: int | None = None,
    metric: str | None = "auto",
    record: Any = None,
    progress: bool = True,
    seed: int | None = None,
    callback: Callback | None = None,
    epoch_callback: Callback | None = None,
    checkpoint: Where | None = None,
    resume: Fit | Mapping[str, Any] | Where | None = None,
) -> Fit:
    """Fit a model, with nothing to tune. The data decides how, and there are four kinds of it.

    A pair is used whole at every step, and fitted to as many digits as there are:

    >>> fit = woodbury.fit(model, torch.nn.MSELoss(), (inputs, targets), tolerance=1e-12)

    Tensors, NumPy arrays, tables of pandas or lists, in float64 (`model.double()`); with noise `validation=0.2` or
    `weight_decay="evidence"` belongs to it. Steps are those of `GaussNewton(model, loss, search=CurvedSearch())`.

    A loader is trained on in mini-batches; anything that gives batches (inputs, targets) again and again is one:

    >>> fit = woodbury.fit(model, torch.nn.CrossEntropyLoss(), loader, epochs=10, validation=(inputs, targets))

    Steps have momentum, memory, Adam's metric and a rate that falls to zero (`woodbury.fit.training`). Batches
    of fewer than 8 labels, or rows of targets, are taken together.

    A sampler draw(count) gives fresh samples for every step, and as many others to judge it:

    >>> fit = woodbury.fit(model, torch.nn.MSELoss(), draw, seconds=60)

    It returns (inputs, targets), or inputs alone where targets are zero. Steps and float64 as with a pair.

    Equations take the place of loss and data: terms, each with points and residuals of its own:

    >>> fit = woodbury.fit(model, woodbury.Equations(inside=(draw, equation), edge=(draw_edge, condition)))

    It stops at whichever limit comes first, or when nothing moves any more; Ctrl-C stops it too, and what was
    reached is returned.

    Args:
        model: any module; it is trained in place and ends with the best parameters.
        loss: one that `GaussNewton` takes, functions of torch.nn.functional for their classes; or `Equations`.
        data: one of the kinds above; targets may be None for zeros. Floats become those of the model.
        forward: f(model, inputs) in place of model(inputs).
        fallback: as in `GaussNewton`; None refuses parameters that no layer rule covers.
        weight_decay: adds weight_decay |theta|^2 / 2 to the loss. "evidence", for a pair: one for each parameter
            tensor, and for squared error the noise, for HuberLoss, SmoothL1Loss and L1Loss the scale, by the
            evidence of the Gauss-Newton posterior; validation data is then measured only. A warning says where the
            evidence finds nothing but the mean, as with many columns.
        steps, seconds, tolerance: where to stop: a number of steps, a time, or a loss (300 steps, with a loader 20
            epochs, if there is no budget). After `resume` steps and seconds count from the very first. Where fewer
            than five steps on all of a pair fit in the seconds, steps take a part of it, with a warning.
        epochs: how often to go through a loader. Where seconds alone are the budget steps take up to four of its
            batches, as noise and time allow (`woodbury.fit.growth`); else nothing follows from the clock.
        samples: how many to draw at first; by default 1.5 per parameter, from 256 to 4096 (on a GPU from 2048 to
            8192, and 4096 where that is not enough); for `Equations` 256 (512) in the first eight steps, and 512
            after that on a CPU, over the number of equations. There are twice as many, up to 4 (8) per parameter,
            after two steps for which others promise less than half as much.
        points: with MSELoss and `Equations`: "by residual" takes the samples of a step from eight times as many,
            more often where the residual is large, with weights that keep the expected loss; "as drawn" does not.
        validation: other samples (inputs, targets), with a loader also one of such batches; then the best
            parameters are those with the lowest loss on them, in evaluation mode. With a pair steps go only as
            deep as that loss falls, and a number, 0.2, sets this share aside (by `seed` or 0; see `Fit.split`).
        patience: with validation data: stop after so many steps without a lower validation loss (6 by default),
            with a loader epochs (a quarter of all, at least 5).
        metrics: functions by name, {"accuracy": f}, from (outputs, targets) of all validation samples, or of a
            pair itself, to a number: per step, with a loader per epoch. See `Fit.history` and `Fit.metrics`.
        curvature_samples, memory: with a loader, as in `GaussNewton`. By default the samples that three SGD steps
            pay for, and the rows of three batches before (none where seconds alone are the budget, on a GPU and
            with several processes).
        metric: as in `GaussNewton`; by default "adam" with a loader (not with weight decay, on a GPU or in several
            processes). With other data "diagonal" makes a fit independent of the units of the parameters.
        record: with a loader: a `woodbury.Recorder`, which writes what `woodbury report` reads.
        progress: show loss, length, samples and the time left on stderr.
        seed: of the samples drawn; by default they follow torch.manual_seed.
        callback: called with the `Fit` so far after every step; a true result stops. Its time does not count.
        epoch_callback: the same after every epoch of a loader, which is the last entry of `Fit.history` then.
        checkpoint: a file that holds the state of the fit, written every 30 seconds and at the end.
        resume: such a file, an earlier `Fit` of the same model or its `state_dict()`: the fit goes on from there.
            Where `checkpoint` is the same path and there is no such file yet, it begins.

    Returns:
        a `Fit`: loss, validation, metrics, best_step, steps, seconds, samples, reason, history, plot().
    """
    model = written_model(model)
    _check_call(loss, data, others)
    criterion = nn.MSELoss() if isinstance(loss, Equations) else as_module(written_model(loss))
    check_model_and_loss(model, criterion)
    dtypes = _types_of_trained(model)
    convert, kind = Conversion.to(model), "Equations"
    if not isinstance(loss, Equations):
        data, validation = sources.as_tensors(data, convert), sources.as_tensors(validation, convert)
        kind = "a loader" if is_batches(data) else "a function that draws samples" if callable(data) else "a pair"
    of_loaders = {"epochs": epochs, "record": record, "memory": memory, "epoch_callback": epoch_callback}
    of_loaders["curvature_samples"] = None if curvature_samples == "auto" else curvature_samples
    _check_use(kind, data=data, forward=forward, validation=validation, samples=samples, **of_loaders)
    _check_decay(weight_decay, kind)
    for name, own in (("callback", callback), ("epoch_callback", epoch_callback)):
        if own is not None and not callable(own):
            raise TypeError(f"fit: {name} must be a function of the fit, got {own!r}")
    if patience is not None:
        if validation is None:
            raise ValueError("fit: patience= is for validation data: pass validation= too, or leave it out")
        check_whole_number("fit: patience", patience, least=1)
    limits = Limits(steps, seconds, tolerance, epochs)
    settings: dict[str, Any] = {"fallback": fallback, "weight_decay": weight_decay, "seed": seed}
    run: Run
    if kind == "a loader":
        limits = limits.or_else(epochs=DEFAULT_EPOCHS)
        settings |= {"curvature_samples": curvature_samples, "memory": memory, "metric": metric}
        run = TrainingRun(
            training_optimizer(model, criterion, is_by_time(limits, model), forward=forward, **settings),
            MiniBatches(data, convert),  # type: ignore[arg-type]
            limits=limits,
            validation=_validation(validation, patience or max(5, math.ceil((epochs or DEFAULT_EPOCHS) / 4))),
            callback=callback,
            epoch_callback=epoch_callback,
            record=record,
        )
    else:
        _check_one_process()
        settings["gram_dtype"] = torch.float64 if dtypes == {torch.float32} else None
        settings |= {"metric": None if metric == "auto" else metric, "search": CurvedSearch(), "damping": PLAIN}
        shared: dict[str, Any] = {"limits": limits.or_else(steps=DEFAULT_STEPS), "callback": callback}
        if kind == "a pair":
            shared |= {"validation": validation, "patience": patience}
            run = _fit_pair(model, criterion, data, {"forward": forward, **settings}, **shared)
        else:
            if samples is not None:
                check_whole_number("fit: samples", samples, least=1)
            terms = loss if isinstance(loss, Equations) else sources.drawing(data, convert)
            source = _source(model, criterion, terms, forward, points, convert)
            judged = _validation(validation, patience or PATIENCE)
            if judged is not None:
                pairs = [convert(as_pair(own, "validation must give pairs")) for own in judged.batches]
                sources.check_finite(pairs)
                judged = replace(judged, batches=[source.as_data(*own) for own in pairs])
            optimizer = GaussNewton(model, criterion, forward=source.forward, **settings)
            run = SolvingRun(optimizer, source, seed=seed, samples=samples, validation=judged, **shared)
    if metrics is not None:
        _check_metrics(metrics, run)
        run.metrics = metrics
    return run.go(Progress(run.limits) if progress else None, checkpoint, resume)


def _fit_pair(
    model: nn.Module,
    loss: nn.Module,
    data: Any,
    settings: dict[str, Any],
    *,
    validation: Any,
    patience: int | None,
    **shared: Any,
) -> Run:
    run: Run
    by_evidence = settings["weight_decay"] == "evidence"
    pair, split = as_pair(data, "data must be a function draw(count), a loader, or a pair"), None
    if isinstance(validation, int | float):
        pair, validation, split = sources.split_off(pair, validation, settings["seed"] or 0)
    elif validation is not None:
        validation = as_pair(validation, "beside a pair validation must be a share of it (0.2), or a pair")
    if validation is not None:
        sources.check_same_columns(pair, validation)
    if validation is not None or by_evidence:
        sources.check_learnable(pair)
    shared["validation"] = _validation(validation, patience or PATIENCE)
    if by_evidence:
        for name, value in (("patience", patience), ("metric", settings["metric"])):
            if value is not None:
                raise ValueError(f"fit: {name}= is not for weight_decay='evidence', where the evidence ends a fit")
        own = {name: settings[name] for name in ("forward", "fallback")}
        run = EvidenceRun(model, loss, pair, **own, **shared)
    else:
        run = PreciseRun(GaussNewton(model, loss, **settings), pair, settings["seed"] or 0, **shared)
    run.fit.split = split
    return run


def _source(
    model: nn.Module, loss: nn.Module, data: Any, forward: Forward | None, points: str, convert: Conversion
) -> TermSource | Drawn:
    """Terms, or one of them, or the samples of another loss than a mean of squares."""
    by_residual = part_named("fit: points", points, {"by residual": True, "as drawn": False})
    if isinstance(data, Equations):
        return TermSource(model, data.converted(convert), by_residual)
    if type(loss) is not nn.MSELoss or loss.reduction != "mean":
        return Drawn(data, forward)
    term = (data, forward or call_model)
    return TermSource(model, Equations(samples=term).terms, by_residual, has_terms=False)


def _validation(data: Any, patience: int) -> Validation | None:
    """Validation data as batches: a loader, or one pair."""
    if data is None:
        return None
    if isinstance(data, int | float):
        raise ValueError(
            f"fit: validation={data} splits a pair (inputs, targets), which is used whole: pass other samples, a "
            "pair or a loader of them"
        )
    return Validation(data if is_batches(data) else [as_pair(data, "validation must be a pair")], patience)


# -- arguments --------------------------------------------------------------------------------------------------

_BATCHES = {
    "epochs": "for the batches of a loader: a pair or a function has none: use steps= or seconds=",
    "epoch_callback": "for the batches of a loader: use callback=",
    **dict.fromkeys(("record", "memory", "curvature_samples"), "for the batches of a loader: leave it out"),
}
# what some kinds of data have no use for
_USELESS = {
    "Equations": {
        "data": "not for Equations, whose terms have their own",
        "forward": "not for Equations, whose terms have their own functions",
        "validation": "not for Equations: a step is judged on points of its own",
        **_BATCHES,
    },
    "a function that draws samples": _BATCHES,
    "a pair": {"samples": "for a function that draws them; the data given is used whole", **_BATCHES},
    "a loader": {"samples": "for a function that draws them; a loader has its own batches"},
}
_COLUMNS = {"step", "epoch", "seconds", "loss", "samples", "validation", "rate", "noise", "log_evidence", *SEARCH}


def _check_use(kind: str, **given: Any) -> None:
    """Raise for an argument that this kind of data has no use for."""
    for name, what_for in _USELESS[kind].items():
        if given[name] is not None:
            raise ValueError(f"fit: {name}= is {what_for}")


def _check_call(loss: Any, data: Any, others: tuple[Any, ...]) -> None:
    """Raise an error that says what to write: for what is missing, or two arguments in place of a pair."""
    write = "write fit(model, loss, (inputs, targets))"
    if others:
        raise TypeError(f"fit: inputs and targets are one argument, a pair: {write}")
    if isinstance(data, Equations):
        raise TypeError("fit: Equations take the place of loss and data: write fit(model, equations)")
    if data is None and not isinstance(loss, Equations):
        raise TypeError(f"fit: the loss or the data is missing, got {type(loss).__name__} alone: {write}")


def _types_of_trained(model: nn.Module) -> set[torch.dtype]:
    """Raise where nothing can be trained, or with too few digits."""
    dtypes = {own.dtype for own in model.parameters() if own.requires_grad}
    if not dtypes:
        raise ValueError("fit: the model has no trainable parameter: none at all, or every requires_grad is False")
    if low := dtypes & {torch.float16, torch.bfloat16}:
        raise ValueError(f"fit: {low.pop()} has too few digits for a step: use model.float(), or model.double()")
    return dtypes


def _check_decay(weight_decay: float | str, kind: str) -> None:
    if isinstance(weight_decay, str) and weight_decay != "evidence":
        raise ValueError(f"fit: weight_decay must be a number or 'evidence', got {weight_decay!r}")
    if weight_decay == "evidence" and kind != "a pair":
        raise ValueError(
            f"fit: weight_decay='evidence' is for a pair (inputs, targets), used whole: with {kind} pass a number"
        )


def _check_metrics(metrics: Mapping[str, Metric], run: Run) -> None:
    """Raise unless they are functions by names of their own, and there is something to measure them on."""
    if not isinstance(metrics, Mapping) or not all(callable(own) for own in metrics.values()):
        raise TypeError("fit: metrics must be functions of (outputs, targets) by name, {'accuracy': f}")
    if taken := sorted(_COLUMNS & set(metrics)):
        raise ValueError(f"fit: a metric cannot be called {taken[0]!r}, as the history has that already")
    if isinstance(run, SolvingRun) or (run.validation is None and run.data is None):
        raise ValueError("fit: metrics= are for a pair, or a loader with validation=; a callback= takes any data")


def _check_one_process() -> None:
    size = all_processes().size
    if size > 1:
        raise ValueError(
            f"fit: a pair, a function that draws samples and Equations are for one process, here are {size}: pass "
            "each a loader of its own samples ([(inputs, targets)] if they are one batch), or start one process"
        )
