"""Freezing and checking the executable, as far as testable without a compiler."""

from __future__ import annotations

import importlib.util
import marshal
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from fusermount3_proxy import approach, wire

ROOT = Path(__file__).parents[3]


def load_build() -> ModuleType:
    """Load build.py, a script beside its sources, in no package."""
    spec = importlib.util.spec_from_file_location("static_build", ROOT / "packaging/static/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


def frozen_package(package: Path) -> dict[str, tuple[bool, bytes]]:
    return {each.name: (each.is_package, each.code) for each in build.package_modules(package)}


def code_objects(code: CodeType) -> list[CodeType]:
    """Return a code object and those of its functions and classes."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *(each for one in inner for each in code_objects(one))]


def test_every_module_of_the_package_is_frozen_under_its_name() -> None:
    frozen = frozen_package(ROOT / "fusermount3_proxy")
    modules = {path.stem for path in (ROOT / "fusermount3_proxy").glob("*.py")} - {"__init__"}
    assert frozen.keys() == {"fusermount3_proxy", *(f"fusermount3_proxy.{name}" for name in modules)}
    assert [name for name, (is_package, _) in frozen.items() if is_package] == ["fusermount3_proxy"]


def test_subpackages_are_frozen_too(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("__init__.py", "cli.py", "sub/__init__.py", "sub/module.py"):
        (tmp_path / name).touch()
    frozen = {name: is_package for name, (is_package, _) in frozen_package(tmp_path).items()}
    assert frozen == {
        "fusermount3_proxy": True,
        "fusermount3_proxy.cli": False,
        "fusermount3_proxy.sub": True,
        "fusermount3_proxy.sub.module": False,
    }


def test_the_same_sources_freeze_to_the_same_bytes_wherever_they_lie(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        for file in (ROOT / "fusermount3_proxy").glob("*.py"):
            (tmp_path / place / file.name).write_bytes(file.read_bytes())
    first, second = (frozen_package(tmp_path / place) for place in ("here", "there"))
    assert first == second == frozen_package(ROOT / "fusermount3_proxy")
    assert list(first) == sorted(first)
    sources = [build.c_source(build.core_modules(), build.package_modules(tmp_path / "here")) for _ in range(2)]
    assert sources[0] == sources[1]


def test_no_code_object_names_a_place_of_the_machine() -> None:
    modules = [*build.core_modules(), *build.package_modules(ROOT / "fusermount3_proxy")]
    assert len(modules) > 5
    for module in modules:
        for code in code_objects(marshal.loads(module.code)):
            assert code.co_filename.startswith("fusermount3_proxy/")
        assert bytes(ROOT) not in module.code


def test_frozen_code_has_no_docstrings_and_no_assertions() -> None:
    module = build.freeze("m", b'"""Docstring."""\ndef f():\n    "Another."\n    assert False\n    return 7\n', "m.py")
    code = marshal.loads(module.code)
    namespace: dict[str, object] = {}
    exec(code, namespace)
    function = namespace["f"]
    assert callable(function)
    assert (function(), function.__doc__, namespace.get("__doc__")) == (7, None, None)


def test_the_generated_c_holds_each_module_once() -> None:
    module = build.freeze("fusermount3_proxy.cli", b"x = 1", "cli.py")
    source = build.c_source([], [module])
    assert source.count("static const unsigned char code_fusermount3_proxy__cli[]") == 1
    assert source.count('.name = "fusermount3_proxy.cli"') == 1
    numbers = source.partition("code_fusermount3_proxy__cli[] = {")[2].partition("}")[0]
    assert bytes(int(number) for number in numbers.replace(",", " ").split()) == module.code


def test_the_names_that_the_code_uses_are_written_into_the_c_sorted() -> None:
    source = b"from posix import close as shut, O_PATH\ndef f(x):\n    return [y.name for y in x if max(y.z)]\n"
    module = build.freeze("m", source, "m.py")
    assert build.names([module]) == {"posix", "close", "shut", "O_PATH", "f", "name", "max", "z"}
    written = build.c_source([], [module]).partition("named[] = {\n")[2].partition("};")[0]
    assert written.split() == ['"O_PATH",', '"close",', '"f",', '"max",', '"name",', '"posix",', '"shut",', '"z",']


def definitions() -> dict[str, str]:
    """Return the macros of protocol.h."""
    lines = build.header(ROOT / "fusermount3_proxy").splitlines()
    return dict(re.findall(r"#define (\w+) (.*)", "\n".join(lines)))


def c_bytes(macro: str) -> bytes:
    """Return the bytes of a C string constant."""
    assert (macro[0], macro[-1]) == ('"', '"')
    return re.sub(rb"\\([0-7]{3})", lambda digits: bytes([int(digits[1], 8)]), macro[1:-1].encode())


def test_the_messages_of_the_fast_path_are_those_of_the_codec() -> None:
    parts = {name: c_bytes(value) for name, value in definitions().items() if value.startswith('"')}
    mount = parts["MOUNT_TO_MOUNTPOINT"] + b"/mnt" + parts["MOUNT_TO_OPTIONS"] + b"ro,x" + parts["MOUNT_END"]
    assert mount == wire.encode_request(wire.MountRequest(b"/mnt", b"ro,x"))
    unmount = parts["UNMOUNT_TO_MOUNTPOINT"] + b"/a/b" + parts["UNMOUNT_TO_NAME"] + b"b"
    for end, is_lazy in (("UNMOUNT_END", False), ("UNMOUNT_LAZY_END", True)):
        assert unmount + parts[end] == wire.encode_request(wire.UnmountRequest(b"/a/b", b"b", is_lazy))
    assert parts["REPLY_TO_ID"] + b"7" + parts["REPLY_END"] == wire.encode_reply(wire.Reply(b"7"))
    assert parts["COMMIT"] == wire.encode_request(wire.CommitRequest())


def test_the_fast_path_looks_where_python_looks() -> None:
    macros = definitions()
    assert c_bytes(macros["BROKER_VARIABLE"]) == approach.VARIABLE
    assert c_bytes(macros["BROKER_DEFAULT_PATH"]) == approach.DEFAULT_PATH
    assert macros["AT_ONCE_MS"] == "1000"
    assert "fuse-starter" in macros["OTHER_NAMES"]


def test_any_bytes_become_a_c_string_constant() -> None:
    every = bytes(range(256))
    assert c_bytes(build.c_string(every)) == every
    assert build.c_string(b'1\x001"\\?') == r'"1\0001\042\134\077"'


def test_the_fast_path_compiles_without_any_warning(tmp_path: Path) -> None:
    (tmp_path / "protocol.h").write_text(build.header(ROOT / "fusermount3_proxy"))
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-Wstrict-prototypes", "-Wformat=2", "-Wvla"]
    source, output = ROOT / "packaging/static/fast_path.c", tmp_path / "fast_path.o"
    subprocess.run(["cc", *build.COMPILE_FLAGS, *warnings, f"-I{tmp_path}", "-c", source, "-o", output], check=True)


@pytest.mark.parametrize("source", [b"async def f():\n    pass\n", b"def g():\n    async def f():\n        yield 1\n"])
def test_a_coroutine_is_not_frozen(source: bytes) -> None:
    with pytest.raises(SystemExit, match=r"m\.py: f: a coroutine"):
        build.c_source([], [build.freeze("m", source, "m.py")])


def test_a_source_with_a_mistake_is_not_frozen() -> None:
    with pytest.raises(SyntaxError):
        build.freeze("m", b"def", "m.py")


def test_a_dynamic_executable_is_seen_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    true = Path("/bin/true")
    assert {build.PT_INTERP, build.PT_DYNAMIC} <= build.segment_types(true.read_bytes())
    with pytest.raises(SystemExit, match="/bin/true: not a static executable"):
        build.verify(true)
    assert capsys.readouterr().out == ""


def static_executable(size: int) -> bytes:
    """Return an ELF header and one program header, PT_LOAD, padded to `size` bytes."""
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    header[32:40] = (64).to_bytes(8, sys.byteorder)
    header[54:58] = (56).to_bytes(2, sys.byteorder) + (1).to_bytes(2, sys.byteorder)
    return (bytes(header) + (1).to_bytes(4, sys.byteorder) + bytes(52)).ljust(size, b"\0")


def test_a_small_static_executable_is_verified(tmp_path: Path) -> None:
    file = tmp_path / "proxy"
    file.write_bytes(static_executable(build.SIZE_LIMIT))
    build.verify(file)


def test_a_large_executable_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "proxy"
    file.write_bytes(static_executable(build.SIZE_LIMIT + 1))
    with pytest.raises(SystemExit, match="7000001 bytes, more than the 7000000"):
        build.verify(file)


@pytest.mark.parametrize("library", ["libpython3.11.so", "libpython3.11.a"])
def test_without_a_static_libpython_the_package_that_has_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    settings = {"LIBPL": str(tmp_path), "LIBRARY": library}
    monkeypatch.setattr(build, "config", settings.__getitem__)
    if library.endswith(".so"):
        (tmp_path / library).touch()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(SystemExit, match=rf"{library}: no static libpython .*libpython{version}-dev"):
        build.static_libpython()


def test_a_static_libpython_is_found_where_sysconfig_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libpython3.99.a").touch()
    monkeypatch.setattr(build, "config", {"LIBPL": str(tmp_path), "LIBRARY": "libpython3.99.a"}.__getitem__)
    assert build.static_libpython() == tmp_path / "libpython3.99.a"


def test_a_directory_that_is_not_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build.py", "--output", str(tmp_path / "out"), "--package", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"no cli\.py in there"):
        build.main()
    assert not (tmp_path / "out").exists()


def test_a_compiler_that_fails_leaves_no_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib.a").touch()
    settings = {"LIBPL": str(tmp_path), "LIBRARY": "lib.a"}
    monkeypatch.setattr(build, "config", lambda name: settings.get(name, ""))
    monkeypatch.setenv("CC", "false")
    monkeypatch.setattr(sys, "argv", ["build.py", "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"out\.unverified: not built"):
        build.main()
    assert not (tmp_path / "out").exists()


def test_for_another_architecture_the_same_places_are_looked_for_under_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "LIBPL": "/usr/lib/python3.99/config-3.99-x86_64-linux-gnu",
        "LIBRARY": "libpython3.99.a",
        "MULTIARCH": "x86_64-linux-gnu",
        "INCLUDEPY": "/usr/include/python3.99",
    }
    monkeypatch.setattr(build, "config", settings.__getitem__)
    target = build.Target(build.ARCHITECTURES["arm64"], tmp_path)
    library = tmp_path / "usr/lib/python3.99/config-3.99-aarch64-linux-gnu/libpython3.99.a"
    with pytest.raises(SystemExit, match=f"{library}: no static libpython"):
        build.static_libpython(target)
    library.parent.mkdir(parents=True)
    library.touch()
    assert build.static_libpython(target) == library
    assert build.include_directories(target) == [tmp_path / "usr/include/python3.99", tmp_path / "usr/include"]


def test_an_executable_for_another_machine_than_wanted_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "proxy"
    file.write_bytes(static_executable(1000))
    with pytest.raises(SystemExit, match="not an executable for aarch64-linux-gnu"):
        build.verify(file, build.Target(build.ARCHITECTURES["arm64"], tmp_path))


def test_headers_of_another_python_are_refused_by_the_compiler() -> None:
    version = f"0x{sys.version_info.major:x}{sys.version_info.minor:02x}"
    assert f"#if PY_VERSION_HEX >> 16 != {version}\n#error" in build.c_source([], [])


@pytest.mark.parametrize("option", [("--arch", "arm64"), ("--root", "/")])
def test_another_architecture_needs_its_root(option: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build.py", "--output", "/nowhere", *option])
    with pytest.raises(SystemExit, match="2"):
        build.main()
