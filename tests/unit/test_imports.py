"""Allowed imports: a folder of the broker is a process or shared by all; the proxy imports only built-in modules; the
controller imports nothing of either but what processes of the broker say to each other."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROXY = sorted((ROOT / "fusermount3_proxy").glob("*.py"))
BROKER = ROOT / "broker/fusermount3_broker"
CONTROLLER = ROOT / "controller/fusermount3_controller"
MODULES = sorted(file for file in BROKER.rglob("*.py") if not file.name.endswith("_pb2.py"))

OF_CONTROLLER = sorted(CONTROLLER.rglob("*.py"))
SOURCES = (BROKER.parent, CONTROLLER.parent)
PACKAGES = sorted(file for root in SOURCES for file in root.rglob("__init__.py"))

BUILT_IN = {"_signal", "_socket", "errno", "posix", "sys", "time"}
#: The directory of each package.
FIRST_PARTY = {
    "fusermount3_broker": ROOT / "broker",
    "fusermount3_controller": ROOT / "controller",
    "fusermount3_proxy": ROOT,
}

#: Folders that hold one process each, or the commands.
PROCESSES = ("cli", "csi", "front", "injection", "mounter", "supervisor")
#: Folders shared by all of them, and the folders that these import.
SHARED = {"kernel": (), "messages": ("kernel",), "service": ("kernel", "messages")}
#: Imports through which another folder enters a process, and the reasons.
CROSSINGS = {
    ("cli.main", "supervisor.daemon"): "`serve` and `csi` become the supervisor",
    ("cli.main", "injection.device_plugin"): "`device-plugin` becomes the device plugin",
    ("cli.main", "injection.cdi"): "`cdi generate` prints what is injected, without a process",
}
#: Folders within a process, and the modules of that process outside them that they import.
INNER = {"front.decisions": {"front.model"}, "front.tables": {"front.model", "front.decisions.limits"}}
#: All that the broker imports from the proxy: their protocol, and the version.
OF_THE_PROXY = {"fusermount3_proxy", "fusermount3_proxy.__version__", "fusermount3_proxy.wire"}

#: Folders of pure code, which touches no file, socket or process.
PURE = ("front/decisions", "messages")
PURE_LIBRARIES = {
    *("bisect", "collections", "dataclasses", "difflib", "errno", "functools", "itertools", "os", "pathlib", "re"),
    *("secrets", "stat", "typing"),
    *("hashlib", "json"),  # for the key of shared filesystems
}
#: Modules of the controller that act: the others touch no file, socket or process.
ACTING_IN_CONTROLLER = {
    *("api_errors", "certificate_keeper", "cli", "cluster_cache", "controller_metrics", "daemon", "event_writer"),
    *("leader_election", "look_queue", "mount_pod_keeper", "pod_volume_keeper", "webhook"),
}
#: What these others import; the last line is the extra `[controller]`.
PURE_LIBRARIES_IN_CONTROLLER = {
    *(
        "base64",
        "collections",
        "copy",
        "datetime",
        "decimal",
        "difflib",
        "enum",
        "functools",
        "hashlib",
        "json",
        "posixpath",
    ),
    *("re", "shlex", "types", "typing"),
    *("cryptography", "jinja2", "jsonpatch", "re2", "yaml"),
}
#: All that the controller imports of the broker, besides its messages, and of the proxy.
OF_OTHERS_IN_CONTROLLER = {"fusermount3_proxy", "fusermount3_proxy.__version__"}


def imports(file: Path, *, with_types: bool = False) -> set[str]:
    """Return the modules that a file imports when it runs; with `with_types`, also those under TYPE_CHECKING."""
    return _imports(ast.parse(file.read_text()), with_types)


def _imports(node: ast.AST, with_types: bool = False) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        assert node.module is not None
        assert node.level == 0, "imports are absolute"
        if node.module.partition(".")[0] in FIRST_PARTY:
            return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return {node.module}
    below = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        below = below if with_types else list(node.orelse)
    return set().union(*(_imports(each, with_types) for each in below))


def libraries(modules: set[str]) -> set[str]:
    """Return the top-level names among `modules` that are not first-party."""
    return {name.partition(".")[0] for name in modules} - set(FIRST_PARTY)


def reach(module: str) -> set[str]:
    """Return the first-party modules imported with `module`, including itself."""
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
    """Return the file of a first-party module; None for anything else, including a name in a module."""
    package = module.partition(".")[0]
    if package not in FIRST_PARTY:
        return None
    base = FIRST_PARTY[package].joinpath(*module.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def in_broker(module: str) -> str:
    """Return the name of a broker module below its package; empty for other modules."""
    return module.removeprefix("fusermount3_broker.") if module.startswith("fusermount3_broker.") else ""


def complaint(importer: str, imported: str) -> str:
    """Return why a broker module must not import another, and where the code belongs; empty if it may."""
    folder, other = importer.partition(".")[0], imported.partition(".")[0]
    allowed = {folder, *(SHARED if folder in PROCESSES else SHARED[folder])}
    if other in allowed or (importer, imported) in CROSSINGS:
        return ""
    says = f"{importer} imports {imported}: "
    if folder in SHARED:
        return says + f"{folder}/ is for all processes, and knows no {other}/; what needs both belongs to {other}/"
    return says + (
        f"{folder}/ and {other}/ are different processes. What both need belongs to messages/ if the one says it to "
        "the other, to kernel/ if it only asks Linux, to service/ if any daemon needs it; all else stays in one of them"
    )


def test_imports_under_type_checking_do_not_count_when_a_file_runs() -> None:
    source = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ndef f():\n    from d.e import g\n"
    assert _imports(ast.parse(source)) == {"a", "c", "d.e"}
    assert _imports(ast.parse(source), with_types=True) == {"a", "b", "c", "d.e"}


@pytest.mark.parametrize("file", PROXY, ids=lambda file: file.name)
def test_the_proxy_imports_built_in_modules_and_its_own(file: Path) -> None:
    assert libraries(imports(file)) <= BUILT_IN


@pytest.mark.parametrize("file", PROXY, ids=lambda file: file.name)
def test_the_proxy_knows_nothing_of_the_broker(file: Path) -> None:
    assert not {name for name in imports(file) if name.partition(".")[0] == "fusermount3_broker"}


def test_a_folder_of_the_broker_is_a_process_or_shared() -> None:
    folders = {path.parent.name for path in BROKER.glob("*/__init__.py")}
    assert folders == {*PROCESSES, *SHARED}
    assert [path.name for path in BROKER.glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(BROKER)))
def test_a_process_imports_no_other_process(file: Path) -> None:
    importer = ".".join(file.relative_to(BROKER).with_suffix("").parts)
    modules = {in_broker(name) for name in imports(file, with_types=True) if source_of(name)} - {""}
    complaints = {complaint(importer, each) for each in modules if "." in each} - {""}
    assert not complaints, "; ".join(sorted(complaints))


@pytest.mark.parametrize(
    ("importer", "imported", "says"),
    [
        ("front.call", "front.tables.database", ""),
        ("front.call", "messages.mounter", ""),
        ("cli.main", "supervisor.daemon", ""),
        ("front.call", "mounter.invariants", "front/ and mounter/ are different processes"),
        ("cli.top", "supervisor.daemon", "cli/ and supervisor/ are different processes"),
        ("mounter.daemon", "cli.main", "mounter/ and cli/ are different processes"),
        ("messages.mounter", "service.log", "messages/ is for all processes, and knows no service/"),
        ("kernel.syscalls", "messages.records", "what needs both belongs to messages/"),
    ],
)
def test_a_wrong_import_is_told_where_the_thing_belongs(importer: str, imported: str, says: str) -> None:
    assert says in complaint(importer, imported)
    assert bool(says) == bool(complaint(importer, imported))


@pytest.mark.parametrize("inner", INNER)
def test_a_folder_in_a_process_knows_nothing_of_what_is_above_it(inner: str) -> None:
    process = inner.partition(".")[0]
    for file in BROKER.joinpath(*inner.split(".")).glob("*.py"):
        modules = {in_broker(name) for name in imports(file, with_types=True) if source_of(name)}
        own = {name for name in modules if name.startswith(f"{process}.") and not name.startswith(inner)}
        packages = {process, *(name.rpartition(".")[0] for name in INNER[inner])}
        assert own <= INNER[inner] | packages, f"{inner}.{file.stem} imports {own - INNER[inner]}"


def test_there_are_no_crossings_but_those_that_are_used() -> None:
    used = {("cli.main", in_broker(name)) for name in imports(BROKER / "cli/main.py", with_types=True)}
    assert set(CROSSINGS) <= used


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(BROKER)))
def test_the_broker_takes_nothing_of_the_proxy_but_what_they_say_to_each_other(file: Path) -> None:
    assert {name for name in imports(file) if name.startswith("fusermount3_proxy.") and source_of(name)} <= OF_THE_PROXY


@pytest.mark.parametrize("file", OF_CONTROLLER, ids=lambda file: str(file.relative_to(CONTROLLER)))
def test_the_controller_takes_nothing_of_the_broker_but_pure_messages(file: Path) -> None:
    others = {name for name in imports(file, with_types=True) if source_of(name)}
    others = {name for name in others if name.partition(".")[0] != "fusermount3_controller"}
    ours = {name for name in others if in_broker(name).partition(".")[0] == "messages"} | {"fusermount3_broker"}
    assert others <= ours | OF_OTHERS_IN_CONTROLLER


@pytest.mark.parametrize("file", [*PROXY, *MODULES], ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_imports_the_controller(file: Path) -> None:
    names = {name.partition(".")[0] for name in imports(file, with_types=True)}
    assert "fusermount3_controller" not in names


@pytest.mark.parametrize("file", OF_CONTROLLER, ids=lambda file: str(file.relative_to(CONTROLLER)))
def test_the_controller_decides_in_modules_that_act_on_nothing(file: Path) -> None:
    acts = not libraries(imports(file)) <= PURE_LIBRARIES_IN_CONTROLLER
    assert acts == (file.stem in ACTING_IN_CONTROLLER)
    if not acts:
        below = {name.rpartition(".")[2] for name in imports(file) if source_of(name)}
        assert not below & ACTING_IN_CONTROLLER


@pytest.mark.parametrize(
    "file",
    [file for folder in PURE for file in sorted((BROKER / folder).glob("*.py"))],
    ids=lambda file: str(file.relative_to(BROKER)),
)
def test_decisions_and_messages_import_nothing_that_acts(file: Path) -> None:
    for name in reach("fusermount3_broker." + ".".join(file.relative_to(BROKER).with_suffix("").parts)):
        source = source_of(name)
        if source is None or not in_broker(name):  # the proxy's codec, which is tested with the proxy
            continue
        assert libraries(imports(source)) <= PURE_LIBRARIES, f"{name} acts"
        of_os = {
            node.attr
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
        }
        assert of_os <= {"strerror", "uname"}, f"{name} acts"


def test_the_mounter_imports_little() -> None:
    modules = reach("fusermount3_broker.mounter.daemon")
    known = {f"fusermount3_broker.{name}" for name in ("mounter.daemon", "messages.mounter", "kernel.syscalls")}
    assert {*known, "fusermount3_proxy.wire"} <= modules
    assert not {name for name in modules if in_broker(name).startswith("service.")}
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


def test_grpc_is_imported_by_the_processes_of_the_plugins_only() -> None:
    """`cli` becomes the device plugin if that is the command."""
    grpc = {"grpc", "google"}
    for process in ("cli.main", "supervisor.daemon", "front.daemon", "mounter.daemon"):
        for name in reach(f"fusermount3_broker.{process}"):
            file = source_of(name)
            assert file is not None
            is_allowed = process == "cli.main" and in_broker(name).startswith(("injection.", "service.grpc_server"))
            assert is_allowed or not grpc & libraries(imports(file)), name
    assert "fusermount3_broker.csi.csi_pb2" in reach("fusermount3_broker.csi.plugin")


def test_no_other_command_imports_grpc() -> None:
    program = "import sys, fusermount3_broker.cli.main; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT / "broker", check=True)


def test_each_folder_says_what_its_process_may_do() -> None:
    for file in PACKAGES:
        tree = ast.parse(file.read_text())
        assert ast.get_docstring(tree), f"{file.parent.name}/__init__.py has no docstring"
        assert len(tree.body) == 1, f"{file.parent.name}/__init__.py imports or does something"


def test_each_docstring_of_a_folder_names_its_modules() -> None:
    for file in PACKAGES:
        text = file.read_text()
        modules = [each.stem for each in file.parent.glob("*.py") if each != file]
        folders = [each.parent.name for each in file.parent.glob("*/__init__.py")]
        missing = [name for name in (*modules, *folders) if f"`{name}`" not in text]
        assert not missing, f"{file.parent.name}/__init__.py names no {missing}"


def test_no_module_is_longer_than_500_lines() -> None:
    assert [file.name for file in (*MODULES, *OF_CONTROLLER) if len(file.read_text().splitlines()) > 500] == []


def test_every_folder_is_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found = {".".join(file.parent.relative_to(root).parts) for root in SOURCES for file in root.rglob("__init__.py")}
    assert set(setup["options"]["packages"].split()) == {"fusermount3_proxy", *found}
