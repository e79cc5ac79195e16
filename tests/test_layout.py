"""The layout: which way imports point, where private torch names may be, and what a wheel of the project holds."""

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"fxshard": "fxshard", "passes": "fxshard.passes", "runtime": "fxshard.runtime", "viz": "fxshard.viz"}
TOP = ["api", "calls", "module", "state"]
"""From a user's call down to what was made for one module; each may import those behind it."""
PRIVATE_NAMES_LIVE_IN = "fxshard.capture.torch_private"


def modules() -> dict[str, Path]:
    """Every module of the package by its installed name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(p for p in parts if p != "__init__")])] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of the module `name`, those inside functions too; relative ones made absolute."""
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                yield node.lineno, whole if whole in MODULES else module


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def reached(package: str) -> dict[str, str]:
    """Every module that importing `package` brings in, directly or by way of others, and who asked for it."""
    todo = [m for m in MODULES if within(m, package)]
    found = dict.fromkeys(todo, package)
    while todo:
        name = todo.pop()
        for line, module in imports(name, TREES[name]):
            if module in MODULES and module not in found:
                found[module] = f"{MODULES[name].relative_to(ROOT)}:{line}"
                todo.append(module)
    return found


@pytest.mark.parametrize("above", ["passes", "runtime", "viz", *TOP, "capture", "plan"])
def test_the_ir_stands_below_everything(above):
    wrong = {m: by for m, by in reached("fxshard.ir").items() if within(m, f"fxshard.{above}") or m == "fxshard"}
    assert not wrong, f"fxshard.ir reaches {wrong}"


@pytest.mark.parametrize("package", ["passes", "runtime", "viz"])
def test_passes_runtime_and_viz_do_not_import_each_other(package):
    others = [f"fxshard.{other}" for other in ("passes", "runtime", "viz") if other != package]
    assert any(within(m, f"fxshard.{package}") for m in MODULES)
    wrong = [
        f"{MODULES[name].relative_to(ROOT)}:{line} imports {module}"
        for name, tree in TREES.items()
        if within(name, f"fxshard.{package}")
        for line, module in imports(name, tree)
        if any(within(module, other) for other in others) or module in ("fxshard", *(f"fxshard.{top}" for top in TOP))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("above", "below"), list(pairwise(TOP)))
def test_api_calls_module_and_state_import_in_this_order(above, below):
    assert f"fxshard.{below}" in reached(f"fxshard.{above}")
    assert f"fxshard.{above}" not in reached(f"fxshard.{below}")


def test_only_installed_names_are_imported():
    """`import passes` works in a checkout and nowhere else."""
    wrong = [
        f"{MODULES[name].relative_to(ROOT)}:{line} imports {module}"
        for name, tree in TREES.items()
        for line, module in imports(name, tree)
        if module.split(".")[0] in ("passes", "runtime", "viz")
    ]
    assert not wrong, "\n".join(wrong)


# -- private names of torch


def private_torch_names(name: str, tree: ast.Module) -> list[tuple[int, str]]:
    """(line, dotted name) of every name below torch with a part that begins with one underscore, where it comes in.

    Operators (`torch.ops.aten._to_copy`) are not meant: their names are data, the same in every graph.
    """
    bound = {"torch": "torch"}  # what names of this module stand for
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if within(alias.name, "torch"):
                    found.append((node.lineno, alias.name))
                    if alias.asname:
                        bound[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and within(node.module, "torch") and not node.level:
            for alias in node.names:
                found.append((node.lineno, f"{node.module}.{alias.name}"))
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts, value = [], node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if parts and isinstance(value, ast.Name) and value.id in bound and not is_private(bound[value.id]):
            found.append((node.lineno, ".".join([bound[value.id], *reversed(parts)])))
    private = sorted({(line, dotted) for line, dotted in found if is_private(dotted)})
    return [(a, b) for a, b in private if not any(b.startswith(d + ".") and a == c for c, d in private)]


def is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    return parts[:2] != ["torch", "ops"] and any(p.startswith("_") and not p.startswith("__") for p in parts)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch.utils._pytree as pytree", ["torch.utils._pytree"]),
        ("from torch._C import _x", ["torch._C._x"]),
        ("from torch import _guards", ["torch._guards"]),
        ("from torch import fx\nfx._pytree.x", ["torch.fx._pytree"]),
        ("import torch\ndef f():\n    return torch._subclasses.FakeTensor(0)", ["torch._subclasses"]),
        ("import torch.distributed as dist\ndist.distributed_c10d._x()", ["torch.distributed.distributed_c10d._x"]),
        ("import torch\ntorch.ops.aten._to_copy.default\ntorch.__version__\ntorch.nn.Linear", []),
        ("from ._torch import x\nself._torch", []),
    ],
)
def test_private_names_are_recognised(source, expected):
    assert [dotted for _, dotted in private_torch_names("x", ast.parse(source))] == expected


def test_private_torch_names_live_in_one_file():
    assert private_torch_names(PRIVATE_NAMES_LIVE_IN, TREES[PRIVATE_NAMES_LIVE_IN])
    wrong = [
        f"{MODULES[name].relative_to(ROOT)}:{line} uses {dotted}"
        for name, tree in TREES.items()
        if name != PRIVATE_NAMES_LIVE_IN
        for line, dotted in private_torch_names(name, tree)
    ]
    assert not wrong, "\n".join(wrong)


# -- what is installed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a wheel, built from a copy: a build leaves files behind, and takes old ones along."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built).namelist()


def test_a_wheel_holds_every_module(wheel):
    held = {name for name in wheel if name.startswith("fxshard/") and name.endswith(".py")}
    assert held == {installed_path(name) for name in MODULES}
    assert "fxshard/py.typed" in wheel


def installed_path(module: str) -> str:
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if MODULES[module].name == "__init__.py" else f"{path}.py"


def test_a_wheel_puts_nothing_but_fxshard_at_the_top(wheel):
    assert {name.split("/")[0] for name in wheel if not name.split("/")[0].endswith(".dist-info")} == {"fxshard"}
