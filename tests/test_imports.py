"""The layers of the code import downward only, and the core needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import woodbury
from woodbury.layers import RowForm

ROOT = Path(woodbury.__file__).parent

# The rooms of the house, lowest first: a module imports from lower rooms only. Inside a room that is a package the
# same holds for its own floors. There are no exceptions.
ROOMS = [
    *("_version", "_style", "_vector", "_random", "_process", "_bytes", "_files", "_batch"),
    *("_choice", "parallel", "device"),
    *("modules", "taylor", "jets", "laplacian", "linalg", "least_squares"),
    *("losses", "layers", "products", "curvature", "model", "row_matrix", "posterior", "quadratic", "policies"),
    *("loop", "optim", "rivals", "optimizers", "fit", "runs", "experiments"),
    *("logs", "pina", "_deepxde", "deepxde", "lightning", "skorch", "sklearn", "cli", "__main__"),
]
FLOORS = {
    "device": [["constants", "fingerprint"], ["recording", "scalars"]],
    "parallel": [["group"]],
    "least_squares": [["trust_region", "residuals"], ["minimize"], ["interface"]],
    "losses": [["factors"], ["rules"], ["elementwise", "softmax"]],
    "loop": [["tape"], ["seen"], ["calls"], ["compare", "watch"]],
    "posterior": [["systems"], ["data"], ["laplace"]],
    "layers": [["forms"], ["positions"], ["shared"], ["outer"], ["sums", "rules"], ["maps"]],
    "model": [
        ["buffers", "expanded", "compiled"],
        ["plan"],
        ["call", "chain"],
        ["graph"],
        ["fallback"],
        ["tangents"],
        ["bare"],
        ["capture"],
        ["independence", "terms"],
    ],
    "fit": [
        ["plot", "columns", "derivable"],
        ["result", "checkpoint"],
        ["limits", "sources"],
        ["equations"],
        ["run"],
        ["growth", "pace"],
        ["evidence"],
        ["precise", "solving", "training"],
        ["door"],
    ],
    "quadratic": [
        ["displacement", "decay", "passes", "joint"],
        ["objective", "quadratic"],
        ["linearize", "memory", "metric"],
        ["sample_space"],
        ["parameter_space", "by_iteration"],
        ["solvers"],
    ],
    "policies": [
        ["damping", "guard", "search"],
        ["plain", "proposal"],
        ["damped_step", "curved"],
    ],
    "optim": [
        ["info", "transaction", "settings", "shards", "faults"],
        ["problems"],
        ["step"],
        ["recorded"],
        ["optimizer"],
        ["smw"],
    ],
    "rivals": [["first_order", "hessian_free", "kfac"]],
    "experiments": [["files", "presets"], ["data"], ["train"]],
    "runs": [
        ["config"],
        ["records"],
        ["recorder", "medians"],
        ["panels", "verdict"],
        ["report"],
    ],
}
CORE_MODULES = [*(f"woodbury.{room}" for room in ROOMS[: ROOMS.index("fit") + 1]), "benchmarks.__main__"]


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def place_of(name):
    """The room of a module, counted from below, and its floor there."""
    room, _, inside = name.partition(".")
    assert room in ROOMS, f"module {name!r} is in no room of the map"
    if not inside:
        return ROOMS.index(room), -1 if room in FLOORS else 0  # what a package gives comes from all its floors
    for floor, names in enumerate(FLOORS[room]):
        if inside in names:
            return ROOMS.index(room), floor
    raise AssertionError(f"module {name!r} is on no floor of {room}")


def imported(path):
    """Names of woodbury's own modules that a file imports, without the leading package name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            assert name.split(".")[0] != "benchmarks", f"{path}: the package imports what lies outside of it"
            if name.split(".")[0] != "woodbury":
                continue
            local = name.removeprefix("woodbury").lstrip(".")
            while local and local not in MODULES:
                local = local.rpartition(".")[0]
            yield local


def test_imports_point_downward():
    for name, path in MODULES.items():
        if path.name == "__init__.py":  # a package lists its public names from anywhere inside it
            continue
        own = place_of(name)
        for target in imported(path):
            assert target, f"{name} imports the package woodbury itself"
            room, floor = place_of(target)
            below = room < own[0] or (room == own[0] and -1 < floor < own[1])
            assert below, f"{name} imports {target}, which is not below it"


def form_names():
    """The names of the forms of rows, and of what they have in common."""
    names, pending = set(), [RowForm]
    while pending:
        kind = pending.pop()
        names.add(kind.__name__)
        pending += kind.__subclasses__()
    return names


def asked_forms(source, forms):
    """The forms that a program asks about: by isinstance or issubclass, by comparing a type, or in a match."""
    tree = ast.parse(source)
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    meaning = {alias.asname or alias.name: alias.name for alias in aliases}
    asked = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("isinstance", "issubclass"):
            asked += node.args[1:]
        elif isinstance(node, ast.Compare):
            asked += [node.left, *node.comparators]
        elif isinstance(node, ast.MatchClass):
            asked.append(node.cls)
    parts = [part for expression in asked for part in ast.walk(expression)]
    names = [getattr(part, "id", getattr(part, "attr", None)) for part in parts]
    return {meaning.get(name, name) for name in names} & forms


def test_nobody_outside_layers_asks_which_form_rows_have():
    for name, path in MODULES.items():
        assert name.split(".")[0] == "layers" or not asked_forms(path.read_text(), form_names()), name


def test_a_question_about_a_form_is_seen():
    questions = ["isinstance(form, (Other, layers.OuterRows))", "type(form) in (Other, OuterRows)"]
    questions += ["from woodbury.layers import OuterRows as Outer\nissubclass(type(form), Other | Outer)"]
    for program in (*questions, "match form:\n    case OuterRows(): pass"):
        assert asked_forms(program, form_names()) == {"OuterRows"}, program


def test_every_place_on_the_map_is_a_module():
    listed = [*ROOMS, *(f"{room}.{name}" for room, floors in FLOORS.items() for floor in floors for name in floor)]
    assert [name for name in listed if name not in MODULES] == []


def test_the_core_needs_torch_alone():
    """With everything but torch (and what torch brings) hidden, the core and the benchmarks still import.

    Where the others are at hand, to import woodbury is to import none of them.
    """
    extras = ["numpy", "scipy", "sklearn", "matplotlib", "typer", "rich", "pandas", "pooch"]
    program = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import woodbury\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        f"assert not new & {set(extras)!r}, new\n"
        "for loaded in [m for m in sys.modules if m.startswith('woodbury')]: del sys.modules[loaded]\n"
        f"for name in {extras!r}:\n"
        "    for loaded in [m for m in sys.modules if m == name or m.startswith(name + '.')]:\n"
        "        del sys.modules[loaded]\n"
        "    sys.modules[name] = None\n"
        f"import importlib\nfor name in {CORE_MODULES!r}: importlib.import_module(name)\n"
        "import woodbury\n"
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = woodbury.GaussNewton(model, torch.nn.MSELoss(), curvature_samples=2)\n"
        "assert optimizer.step(torch.randn(4, 3), torch.randn(4, 2)).accepted\n"
        "optimizer.zero_grad()\noptimizer.load_state_dict(optimizer.state_dict())\n"
        "assert 'torch._dynamo' not in sys.modules  # whose import takes seconds\n"
    )
    command, checkout = [sys.executable, "-W", "ignore", "-c", program], ROOT.parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=checkout)
    assert done.returncode == 0, done.stderr


def test_public_names_are_the_ones_listed():
    for name in woodbury.__all__:
        assert getattr(woodbury, name).__doc__, name
