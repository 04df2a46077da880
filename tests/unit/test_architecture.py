"""Which rooms may know of which: what the house plan says, held against every import under merger/."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "merger"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# From the bottom to the top; a room imports from those below it only. Rooms of one line do not know of one another,
# but the modules of one folder (`FOLDERS`) do. A new module needs a place here, which is a decision.
LAYERS = (
    ("errors", "dtypes", "sharding", "places", "version", "page", "starting"),
    ("operations",),
    ("tensors", "workers"),
    ("algebra", "checkpoint", "checks", "plan", "casting", "folding", "checksums", "publish", "single_file"),
    ("computing", "flags"),
    ("reading", "sources", "huggingface", "picture"),
    ("writer", "comparing", "adapters", "side_planning"),
    ("planning", "inspect"),
    ("report",),
    ("merge", "verify", "upload"),
    ("plan_comparing",),
    ("replay",),
    ("__init__", "terminal", "arguments"),
    ("cli",),
    ("__main__",),
)
FOLDERS = {"sources", "huggingface", "picture"}
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# Where the slow libraries are used, always from inside a function.
USERS = {
    "torch": {
        *("casting.py", "computing.py", "folding.py", "verify.py"),
        *(f"huggingface/{name}.py" for name in ("expected", "hub_layout", "logits", "recording")),
    },
    "transformers": {"huggingface/expected.py", "huggingface/hub_layout.py"},
}
PURE = ("errors", "dtypes", "operations", "tensors", "algebra", "sharding", "checks", "plan", "checkpoint", "picture")


def imports(tree: ast.AST) -> Iterator[str]:
    """The full names of all modules that a tree imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            # `from merger import terminal` is an import of that module, `from merger.errors import Problem` of errors.
            yield from (
                (f"{node.module}.{alias.name}" for alias in node.names) if node.module == "merger" else [node.module]
            )


def parse(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(encoding="utf-8"))


def room_of(module: str) -> str:
    """The room of "sources/dtensor.py", as of "merger.sources.dtensor", is "sources"."""
    return module.removesuffix(".py").removeprefix("merger.").replace("/", ".").split(".")[0]


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_every_module_has_a_place_in_the_house() -> None:
    assert {room_of(module) for module in MODULES} == set(LEVEL)


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_from_the_rooms_below_it_only(module: str) -> None:
    own = room_of(module)
    ours = [name for name in imports(parse(module)) if name.split(".")[0] == "merger"]
    rooms = {"__init__" if name in ("merger", "merger.__version__") else room_of(name) for name in ours}
    assert {room for room in rooms if LEVEL[room] >= LEVEL[own] and not room == own in FOLDERS} == set()


def test_tensors_know_of_types_operations_and_errors_only() -> None:
    ours = {name for name in imports(parse("tensors.py")) if name.startswith("merger")}
    assert ours <= {"merger.dtypes", "merger.errors", "merger.operations"}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_in_the_package_knows_of_the_harness_or_the_tests(module: str) -> None:
    assert {name.split(".")[0] for name in imports(parse(module))}.isdisjoint(
        {"fixtures", "tests", "pytest", "hypothesis"}
    )


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_another_package_before_it_is_used(module: str) -> None:
    """At the top of a module stand the standard library and our own rooms."""
    tree = parse(module)
    at_top = [
        node
        for node in tree.body
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) and not is_type_checking(node)
    ]
    roots = {name.split(".")[0] for node in at_top for name in imports(node)}
    assert roots - sys.stdlib_module_names == roots & {"merger"}


@pytest.mark.parametrize("library", USERS)
def test_a_slow_library_is_used_where_it_is_meant_to_be(library: str) -> None:
    users = {module for module in MODULES if any(name.split(".")[0] == library for name in imports(parse(module)))}
    assert users == USERS[library]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_can_run_a_pickle(module: str) -> None:
    """L11."""
    tree = parse(module)
    roots = {name.split(".")[0] for name in imports(tree)}
    assert roots.isdisjoint({"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"})
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute))}
    assert names.isdisjoint({"eval", "exec", "__import__", "torch.load", "torch.serialization.load"})


def test_the_pure_modules_start_without_torch_numpy_or_transformers() -> None:
    script = (
        f"import json, sys\nfor name in {PURE!r}: __import__('merger.' + name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert {name for name in json.loads(done.stdout) if not name.startswith("__")} == {"merger"}
