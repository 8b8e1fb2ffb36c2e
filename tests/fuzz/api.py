"""Drive the public API with random problems and compare every number with the dense reference.

    python -m tests.fuzz.api --count 10000 --seed 0     # the whole run
    python -m tests.fuzz.api --seed 0 --case 17         # one case again, with its story

Outcomes: right; refused, where the documentation says so; and the failures: wrong (a number or a state differs),
missed (something that must be refused was not), false-refusal (something documented as supported was refused),
crashed (an error that the package did not mean to raise), generator (the problem itself could not be made).
"""

import argparse
import contextlib
import itertools
import math
import random as python_random
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import woodbury
from tests.reference import block_mask

from .cases import make_case
from .dense import Dense, solve

FAILURES = ("wrong", "missed", "false-refusal", "crashed", "generator")
PACKAGE = str(Path(woodbury.__file__).parent)
MEANT = (ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError)


class WrongError(Exception):
    """A number or a state is not what it should be."""

    outcome = "wrong"


class GeneratorError(Exception):
    """The problem could not be made or the reference not computed."""

    outcome = "generator"


def require(right, what):
    if not right:
        raise WrongError(what)


@dataclass
class Result:
    number: int
    outcome: str
    detail: str = ""
    features: set = field(default_factory=set)
    text: str = ""  # a traceback, for a single case


def short(error):
    if isinstance(error, WrongError | GeneratorError):
        return str(error)
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


# -- state that a call must leave alone ------------------------------------------------------------------------


def state_of(model, tensors):
    """What `direction` and `verify` must not change, by name."""
    state = {"random": torch.get_rng_state(), "python random": python_random.getstate()}
    name, keys, *rest = np.random.get_state()
    state["numpy random"] = (name, keys.tobytes(), *rest)
    state["F.linear"] = F.linear
    for name, p in model.named_parameters():
        state[f"parameter {name}"] = p.detach().clone()
        state[f"grad {name}"] = None if p.grad is None else p.grad.clone()
        state[f"identity {name}"] = (id(p), p.requires_grad, p.dtype)
    for name, b in model.named_buffers():
        state[f"buffer {name}"] = b.clone()
    for name, module in model.named_modules():
        hooks = tuple(len(v) for k, v in sorted(vars(module).items()) if "hooks" in k and isinstance(v, dict))
        attributes = tuple(k for k in vars(module) if not k.startswith("_flat_weight"))
        state[f"module {name}"] = (type(module), module.training, hooks, attributes)
    for index, tensor in enumerate(tensors):
        state[f"input {index}"] = tensor.detach().clone()
        state[f"input grad {index}"] = tensor.grad if tensor.is_leaf else None
    return state


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, 0, 0, equal_nan=True))
    return type(a) is type(b) and a == b


def check_state(before, after, what, only=None):
    keys = [k for k in before if only is None or k.startswith(only)]
    changed = [k for k in keys if k not in after or not same(before[k], after[k])]
    changed += [k for k in after if k not in before and (only is None or k.startswith(only))]
    require(not changed, f"{what} changed {', '.join(changed[:4])}")


# -- options ---------------------------------------------------------------------------------------------------


@dataclass
class Options:
    method: str
    kind: str  # of curvature
    arguments: dict
    relative: float  # damping over the norm of B
    names: tuple | None = None  # parameters in the groups, None for all
    lr: dict = field(default_factory=dict)  # by parameter name
    decay: dict = field(default_factory=dict)
    momentum: dict = field(default_factory=dict)
    subset: list | None = None
    drawn: int | None = None  # how many samples are drawn
    full: bool = False
    expect: str = "right"  # or refused, either
    why: str = ""


