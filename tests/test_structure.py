"""The house: which part may import which, and who may know triton, ranks, Lightning and versions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_taco

ROOT = Path(lightning_taco.__file__).parent
PACKAGE = "lightning_taco"
FILES = sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)

# A part may import those of a smaller floor, and itself.
FLOORS = {
    "config": 0,
    "_compat": 0,
    "codec": 1,
    "metrics": 1,
    "activations": 2,
    "collectives": 2,
    "dtensor": 3,
    "data_parallel": 3,
    "pipeline_parallel": 3,
    "strategies": 4,
    "fabric": 4,
    "callbacks": 5,
    "bench": 6,
    "report": 6,
    "study": 6,
    "cli": 7,
    "": 8,  # lightning_taco/__init__.py
}
MAY_NOT_KNOW = {
    "config": ("torch.distributed", "torch", "lightning", "triton"),
    "_compat": ("lightning",),
    "codec": ("torch.distributed", "lightning"),
    "activations": ("torch.distributed", "lightning"),
    "metrics": ("torch.distributed", "lightning"),
    "collectives": ("torch.distributed.tensor", "torch.distributed.device_mesh", "torch.nn.Module", "lightning"),
    "dtensor": ("lightning",),
    "data_parallel": ("lightning",),
    "pipeline_parallel": ("lightning",),
}
# Writes versions down for the reader, and decides nothing by them.
REPORTS_VERSIONS = {"lightning_taco.callbacks.versions"}


def part_of(path: Path) -> str:
    """The part of the house that `path` lies in: a folder, a module, or ``""`` for the package itself."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def module_of(path: Path) -> str:
    parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """Dotted names that `path` imports; ``from a import b`` gives ``a.b``. Without those under ``TYPE_CHECKING``."""
    yield from _imports(ast.parse(path.read_text()), path, at_import_only)


def _imports(node: ast.AST, path: Path, at_import_only: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if at_import_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{path.name} line {child.lineno}: a relative import; write the whole name"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from _imports(child, path, at_import_only)


def knows(name: str, what: str) -> bool:
    """Whether the imported `name` is `what` or something in it."""
    return name == what or name.startswith(f"{what}.")


def test_the_parts_exist() -> None:
    parts = {part_of(path) for path in FILES}
    assert {"config", "_compat", "codec", "collectives", "dtensor"} <= parts
    assert parts <= set(FLOORS), "a new part of the house: give it a floor here and in the README"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_import_upwards(path: Path) -> None:
    part = part_of(path)
    for name in imports_of(path):
        if knows(name, PACKAGE) and name.count("."):
            other = name.split(".")[1]
            other = other if other in FLOORS else ""
            allowed = other == part or FLOORS[other] < FLOORS[part]
            siblings = {part, other} == {"config", "_compat"} or {part, other} == {"strategies", "fabric"}
            assert allowed or siblings, f"{module_of(path)} imports {name}"


def test_no_cycle_between_modules() -> None:
    modules = {module_of(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for name in imports_of(path, at_import_only=True):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            # A package and the modules in it are one: `import a.b` runs `a` first, always.
            if name and name != module and not knows(module, name) and not knows(name, module):
                graph[module].add(name)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_kernel_files_import_triton(path: Path) -> None:
    if "kernels" not in path.name:
        assert not [name for name in imports_of(path) if knows(name, "triton")]


def test_no_kernel_file_is_imported_with_the_package() -> None:
    for path in FILES:
        if "kernels" not in path.name:
            eager = [name for name in imports_of(path, at_import_only=True) if "kernels" in name.split(".")[-1]]
            assert not eager, f"{module_of(path)} imports {eager[0]}, and so triton, when it is itself imported"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_parts_do_not_know_what_is_none_of_their_business(path: Path) -> None:
    for name in imports_of(path):
        for forbidden in MAY_NOT_KNOW.get(part_of(path), ()):
            assert not knows(name, forbidden), f"{module_of(path)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_versions_are_read_in_compat_only(path: Path) -> None:
    if part_of(path) == "_compat" or module_of(path) in REPORTS_VERSIONS:
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "__version__":
            owner = ast.unparse(node.value)
            assert owner == PACKAGE, f"{module_of(path)} line {node.lineno} reads {owner}.__version__"
        assert not (isinstance(node, ast.Name) and node.id == "TorchVersion")
    for name in imports_of(path):
        assert not re.fullmatch(r"(importlib\.metadata|packaging)\b.*", name), f"{module_of(path)} imports {name}"
        assert not knows(name, "torch.version"), f"{module_of(path)} imports {name}"


def test_no_unified_and_no_split_lightning_side_by_side() -> None:
    for path in FILES:
        for name in imports_of(path):
            assert name.split(".")[0] not in ("pytorch_lightning", "lightning_fabric"), f"{module_of(path)}: {name}"


def test_no_drawer_of_odds_and_ends() -> None:
    names = {path.stem for path in FILES}
    assert not names & {"utils", "util", "helpers", "common", "misc"}


def test_the_parser_sees_what_it_should(tmp_path: Path) -> None:
    """These tests can fail: imports are found in every place, and those of types are left out."""
    path = tmp_path / "sample.py"
    path.write_text(
        "import triton.language as tl\n"
        "from torch import distributed\n"
        "if TYPE_CHECKING:\n    import lightning\n"
        "try:\n    import a.b\nexcept ImportError:\n    pass\n"
        "def f():\n    from lightning_taco import cli\n"
    )
    assert list(imports_of(path)) == ["triton.language", "torch.distributed", "a.b", "lightning_taco.cli"]
    assert list(imports_of(path, at_import_only=True)) == ["triton.language", "torch.distributed", "a.b"]
    assert knows("torch.distributed.tensor", "torch.distributed")
    assert not knows("torch.distributed_extra", "torch.distributed")
