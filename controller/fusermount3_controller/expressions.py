"""Jinja expressions in the strings of a template: what they may be, and what they yield.

`{{ params.bucket }}` is an expression. Statements (`{% … %}`) are refused, and so is all that can take much time or
memory for its length: calls, loops, multiplication, powers, `replace`. Length and nesting of what is left are limited.
Names are looked up when a template is checked, not when it is used. Of an object of the cluster, such as `pvc`, a
field is `pvc.metadata.name`, or `pvc.metadata.labels['a/b']`; one that is not there yields nothing. What Python's
values have can't be reached.

A string is rendered after the manifest has been parsed, so nothing that an expression yields becomes YAML. The
environment is Jinja's sandbox all the same.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from jinja2 import StrictUndefined, TemplateError, Undefined, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: The longest string with expressions, and the longest that one yields, in characters.
LONGEST_SOURCE = 8192
LONGEST_RESULT = 16384
#: The largest object that an expression can use, in characters of JSON.
LARGEST_OBJECT = 16384
#: How deep an expression may be nested; also how many filters may follow each other.
DEEPEST = 20

#: What an expression can yield: None means that the field, or the element of a list, is left out.
Value = str | int | bool | None
#: What a variable can be: a list or an object, of which only parts and JSON can be yielded.
Variable = Value | list[Any] | Mapping[str, Any]

_ALLOWED = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.Getattr, nodes.Filter),
    nodes.Getitem,
    *(nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.CondExpr, nodes.Concat),
    *(nodes.Add, nodes.Sub, nodes.Neg),
)
#: What others are called in a refusal; the rest of Jinja's statements are just that.
_REFUSED: dict[type[nodes.Node], str] = {
    nodes.Call: "a call",
    nodes.List: "a list",
    nodes.Dict: "a dictionary",
    nodes.Tuple: "a tuple",
    nodes.Test: "a test (`is`)",
    nodes.Mul: "*",
    nodes.Pow: "**",
    nodes.Div: "/",
    nodes.FloorDiv: "//",
    nodes.Mod: "%",
    nodes.Pos: "+ before a value",
}
_WHOLE = re.compile(r"\{\{[-+]?(.*?)-?\}\}", re.DOTALL)
_WRONG_TYPE = "has a %s, not a string, a whole number, true or false"
#: As many digits as the greatest capacity has.
_NUMBER = re.compile("[+-]?[0-9]{1,19}")
_LARGEST = 10**19


class ExpressionError(ValueError):
    """A string has no valid expressions, or they yield nothing that can be used; the message says why."""


class Names(NamedTuple):
    """The names that expressions may use: variables, parameters, which are `params.NAME`, and objects with fields."""

    variables: Set[str]
    parameters: Set[str]
    objects: Set[str] = frozenset()


def has_any(text: str) -> bool:
    """Return whether `text` has anything in it that Jinja would look at."""
    return any(mark in text for mark in ("{{", "{%", "{#"))


def check(text: str, names: Names) -> None:
    """Check that `text` has only expressions that are allowed, about `names`. Raises ExpressionError."""
    _check(_parsed(text), names, depth=0)


def are_quoted_for_shell(text: str) -> bool:
    """Return whether each expression in `text` ends with the filter `tobash`, as in a script it must."""
    printed = (node for output in _parsed(text).body if isinstance(output, nodes.Output) for node in output.nodes)
    return all(
        isinstance(node, nodes.TemplateData) or (isinstance(node, nodes.Filter) and node.name == "tobash")
        for node in printed
    )


def paths_in(text: str) -> frozenset[str]:
    """Return what `text`, which `check` has found valid, is about: names with their fields, as in `params.bucket`."""
    return frozenset(_path(node) for node in _outermost(_parsed(text)))


def _outermost(node: nodes.Node) -> Iterator[nodes.Expr]:
    if isinstance(node, nodes.Name | nodes.Getattr | nodes.Getitem):
        yield node
        return
    for child in node.iter_child_nodes():
        yield from _outermost(child)


def _path(node: nodes.Expr) -> str:
    if isinstance(node, nodes.Getattr):
        return f"{_path(node.node)}.{node.attr}"
    if isinstance(node, nodes.Getitem):
        return f"{_path(node.node)}.{_key(node)}"
    return str(node.name) if isinstance(node, nodes.Name) else ""


def render(text: str, variables: Mapping[str, Variable], parameters: Mapping[str, str]) -> Value:
    """Return what `text` yields, which `check` has found to be valid.

    A string that is one expression yields its value, which may be a number, true or false; None if it is an `if`
    without an `else` whose condition is false. All others yield strings. Raises ExpressionError.
    """
    if not has_any(text):
        return text
    values = {**variables, "params": parameters}
    try:
        whole = _WHOLE.fullmatch(text) if _is_one_expression(text) else None
        result = _value(whole[1], values) if whole else _ENVIRONMENT.from_string(text).render(values)
    except (TemplateError, TypeError, RecursionError) as error:
        raise ExpressionError(_reason(error)) from None
    if isinstance(result, str) and len(result) > LONGEST_RESULT:
        raise ExpressionError(f"yields more than {LONGEST_RESULT} characters")
    return result


def _value(source: str, values: Mapping[str, object]) -> Value:
    result = _ENVIRONMENT.compile_expression(source.strip(), undefined_to_none=True)(values)
    if result is None or isinstance(result, str | int):
        return result
    raise ExpressionError(_WRONG_TYPE % type(result).__name__)


def _parsed(text: str) -> nodes.Template:
    if len(text) > LONGEST_SOURCE:
        raise ExpressionError(f"a string with expressions has at most {LONGEST_SOURCE} characters")
    try:
        return _ENVIRONMENT.parse(text)
    except (TemplateError, ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        raise ExpressionError(_reason(error)) from None


def _is_one_expression(text: str) -> bool:
    outputs = _parsed(text).body
    if len(outputs) != 1 or not isinstance(outputs[0], nodes.Output):
        return False
    printed = outputs[0].nodes
    return len(printed) == 1 and not isinstance(printed[0], nodes.TemplateData)


def _check(node: nodes.Node, names: Names, depth: int) -> None:
    if not isinstance(node, _ALLOWED):
        what = _REFUSED.get(type(node), "a statement" if isinstance(node, nodes.Stmt) else type(node).__name__.lower())
        raise ExpressionError(f"{what} is not allowed in a template")
    if depth > DEEPEST:
        raise ExpressionError("its expression is nested too deeply")
    if isinstance(node, nodes.Getattr | nodes.Getitem):
        _check_field(node, names, depth)
        return
    if isinstance(node, nodes.Name) and node.name not in names.variables | names.objects:
        known = ", ".join(sorted({"params.NAME", *names.variables, *names.objects}))
        raise ExpressionError(f"there is no '{node.name}'; an expression can use {known}")
    if isinstance(node, nodes.Const):
        _check_constant(node.value)
    if isinstance(node, nodes.Filter):
        _check_filter(node)
    for child in node.iter_child_nodes():
        _check(child, names, depth + 1)


def _check_field(node: nodes.Getattr | nodes.Getitem, names: Names, depth: int) -> None:
    """Check what follows a name: fields of objects, and parameters."""
    field = node.attr if isinstance(node, nodes.Getattr) else _key(node)
    if isinstance(node.node, nodes.Name) and node.node.name == "params" and isinstance(node, nodes.Getattr):
        if field not in names.parameters:
            raise ExpressionError(f"params.{field} is not in spec.parameters")
        return
    root = node.node
    while isinstance(root, nodes.Getattr | nodes.Getitem):
        root = root.node
    if not isinstance(root, nodes.Name) or root.name not in names.objects:
        shown = f".{field}" if isinstance(node, nodes.Getattr) else "[…]"
        holders = " and ".join(sorted({"params", *names.objects}))
        raise ExpressionError(f"'{shown}' is not allowed: only {holders} {'have' if names.objects else 'has'} fields")
    _check(node.node, names, depth + 1)


def _key(node: nodes.Getitem) -> str | int:
    if not isinstance(node.arg, nodes.Const) or not isinstance(node.arg.value, str | int):
        raise ExpressionError("what stands in […] must be written out: the name of a field, or a number")
    return node.arg.value


def _check_constant(value: object) -> None:
    if not isinstance(value, str | int | None):
        raise ExpressionError(_WRONG_TYPE % type(value).__name__)
    if isinstance(value, int) and value >= _LARGEST:
        raise ExpressionError("a number has at most 19 digits")


def _check_filter(node: nodes.Filter) -> None:
    if node.name not in FILTERS:
        raise ExpressionError(f"there is no filter '{node.name}'; there are {', '.join(sorted(FILTERS))}")
    if node.args or node.kwargs or node.dyn_args or node.dyn_kwargs:
        raise ExpressionError(f"the filter '{node.name}' takes no arguments")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its expression is nested too deeply"
    return f"not a valid expression: {error}"


def check_size(name: str, value: object) -> None:
    """Check that an object is not too large for expressions. Raises ExpressionError."""
    if len(json.dumps(value)) > LARGEST_OBJECT:
        raise ExpressionError(f"{name} has more than {LARGEST_OBJECT} characters of JSON")


# Filters -----------------------------------------------------------------------------------------------------------


def _limited(function: Callable[[Value], Value]) -> Callable[[Value], Value]:
    def limited(value: Value) -> Value:
        result = function(value)
        if isinstance(result, str) and len(result) > LONGEST_RESULT:
            raise ExpressionError(f"yields more than {LONGEST_RESULT} characters")
        return result

    return limited


def text(value: Value) -> str:
    """Return `value` as it is in a manifest. Raises ExpressionError, if it is none that can be there."""
    if value is None:
        raise ExpressionError("a part of the string yields nothing: give the `if` an `else`, such as ''")
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int):
        raise ExpressionError(_WRONG_TYPE % type(value).__name__)
    return str(value)


def _int(value: Value) -> int:
    if not _NUMBER.fullmatch(given := text(value).strip()):
        raise ExpressionError(f"{given[:40]!r} is not a whole number")
    return int(given)


#: The only filters there are.
FILTERS: dict[str, Callable[[Value], Value]] = {
    "int": _int,
    "lower": lambda value: text(value).lower(),
    "upper": lambda value: text(value).upper(),
    "trim": lambda value: text(value).strip(),
    "tojson": json.dumps,
    "tobash": lambda value: shlex.quote(text(value)),
}


def _finalized(value: object) -> str:
    if isinstance(value, Undefined):
        return text(None)
    if value is None or isinstance(value, str | int):
        return text(value)
    raise ExpressionError(_WRONG_TYPE % type(value).__name__)


class _Environment(ImmutableSandboxedEnvironment):
    """Fields are those of objects and lists as JSON has them, whatever else a value of Python has."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return obj.get(attribute) if isinstance(obj, Mapping) else None

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, list) and isinstance(argument, int):
            return obj[argument] if -len(obj) <= argument < len(obj) else None
        return self.getattr(obj, argument)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        undefined=StrictUndefined,
        finalize=_finalized,
        keep_trailing_newline=True,
        autoescape=False,
        cache_size=0,
    )
    environment.globals.clear()
    environment.tests.clear()
    environment.filters.clear()
    environment.filters.update({name: _limited(function) for name, function in FILTERS.items()})
    return environment


_ENVIRONMENT = _environment()


def strings(value: object, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield all strings in `value`, a manifest or a part of one, each after the path of its field."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from strings(each, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from strings(each, f"{field}[{index}]")


def render_all(
    value: object, variables: Mapping[str, Variable], parameters: Mapping[str, str], field: str = ""
) -> object:
    """Return a copy of `value` with all strings rendered; fields and elements that yield None are left out.

    Keys are never rendered. Raises ExpressionError, whose message begins with the field.
    """
    if isinstance(value, str):
        try:
            return render(value, variables, parameters)
        except ExpressionError as error:
            raise ExpressionError(f"{field}: {error}") from None
    if isinstance(value, Mapping):
        below = {
            name: render_all(each, variables, parameters, f"{field}.{name}" if field else str(name))
            for name, each in value.items()
        }
        return {name: each for name, each in below.items() if each is not None or value[name] is None}
    if isinstance(value, list):
        elements = [render_all(each, variables, parameters, f"{field}[{index}]") for index, each in enumerate(value)]
        return [each for each, source in zip(elements, value, strict=True) if each is not None or source is None]
    return value