def choose_options(rng, case):
    """Random settings, and with them what must happen."""
    method = rng.choices(["GaussNewton", "NaturalGradient", "HessianFree", "KFAC"], [5, 4, 1.5, 0.7])[0]
    kind = "empirical" if method == "NaturalGradient" else "gauss-newton"
    arguments, features = {}, case.features
    single = case.dtype == torch.float32
    options = Options(method, kind, arguments, 10 ** rng.uniform(-2.5 if single else -7, 2))
    features.add(method)
    trainable = [name for name, p in case.model.named_parameters() if p.requires_grad]
    rows = method in ("GaussNewton", "NaturalGradient")
    if rows:
        arguments["blocks"] = rng.choice(["full", "full", "layer"])
        arguments["solver"] = rng.choices(["cholesky", "cg", "products"], [6, 1, 1])[0]
        if arguments["solver"] != "cholesky":
            options.relative = max(options.relative, 1e-3)
        if rng.random() < 0.15:
            arguments["gram_dtype"] = torch.float64
        if rng.random() < 0.1:
            arguments["max_bytes"] = rng.choice([1, 3000])
        if rng.random() < (0.93 if case.needs_fallback else 0.3):
            arguments["fallback"] = "autograd"
    elif method == "HessianFree":
        options.relative = max(options.relative, 1e-3)
        arguments |= {"progress": 0.0, "max_iterations": 400, "warm_start": rng.choice([0.0, 0.95])}
    if not case.random:
        kind_of_subset = rng.choices(["all", "subset", "drawn", "full"], [5, 2, 1, 1.5])[0]
        if case.n == 1 and kind_of_subset == "drawn":
            kind_of_subset = "all"
        if kind_of_subset in ("subset", "full") and rng.random() < (1.0 if kind_of_subset == "subset" else 0.5):
            options.subset = rng.sample(range(case.n), rng.randint(1, case.n))
            features.add("subset")
        if kind_of_subset == "drawn":
            options.drawn = rng.choice([1, case.n - 1])  # few subsets to compare with
            arguments["curvature_samples"] = rng.choice([options.drawn, options.drawn / case.n])
        options.full = kind_of_subset == "full" and not case.style.startswith("per-sample")
    arguments["lr"] = rng.choice([1.0, 0.5, 0.1, 2.0])
    arguments["accept"] = rng.choices([None, 0.0, 0.25, math.inf, -math.inf], [6, 1, 1, 0.5, 0.5])[0]
    base = {"lr": arguments["lr"], "momentum": 0.0, "weight_decay": 0.0}
    if rng.random() < 0.25:
        base["weight_decay"] = arguments["weight_decay"] = 10 ** rng.uniform(-3, 0)
    if rows and rng.random() < 0.3:
        base["momentum"] = arguments["momentum"] = rng.choice([0.5, 0.9])
    settings = {name: dict(base) for name in trainable}
    if rng.random() < 0.2 and len(trainable) > 1:
        cut = rng.randint(1, len(trainable) - 1)
        left_out = rng.randint(0, 1) if cut + 1 < len(trainable) else 0
        parts = [trainable[:cut], trainable[cut : len(trainable) - left_out]]
        own = {"lr": rng.choice([0.3, 1.5]), "weight_decay": rng.choice([0.0, 0.2])}
        if method == "KFAC":
            own["weight_decay"] = base["weight_decay"]
        parameters = dict(case.model.named_parameters())
        first, second = ([parameters[name] for name in part] for part in parts)
        arguments["params"] = [{"params": first}, {"params": second, **own}]
        for name in parts[1]:
            settings[name] |= own
        if left_out:
            options.names = tuple(parts[0] + parts[1])
            settings = {name: settings[name] for name in options.names}
    options.lr, options.momentum, options.decay = (
        {name: own[setting] for name, own in settings.items()} for setting in ("lr", "momentum", "weight_decay")
    )
    if case.forward is not None:
        arguments["forward"] = case.forward
    features.update(arguments)
    _expect(case, options, rows)
    return options


def _expect(case, options, rows):
    """What the documentation promises for this case with these options."""
    by_rows = rows and options.arguments["solver"] != "products"
    if case.refused:
        options.expect, options.why = "refused", case.refused
    elif case.mixes:
        options.expect, options.why = ("refused" if by_rows else "either"), "mixes samples"
    elif by_rows and case.needs_fallback and "fallback" not in options.arguments:
        options.expect, options.why = "either", "no fallback"  # right where nothing needs it after all
    elif options.method == "KFAC":
        options.expect, options.why = "either", "KFAC takes Linear on one vector per sample"
    elif case.may_refuse:
        options.expect, options.why = "either", case.may_refuse
    elif not case.twice and not by_rows:
        options.expect, options.why = "either", "no second derivatives"


