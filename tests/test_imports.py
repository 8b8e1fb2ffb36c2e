"""The layers of the code import downward only, and the core needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import woodbury

ROOT = Path(woodbury.__file__).parent

# Lowest first. A module may import from lower layers, and from siblings only where `SIBLINGS` says so.
LAYERS = [
    ["_vector", "_kept", "_numbers", "_scalar", "_batch", "_random", "_memory", "_cuda", "_small_system"],
    ["layers", "factors", "losses", "linalg"],
    ["plan", "chain", "chain_step", "functional", "capture", "rows", "displacement", "products", "damping"],
    ["optim", "policies"],
    [
        "bench",
        "experiments.storage",
        "experiments.config",
        "experiments.folders",
        "experiments.presets",
        "experiments.data",
        "experiments.files",
        "experiments.models",
        "experiments.looks",
        "experiments.errors",
        "experiments.machine",
    ],
    ["experiments.runs", "experiments.groups", "experiments.medians"],
    ["experiments.figure", "experiments.page"],
    ["experiments.train", "experiments.report"],
    ["cli"],
]
SIBLINGS = {
    ("_numbers", "_kept"),
    ("_scalar", "_kept"),
    ("_scalar", "_numbers"),
    ("_small_system", "_cuda"),
    ("losses", "factors"),  # S in the form its structure allows
    ("chain", "plan"),
    ("chain_step", "chain"),
    ("capture", "plan"),  # what to capture
    ("capture", "chain"),  # the way back along a chain
    ("capture", "functional"),  # rows past the rules
    ("rows", "plan"),
    ("rows", "capture"),  # U is made of what was captured
    ("displacement", "plan"),
    ("displacement", "capture"),
    ("displacement", "chain"),
    ("displacement", "rows"),
    ("optim.step", "optim.settings"),
    ("optim.step", "optim.passes"),
    ("optim.structure", "optim.settings"),
    ("optim.linearize", "optim.passes"),
    ("optim.linearize", "optim.step"),
    ("optim.base", "optim.passes"),
    ("optim.base", "optim.structure"),
    ("optim.smw", "optim.linearize"),
    ("optim.smw", "optim.passes"),
    ("optim.hessian_free", "optim.passes"),
    ("optim.base", "optim.settings"),
    ("optim.base", "optim.captured"),
    ("optim.smw", "optim.captured"),
    ("optim.base", "optim.step"),
    ("optim.smw", "optim.base"),
    ("optim.smw", "optim.settings"),
    ("optim.smw", "optim.step"),
    ("optim.hessian_free", "optim.step"),
    ("optim.hessian_free", "optim.base"),
    ("optim.kfac", "optim.step"),
    ("optim.kfac", "optim.base"),
    ("optim.first_order", "optim.step"),
    ("bench.timing", "experiments.models"),  # the networks of the experiments
    ("bench.step", "bench.timing"),
    ("bench.scale", "bench.timing"),
    ("bench.peer_steps", "bench.timing"),
    ("bench.peers", "bench.peer_steps"),
    ("bench.peers", "bench.timing"),
    ("bench.peers", "experiments.models"),
    ("bench.draw", "bench.peer_steps"),  # what peers compute
    ("bench.draw", "bench.scale"),  # what counts as beyond SGD's step
    ("bench.draw", "experiments.looks"),
    ("bench.scale", "experiments.models"),
    ("bench.peers", "experiments.errors"),
    ("bench.peers", "experiments.machine"),
    ("bench.__main__", "bench.tables"),
    ("bench.__main__", "experiments.errors"),
    ("bench.__main__", "experiments.storage"),
    ("bench.__main__", "bench"),
    ("bench.__main__", "bench.draw"),
    ("bench.__main__", "bench.peer_steps"),
    ("bench.__main__", "bench.peers"),
    ("bench.__main__", "bench.step"),
    ("bench.__main__", "bench.scale"),
    ("bench.__main__", "bench.gpu"),
    ("bench.gpu", "bench.timing"),
    ("experiments.config", "experiments.storage"),  # files are written whole
    ("experiments.config", "experiments.errors"),
    ("experiments.config", "experiments.machine"),
    ("experiments.files", "experiments.storage"),
    ("experiments.files", "experiments.errors"),
    ("experiments.data", "experiments.errors"),
    ("experiments.folders", "experiments.errors"),
    ("experiments.presets", "experiments.config"),
    ("experiments.folders", "experiments.config"),
    ("experiments.groups", "experiments.runs"),
    ("experiments.medians", "experiments.runs"),
    ("experiments.medians", "experiments.groups"),  # over the seeds of a group
    ("layers.shared", "layers.forms"),
    ("layers.embeddings", "layers.forms"),
    ("layers.embeddings", "layers.shared"),
    ("layers.sums", "layers.forms"),
    ("layers.sums", "layers.shared"),
    ("layers.sums", "layers.embeddings"),
    ("layers.attention", "layers.registry"),
    ("layers.attention", "layers.sums"),
    ("layers.rules", "layers.embeddings"),
    ("layers.rules", "layers.forms"),
    ("layers.rules", "layers.registry"),
    ("layers.rules", "layers.shared"),
    ("layers.convolutions", "layers.registry"),
    ("layers.convolutions", "layers.rules"),  # the names of torch's parameters
    ("layers.convolutions", "layers.shared"),
    ("layers.norms", "layers.registry"),
    ("layers.norms", "layers.rules"),
    ("layers.norms", "layers.shared"),
    ("layers.registry", "layers.forms"),
    ("experiments.data", "experiments.files"),
}
CORE_MODULES = [name for layer in LAYERS[:4] for name in layer] + ["bench.__main__"]


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path, path.name == "__init__.py"


def layer_of(name):
    for level, names in enumerate(LAYERS):
        if any(name == known or name.startswith(known + ".") for known in names):
            return level
    raise AssertionError(f"module {name!r} is on no layer of the map")


def imported(path):
    """Names of woodbury's own modules that a file imports, without the leading package name."""
    known = {name for name, _, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] != "woodbury":
                continue
            local = name.removeprefix("woodbury").lstrip(".")
            while local and local not in known:
                local = local.rpartition(".")[0]
            yield local


@pytest.mark.parametrize("name, path, is_package", list(modules()), ids=lambda value: str(value)[-30:])
def test_imports_point_downward(name, path, is_package):
    if is_package:  # a package lists its public names from anywhere inside it
        return
    for target in imported(path):
        assert target, f"{name} imports the package woodbury itself"
        if (name, target) in SIBLINGS:
            continue
        assert layer_of(target) < layer_of(name), f"{name} imports {target}, which is not below it"


def test_the_core_needs_torch_alone():
    """With everything but torch (and what torch brings) hidden, the core and the benchmark still import."""
    extras = ["numpy", "scipy", "sklearn", "matplotlib", "typer", "rich", "pandas"]
    program = (
        "import sys, torch\n"
        f"for name in {extras!r}:\n"
        "    for loaded in [m for m in sys.modules if m == name or m.startswith(name + '.')]:\n"
        "        del sys.modules[loaded]\n"
        "    sys.modules[name] = None\n"
        f"import importlib\nfor name in {CORE_MODULES!r}: importlib.import_module('woodbury.' + name)\n"
        "import woodbury\n"
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = woodbury.GaussNewton(model, torch.nn.MSELoss(), curvature_samples=2)\n"
        "assert optimizer.step(torch.randn(4, 3), torch.randn(4, 2)).accepted\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_are_the_ones_listed():
    for name in woodbury.__all__:
        assert getattr(woodbury, name).__doc__, name
