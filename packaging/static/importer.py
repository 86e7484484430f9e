"""The import system of the executable: built-in and frozen modules can be imported, and nothing else exists.

The interpreter's core expects this module under the name `_frozen_importlib` and calls what it needs by name
(Python/import.c): `_install` once, `_find_and_load` for a module that is not in `sys.modules`, `_handle_fromlist` for
`from package import name`, `_module_repr` for a module's repr(). With importlib in its place, start to exit takes a
quarter longer.

No import statement works while this module itself is loaded: `_install` receives the modules that it uses.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

sys: "ModuleType"
_imp: "ModuleType"


def _install(sys_module: "ModuleType", imp_module: "ModuleType") -> None:
    global sys, _imp
    sys, _imp = sys_module, imp_module
    _describe(sys, _spec("sys"))


def _spec(name: str) -> object:
    """Return the used part of a spec: for `_imp.create_builtin`, and for each import of a loaded module."""
    return type(sys.implementation)(name=name, _initializing=False)


def _describe(module: "ModuleType", spec: object) -> None:
    """Set what each import reads from a module: a missing one costs an AttributeError, made and thrown away."""
    module.__dict__.update(__spec__=spec, __path__=None)


def _find_and_load(name: str, import_: "Callable[[str], ModuleType]") -> "ModuleType":
    parent, _, child = name.rpartition(".")
    if parent:
        import_(parent)
    if _imp.is_builtin(name):
        module = _load_builtin(name)
    elif _imp.is_frozen(name):
        module = _load_frozen(name, parent)
    else:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _load_builtin(name: str) -> "ModuleType":
    spec = _spec(name)
    module: ModuleType = _imp.create_builtin(spec)
    _describe(module, spec)
    sys.modules[name] = module
    _imp.exec_builtin(module)
    return module


def _load_frozen(name: str, parent: str) -> "ModuleType":
    module = type(sys)(name)
    _describe(module, _spec(name))
    module.__package__ = parent
    if _imp.is_frozen_package(name):
        module.__package__ = name
        module.__path__ = []
    sys.modules[name] = module
    try:
        exec(_imp.get_frozen_object(name), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _handle_fromlist(
    package: "ModuleType", names: "Iterable[str]", import_: "Callable[[str], ModuleType]"
) -> "ModuleType":
    if package.__path__ is None:
        return package
    for name in names:
        submodule = f"{package.__name__}.{name}"
        if submodule not in sys.modules and _imp.is_frozen(submodule):
            import_(submodule)
    return package


def _module_repr(module: "ModuleType") -> str:
    return f"<module {module.__name__!r}>"
