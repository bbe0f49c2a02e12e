"""The house itself: who may import whom, how long a file is, what a public name must say of itself."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import funcpar as fp

ROOT = Path(__file__).parent.parent

# Every module of funcpar, lowest first: each imports only from modules before it.
LAYERS = [
    name
    for layer in (
        "_errors _limits _devices _streams _background _nodes _prefix tree _pages _intraop _watch",
        "_graph _equality _closure _reduce",
        "_staging _copies _transfer _donation",
        "_jvp _world _ops _generators _random _pace _workers _prefetch",
        "_packing _whereabouts _link _alike distributed _told",
        "_buckets _columns _across _route _span _outgoing _overlap _ahead",
        "_references _rebind _shell _isolation _functional",
        "_maps _request _group _standstill _dynamo _allreduce _meeting _exchange",
        "_differentiate _asked _grad _within",
        "_operand _collectives _gathers _permutations _batchnorm",
        "_depends _frame _pieces _joint _call",
        "_graphs _steps _bundle _binding _split _compile _axes _outputs _merge",
        "_fused _reducing _mapped _pmap _check",
        "_trial _gain __main__",
    )
    for name in layer.split()
]

MOST_LINES_OF_A_FILE = 300
MOST_LINES_OF_A_TEST_FILE = 360
MOST_LINES_OF_A_FUNCTION = 46

FUNCPAR = sorted((ROOT / "funcpar").rglob("*.py"))
COMPAT = sorted((ROOT / "compat").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
FILES = [*FUNCPAR, *COMPAT, *EXAMPLES, *sorted((ROOT / "tests").rglob("*.py"))]

public = [(name, value) for name, value in vars(fp).items() if name[0] != "_" and not inspect.ismodule(value)]
each_public = pytest.mark.parametrize(("name", "value"), public, ids=[name for name, _ in public])


def _ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=_ids(paths))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imported(path: Path) -> set[str]:
    """Return what a file imports, absolutely: modules, and modules joined with the names taken from them."""
    found: set[str] = set()
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def _neighbours(path: Path) -> set[str]:
    """Return the modules of funcpar that a file imports."""
    names = {path.stem for path in FUNCPAR}
    return {
        part for name in _imported(path) if name.startswith("funcpar.") for part in name.split(".")[1:2]
    } & names


def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node for node in ast.walk(_tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_every_module_has_its_place_in_the_layers():
    assert sorted(LAYERS) == sorted(path.stem for path in FUNCPAR if path.stem != "__init__")


def test_the_design_shows_every_module_in_its_layer():
    text = (ROOT / "docs" / "design.md").read_text()
    (table,) = re.findall(r"^    __init__ .*?\n\n", text, re.MULTILINE | re.DOTALL)
    modules = {path.stem for path in FUNCPAR}
    shown = [word for line in table.splitlines() for word in line[:42].split()]
    assert sorted(shown) == sorted(modules)


@each([path for path in FUNCPAR if path.stem != "__init__"])
def test_a_module_imports_only_from_lower_layers(path):
    lower = LAYERS[: LAYERS.index(path.stem)]
    assert _neighbours(path) - set(lower) == set()


@each(COMPAT or [ROOT / "compat" / "__init__.py"])
def test_compat_stands_on_public_names_alone(path):
    for name in _imported(path):
        parts = name.split(".")
        if parts[0] == "funcpar" and len(parts) > 1:
            assert not parts[1].startswith("_") and hasattr(fp, parts[1]), name
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            assert not (node.value.id in ("fp", "funcpar") and private), ast.unparse(node)


@each([*FUNCPAR, *COMPAT, *EXAMPLES])
def test_nothing_is_imported_inside_a_function(path):
    inner = [
        f"{path.name}:{node.lineno}"
        for function in _functions(path)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert inner == []


@each(FILES)
def test_a_file_is_short(path):
    lines = path.read_text().count("\n")
    assert lines <= (MOST_LINES_OF_A_TEST_FILE if path.parent.name == "tests" else MOST_LINES_OF_A_FILE)


@each([*FUNCPAR, *COMPAT, *EXAMPLES])
def test_a_function_is_short(path):
    long = {}
    for function in _functions(path):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = function.end_lineno - body[0].lineno + 1 if body else 0
        if lines > MOST_LINES_OF_A_FUNCTION:
            long[function.name] = lines
    assert long == {}


def test_the_facade_names_everything_explicitly():
    imports = [node for node in _tree(ROOT / "funcpar" / "__init__.py").body if not _is_docstring(node)]
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    aliases = [alias for node in imports for alias in node.names]
    assert all(alias.name == alias.asname for alias in aliases)
    assert {alias.name for alias in aliases} >= {name for name, _ in public}


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@each_public
def test_a_public_name_says_what_it_is_in_one_line(name, value):
    first, _, rest = inspect.getdoc(value).partition("\n")
    assert first[0].isupper() and first.endswith((".", ":")), first
    assert not rest or rest.startswith("\n"), "a blank line follows the first"
    if inspect.isfunction(value):
        assert not re.match(r"\w+s ", first), f"not imperative: {first}"


@each_public
def test_a_public_name_shows_an_example(name, value):
    assert re.search(r"Example:\n\s+>>> ", inspect.getdoc(value))


@each_public
def test_a_public_function_says_what_it_takes_returns_and_raises(name, value):
    if not inspect.isfunction(value):
        return
    doc, signature = inspect.getdoc(value), inspect.signature(value)
    assert ("Args:" in doc) == bool(signature.parameters)
    assert "Raises:" in doc
    if signature.return_annotation not in (None, "None"):
        assert "Returns:" in doc
    for parameter in signature.parameters:
        assert re.search(rf"^    \*{{0,2}}{parameter}: ", doc, re.MULTILINE), f"{parameter} is not described"


def test_both_packages_are_marked_as_typed():
    assert (ROOT / "funcpar" / "py.typed").exists()
    assert (ROOT / "compat" / "py.typed").exists()


def test_the_changelog_knows_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(
        rf"^## {re.escape(version)}\b", (ROOT / "docs" / "changelog.md").read_text(), re.MULTILINE
    )