# -- one case --------------------------------------------------------------------------------------------------


class Trial:
    """One case, its options and the calls made on it."""

    def __init__(self, seed, number, caught=()):
        self.caught = caught  # warnings of its calls
        self.case, self.rng = make_case(seed, number)
        self.options = choose_options(self.rng, self.case)
        self.model = self.case.model
        if self.rng.random() < 0.3:  # a gradient that is not the optimizer's to touch
            for p in self.model.parameters():
                if p.requires_grad:
                    p.grad = torch.randn_like(p)
        self.inputs, self.targets = self.case.batch()
        self.guard = torch.no_grad if self.rng.random() < 0.05 else contextlib.nullcontext
        if isinstance(self.inputs, torch.Tensor) and self.inputs.is_floating_point() and self.rng.random() < 0.05:
            self.inputs.requires_grad_()
        leaves = tree_leaves((self.inputs, self.targets))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.random = torch.get_rng_state()
        self.dense = None
        self.parts = [torch.arange(self.case.n)]
        if self.options.full:
            self.parts.append(torch.arange(self.case.n, len(self.case.x)))

    def refer(self):
        """The reference at the parameters as they are."""
        options = self.options
        random = self.random if self.case.random else None
        self.dense = dense = Dense(self.case, self.model, options.names, random)
        torch.set_rng_state(self.random)
        every = list(range(dense.n))
        subset = every if options.subset is None else options.subset
        self.subsets = [subset]
        if options.drawn is not None:
            self.subsets = [list(own) for own in itertools.combinations(every, options.drawn)]
        self.f, self.g = dense.over(self.parts)
        torch.set_rng_state(self.random)
        self.decay, self.lr = dense.spread(options.decay), dense.spread(options.lr)
        mask = block_mask(dense.parameters) if options.arguments.get("blocks") == "layer" else None
        self.eps = 1e-11  # 5e4 times eps, for sums and the model's own rounding
        if self.case.dtype == torch.float32:
            # 256 times eps, and more where autograd in float32 itself is further off
            narrow = Dense(self.case, self.model, options.names, random, dtype=torch.float32)
            loss = float((narrow.J.double() - dense.J).norm() / max(float(dense.J.norm()), 1e-30))
            self.eps = max(3e-5, 30 * loss)
            torch.set_rng_state(self.random)
        self.B = []
        for own in self.subsets:
            B = dense.curvature(options.kind, own, sum(map(len, self.parts)))
            self.B.append(B if mask is None else B * mask)

    @property
    def warned(self):
        """Whether woodbury has warned that it solved another system than the one asked for."""
        return any(w.filename.startswith(PACKAGE) or "damping" in str(w.message) for w in self.caught)

    def tolerance(self, damping):
        """Bound on the relative error of p: rounding times the condition of B + lambda I."""
        norm = max(float(B.norm()) for B in self.B)
        rounding = self.eps
        if self.options.method == "HessianFree" or self.options.arguments.get("solver") in ("cg", "products"):
            rounding = max(rounding, 3e-4 if self.case.dtype == torch.float32 else 1e-9)  # they stop at eps^(3/4)
        # the factor S holds probabilities of eps^(3/2) at least, where a saturated softmax has zeros
        clamped = 2 * torch.finfo(self.case.dtype).eps ** 1.5 * float(self.dense.J.square().sum()) / damping
        return rounding * (1 + norm / damping) + clamped

    def compare(self, p, references, tolerance, what, slack):
        """Raise unless p is one of the references, to this relative error and this slack; returns which."""
        require(torch.isfinite(p).all(), f"{what} is not finite")
        errors = [float((p - r).norm()) for r in references]
        bounds = [tolerance * float(r.norm()) + slack for r in references]
        best = min(range(len(errors)), key=errors.__getitem__)
        error, bound = (own[best] / max(float(references[best].norm()), 1e-300) for own in (errors, bounds))
        require(errors[best] <= bounds[best], f"{what}: relative error {error:.2g}, bound {bound:.2g}")
        return best

    def slack(self, damping, center):
        """Error of p beside the relative one: residuals s - t are rounded to eps, which moves g by eps |J|."""
        eps = torch.finfo(self.case.dtype).eps
        return float(10 * eps * self.dense.J.norm() / damping + self.tolerance(damping) * center.norm())

    def call(self, function, loader=True):
        """One of the calls that take a batch, with the subset and the loader of the options."""
        keywords = {}
        if self.options.subset is not None:
            keywords["subset"] = torch.tensor(self.options.subset)
        if self.options.full and loader:
            keywords["full"] = [(self.case.inputs(index), self.case.target(index)) for index in self.parts]
        return function(self.inputs, self.targets, **keywords)

    def unchanged(self, call, what, draws=False):
        """Make a call that must change nothing (or random numbers alone, if it draws)."""
        before = state_of(self.model, self.tensors)
        try:
            with self.guard():
                return call()
        finally:
            if draws:
                torch.set_rng_state(self.random)
            check_state(before, state_of(self.model, self.tensors), what)

    def run(self):
        """All calls; raises what the package raises, and `WrongError`."""
        rng, options = self.rng, self.options
        if not (options.expect == "refused" and self.case.refused):
            try:
                self.refer()
            except Exception as error:
                raise GeneratorError(short(error)) from error
            norm = max(float(B.norm()) for B in self.B) or 1.0
            if not all(math.isfinite(float(B.norm())) for B in self.B) or self.some_have_no_target():
                options.expect, options.why, norm = "either", "no target in S2", 1.0
        else:
            norm = 1.0
        looks = self.dense is not None and not self.case.random and (self.case.mixes or rng.random() < 0.1)
        if looks and self.reference_mixes() != self.case.mixes:
            if not self.case.mixes:
                raise GeneratorError("samples are mixed")
            options.expect, options.why = "either", "samples could be mixed, and are not"
        damping = options.relative * norm
        self.policy = damping
        if rng.random() < 0.3:
            limits = {"initial": 0.9 * damping, "floor": 0.1 * damping}
            self.policy = woodbury.LevenbergMarquardt(**limits, boost=1.5, drop=0.7)
        options.arguments["damping"] = self.policy
        kind = getattr(woodbury, options.method)
        make = partial(kind, self.model, self.case.loss, **options.arguments)
        self.optimizer = self.unchanged(make, "the constructor", draws=True)
        numeric = self.dense is not None and options.method != "KFAC"
        shift = torch.zeros_like(self.dense.theta) if numeric else None
        self.one_round(damping, shift, numeric)
        if rng.random() < 0.18 and self.dense is not None:
            self.second_round(numeric)

    def some_have_no_target(self):
        """Whether every target of some S2 is ignored: a mean over none, which is refused."""
        ignored = getattr(self.case.loss, "ignore_index", None)
        if ignored is None or self.targets.is_floating_point():
            return False
        return any(bool((self.targets[own] == ignored).all()) for own in self.subsets)

    def reference_mixes(self):
        """Whether the outputs of some sample are others on its own than in the batch."""
        dense = self.dense
        try:
            alone = [dense.forward(torch.tensor([i])).detach() for i in range(dense.n)]
        except (ValueError, RuntimeError, IndexError):  # a model that does not take one sample
            return True
        together = dense.outputs.detach()
        return not torch.allclose(torch.cat(alone), together, 1e-9, 1e-9 * float(together.abs().max()))

    def one_round(self, damping, shift, numeric):
        rng, options, dense = self.rng, self.options, self.dense
        tolerance = self.tolerance(damping) if numeric else math.inf
        comparable = numeric and tolerance < 0.3 and float(dense.J.norm()) > 1e-9  # not rounding error alone
        center = references = p = which = None
        slack = 0.0
        if numeric:
            center = 0 * shift if options.method == "HessianFree" else dense.spread(options.momentum) * shift
        if comparable:
            references = [solve(B, self.g, damping, self.decay, dense.theta, center) for B in self.B]
            slack = self.slack(damping, center)
        if rng.random() >= 0.2 or self.options.expect == "refused":
            vector = self.unchanged(lambda: self.call(self.optimizer.direction), "direction")
            if dense is not None:
                names = sorted(vector), sorted(dense.parameters)
                require(names[0] == names[1], f"direction has the names {names[0]}, not {names[1]}")
                p = dense.flatten(vector)
            if comparable and not self.warned:
                which = self.compare(p, references, tolerance, "direction", slack)
            elif p is not None:
                require(torch.isfinite(p).all(), "direction is not finite")
        if rng.random() < 0.4 and self.case.twice and not options.full:
            self.check_verify(p, which, damping, center, comparable, tolerance)
        if rng.random() < 0.25:
            self.check_rows()
        if rng.random() < 0.75:
            self.check_step(p, which, references, damping, center, comparable, tolerance, slack)

    def check_verify(self, p, which, damping, center, comparable, tolerance):
        residual = float(self.unchanged(lambda: self.call(self.optimizer.verify, loader=False), "verify"))
        if self.options.method == "KFAC" or self.dense is None:
            return require(math.isfinite(residual), "verify of KFAC is not finite")
        if not comparable or self.warned:
            return
        dense = self.dense
        rhs = damping * center - self.g - self.decay * dense.theta
        size = max(float(rhs.norm()), 1e-300)
        # residuals s - t, see slack
        rounded = 100 * torch.finfo(self.case.dtype).eps * float(dense.J.norm()) / size
        bound = 10 * tolerance * max(1.0, damping * float(center.norm()) / size) + rounded
        require(residual <= bound, f"verify gives {residual:.2g}, bound {bound:.2g}")
        if which is None:
            return
        B = self.B[which]
        own = B @ p + (self.decay + damping) * p - rhs
        expected = float(own.norm() / rhs.norm())
        scale = float((B.norm() + damping) * p.norm() / rhs.norm() + 1)
        self.near(residual, expected, self.eps * scale + rounded, "verify")

    def check_rows(self):
        """woodbury.rows of the batch against J^T H J of every sample."""
        options, case = self.options, self.case
        fallback = options.arguments.get("fallback")
        if options.method in ("HessianFree", "KFAC"):
            fallback = "autograd"
        if case.needs_fallback and fallback is None:
            return
        named = options.kind, case.forward, fallback
        make = partial(woodbury.rows, self.model, case.loss, self.inputs, self.targets, *named)
        rows = self.unchanged(make, "rows", draws=case.random)
        if self.dense is None:
            return
        dense = self.dense if options.names is None else Dense(case, self.model, None, self.dense.random)
        torch.set_rng_state(self.random)
        if case.random:
            return
        U = rows.dense().double()
        n = dense.n
        whole = rows.shape == tuple(U.shape) and U.shape[0] % n == 0 and U.shape[1] == len(dense.theta)
        require(whole, f"rows of shape {tuple(U.shape)}, {rows.shape}")
        B = dense.curvature(options.kind, list(range(n)), n)
        scale = float(dense.J.square().sum()) * (1 + float(dense.slope(dense.outputs, dense.targets).norm()) ** 2)

        def near(a, b, what):
            off, size = float((a - b).norm()), float(b.norm())
            require(off <= self.eps * (size + scale * 1e-3), f"rows: {what} off by {off:.2g} of {size:.2g}")

        near(U.T @ U, B, "U^T U")
        near(rows.gram().double(), U @ U.T, "gram")
        v = torch.randn(U.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        own = {name: value.to(case.dtype) for name, value in dense.unflatten(v).items()}
        near(rows.matvec(own).double(), U @ v, "matvec")
        c = torch.randn(U.shape[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        near(dense.flatten(rows.rmatvec(c.to(case.dtype))), U.T @ c, "rmatvec")
        if options.kind == "empirical":
            slope = dense.slope(dense.outputs, dense.targets).reshape(n, -1)
            times = 1 if getattr(dense.loss, "reduction", "mean") == "sum" else n**0.5
            G = times * torch.einsum("nc,ncp->np", slope, dense.J)
            near(U, G, "the rows of each sample")

    def check_step(self, p, which, references, damping, center, comparable, tolerance, slack_p):
        case, dense = self.case, self.dense
        before = state_of(self.model, self.tensors)
        try:
            with self.guard():
                info = self.call(self.optimizer.step)
        except BaseException:
            check_state(before, state_of(self.model, self.tensors), "a step that raised", ("parameter", "buffer"))
            raise
        after = state_of(self.model, self.tensors)
        kept = ("grad", "identity", "module", "input", "F.linear", "python", "numpy")
        check_state(before, after, "a step", kept if case.random else (*kept, "random"))
        numbers = info.as_dict()
        require(self.optimizer.last is info, "last is not the StepInfo of the step")
        if not numbers["accepted"]:
            check_state(before, after, "a rejected step", ("parameter", "buffer"))
        elif case.running and dense is not None and len(self.parts) == 1 and self.subsets == [[*range(dense.n)]]:
            for name, expected in dense.buffers.items():
                right = torch.allclose(after[f"buffer {name}"].double(), expected.double(), 1e-4, 1e-6)
                require(right, f"buffer {name} is not as after one pass")
        if dense is None or self.warned:
            return
        trained = set(dense.parameters)
        for name, _ in self.model.named_parameters():
            kept = same(before[f"parameter {name}"], after[f"parameter {name}"])
            require(name in trained or kept, f"a step changed {name}, which it is not to train")
        theta = dense.flatten({name: after[f"parameter {name}"] for name in dense.parameters})
        moved = (theta - dense.theta) / self.lr
        finite = math.isfinite(numbers["loss"]) and torch.isfinite(theta).all()
        require(finite, f"not finite after a step: {numbers}")
        eps = self.eps
        self.near(numbers["loss"], self.f, eps * (1 + abs(self.f)), "loss")
        if not comparable:
            apart = 0.0 if p is None else float((moved - p).norm())
            near = apart <= 1e-3 * float(moved.norm() + dense.theta.norm())
            require(near or not numbers["accepted"], "the step does not move by lr times direction")
            self.last_p = moved if numbers["accepted"] else None
            return
        self.near(numbers["damping"], damping, 1e-6 * damping, "damping")
        slack = 10 * torch.finfo(case.dtype).eps * float(dense.theta.norm() / self.lr.min()) + slack_p
        if numbers["accepted"]:
            if p is None:
                which = self.compare(moved, references, tolerance, "the step", slack)
            else:
                apart, bound = float((moved - p).norm()), (10 * eps + tolerance) * float(p.norm()) + 10 * slack
                require(apart <= bound, f"the step moves {apart:.2g} from direction, bound {bound:.2g}")
        elif p is None:
            return
        q = moved if p is None else p
        B = self.B[which]
        weight = self.g + self.decay * dense.theta
        predicted = float(-weight @ q - 0.5 * q @ (B @ q + self.decay * q))
        size = abs(float(weight @ q)) + float(q @ (B @ q + self.decay * q)) + float(weight.norm() * q.norm())
        size += damping * float(q @ q)  # with momentum m(0) - m(p) is a difference of such terms
        of_norm = (tolerance + eps) * float(q.norm()) + 10 * slack
        self.near(numbers["step_norm"], float(q.norm()), of_norm, "step_norm")
        of_predicted = (tolerance + eps) * size + 10 * slack * float(weight.norm())
        self.near(numbers["predicted"], predicted, of_predicted, "predicted")
        self.check_ratio(numbers, q, predicted, size, tolerance, eps, slack)
        self.last_p = q if numbers["accepted"] else None

    def check_ratio(self, numbers, q, predicted, size, tolerance, eps, slack):
        dense, case = self.dense, self.case
        if "mixes" in case.features:  # and it does not show at theta, but it may at theta + p
            return
        after, slope = dense.over(self.parts, dense.theta + q)
        torch.set_rng_state(self.random)
        if not math.isfinite(after) or abs(after) > 1e15:
            return
        decrease = self.f - after - float((self.decay * q * (dense.theta + 0.5 * q)).sum())
        rounding = torch.finfo(case.dtype).eps
        noise = rounding * abs(self.f) + rounding**2
        if predicted + noise <= 0:
            return
        expected = (decrease + noise) / (predicted + noise)
        slopes = float(slope.norm() + self.g.norm())
        error = eps * (abs(self.f) + abs(after) + size)
        error += ((eps + tolerance) * float(q.norm()) + 10 * slack) * slopes
        bound = (error + abs(expected) * (tolerance + eps) * size) / (predicted + noise)
        if not math.isfinite(slope.norm()) or not bound < 0.5 * (1 + abs(expected)):
            return
        self.near(numbers["ratio"], expected, bound, "ratio")
        accept = self.options.arguments["accept"]
        if accept is not None and abs(expected - accept) > bound:
            right = numbers["accepted"] == (expected >= accept)
            require(right, f"accepted is {numbers['accepted']} at ratio {expected:.3g}, accept {accept}")

    @staticmethod
    def near(a, b, bound, what):
        require(abs(a - b) <= bound, f"{what} is {a:.10g}, the reference {b:.10g}, bound {bound:.2g}")

    def second_round(self, numeric):
        """Another step where the first one left off: momentum and damping carry over."""
        last = getattr(self, "last_p", None)
        taken = self.optimizer.last is not None
        self.random = torch.get_rng_state()
        value = self.optimizer.state_dict()["state"]["damping"]
        floor = self.policy.floor if isinstance(self.policy, woodbury.LevenbergMarquardt) else 0.0
        damping = float(value) + floor
        if taken and isinstance(self.policy, woodbury.LevenbergMarquardt):
            before = self.optimizer.last
            rho, old = float(before.ratio), float(before.damping) - floor
            factor = 1.5 if not rho >= 0.25 else 0.7 if rho > 0.75 else 1.0
            self.near(float(value), old * factor, 1e-6 * old, "the next damping")
        self.change_something()
        self.refer()
        accepted = taken and bool(self.optimizer.last.accepted)
        shift = torch.zeros_like(self.dense.theta)
        if accepted:
            if last is None:
                return
            shift = last
        if len(shift) != len(self.dense.theta):  # a parameter was frozen meanwhile
            shift = self.dense.flatten(dict(zip(self.before_names, shift.split(self.before_sizes), strict=True)))
        self.one_round(damping, shift, numeric)

    def change_something(self):
        """What a user may do to a model between two steps."""
        rng, dense, parameters = self.rng, self.dense, dict(self.model.named_parameters())
        self.before_names = list(dense.parameters)
        self.before_sizes = [p.numel() for p in dense.parameters.values()]
        kind = rng.choices(["nothing", "freeze", "scale"], [4, 1, 1])[0]
        name = rng.choice(self.before_names)
        if kind == "freeze" and len(self.before_names) > 1 and self.options.method != "KFAC":
            self.case.features.add("frozen-later")
            parameters[name].requires_grad_(False)
            self.options.names = tuple(own for own in self.before_names if own != name)
        elif kind == "scale":
            with torch.no_grad():
                parameters[name].mul_(0.8)

    def judge(self, error):
        """The outcome of a case that raised this."""
        if isinstance(error, WrongError | GeneratorError):
            return error.outcome
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_raised_here = last.filename.startswith(PACKAGE) and (last.line or "").startswith("raise")
        if not (isinstance(error, MEANT) and is_raised_here):
            documented = not self.case.twice and "not implemented" in str(error)
            return "refused" if documented else "crashed"
        return "false-refusal" if self.options.expect == "right" else "refused"


def run_case(seed, number):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trial = Trial(seed, number, caught)
        except Exception as error:
            return Result(number, "generator", short(error), text=traceback.format_exc())
        try:
            trial.run()
        except Exception as error:
            outcome, features = trial.judge(error), trial.case.features
            return Result(number, outcome, short(error), features, traceback.format_exc())
        if trial.options.expect == "refused":
            return Result(number, "missed", trial.options.why, trial.case.features)
        return Result(number, "right", features=trial.case.features)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case alone and tell about it")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.case is not None:
        trial = Trial(given.seed, given.case)
        print(trial.case, trial.options, sep="\n")
    start = time.perf_counter()
    numbers = range(given.count) if given.case is None else [given.case]
    results = [run_case(given.seed, number) for number in numbers]
    failures = [r for r in results if r.outcome in FAILURES]
    for r in failures:
        print(f"{r.number}: {r.outcome}: {r.detail}: {sorted(r.features)}\n{r.text if given.case else ''}")
    print(", ".join(f"{count} {outcome}" for outcome, count in Counter(r.outcome for r in results).items()))
    print(f"{len(results)} cases, seed {given.seed}, {time.perf_counter() - start:.0f} s")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
