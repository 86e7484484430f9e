"""What each part imports: the proxy what is built in, the mounter little, the decisions nothing that does I/O."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROXY = sorted((ROOT / "fusermount3_proxy").glob("*.py"))

BUILT_IN = {"_signal", "_socket", "errno", "posix", "sys", "time"}
FIRST_PARTY = {"broker", "fusermount3_proxy"}


def imports(file: Path) -> set[str]:
    """Return the modules that a file imports when it runs: what stands under TYPE_CHECKING does not count."""
    return _imports(ast.parse(file.read_text()))


def _imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        assert node.module is not None
        assert node.level == 0, "imports are absolute"
        if node.module in FIRST_PARTY:
            return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return {node.module}
    below = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        below = list(node.orelse)
    return set().union(*map(_imports, below))


def libraries(modules: set[str]) -> set[str]:
    """Return the top-level names among `modules` that are not ours."""
    return {name.partition(".")[0] for name in modules} - FIRST_PARTY


def reach(module: str) -> set[str]:
    """Return the modules of ours that are imported with `module`, itself among them."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = source_of(name)
        if file is None or name in found:
            continue
        found.add(name)
        waiting += [*imports(file), name.rpartition(".")[0]]
    return found


def source_of(module: str) -> Path | None:
    """Return the file of a module of ours; None for anything else, a name in a module among it."""
    base = ROOT.joinpath(*module.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if module.partition(".")[0] in FIRST_PARTY and file.is_file():
            return file
    return None


def test_imports_under_type_checking_do_not_count() -> None:
    source = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ndef f():\n    from d.e import g\n"
    assert _imports(ast.parse(source)) == {"a", "c", "d.e"}


@pytest.mark.parametrize("file", PROXY, ids=lambda file: file.name)
def test_the_proxy_imports_built_in_modules_and_its_own(file: Path) -> None:
    assert libraries(imports(file)) <= BUILT_IN


@pytest.mark.parametrize("file", PROXY, ids=lambda file: file.name)
def test_the_proxy_knows_nothing_of_the_broker(file: Path) -> None:
    assert not {name for name in imports(file) if name.partition(".")[0] == "broker"}


def test_the_mounter_imports_little() -> None:
    modules = reach("broker.mounter")
    assert {"broker.mounter", "broker.plan", "broker.syscalls", "fusermount3_proxy.wire"} <= modules
    used = set().union(*(libraries(imports(file)) for name in modules if (file := source_of(name))))
    small = {
        "collections",
        "contextlib",
        "ctypes",
        "errno",
        "fcntl",
        "gc",
        "os",
        "select",
        "signal",
        "socket",
        "stat",
        "struct",
        "sys",
        "time",
        "typing",
    }
    assert used <= small | BUILT_IN


@pytest.mark.parametrize("module", ["policy", "options", "plan", "cgroups", "limits", "csi/volume", "csi/requests"])
def test_the_decisions_do_no_input_or_output(module: str) -> None:
    file = ROOT / "broker" / f"{module}.py"
    pure = {"collections", "dataclasses", "difflib", "errno", "functools", "itertools", "os", "re", "stat", "typing"}
    assert libraries(imports(file)) <= pure
    of_os = {
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    }
    assert of_os <= {"strerror", "uname"}


def test_systemd_is_no_business_of_the_decisions_nor_of_the_mounter() -> None:
    for name in (*reach("broker.mounter"), "broker.policy", "broker.options"):
        file = source_of(name)
        assert file is not None
        assert "systemd" not in libraries(imports(file))


def test_grpc_is_imported_by_the_processes_of_the_plugins_only() -> None:
    """`cli` becomes the device plugin where that is the command."""
    grpc = {"grpc", "google"}
    for process in ("cli", "supervisor", "daemon", "mounter"):
        for name in reach(f"broker.{process}"):
            file = source_of(name)
            assert file is not None
            is_allowed = process == "cli" and name.startswith(("broker.deviceplugin.", "broker.rpc"))
            assert is_allowed or not grpc & libraries(imports(file)), name
    plugin = reach("broker.csi.plugin")
    assert "broker.csi.csi_pb2" in plugin
    assert not {"broker.front", "broker.mounter", "broker.registry", "broker.plan"} & plugin


def test_no_other_command_imports_grpc() -> None:
    program = "import sys, broker.cli; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
