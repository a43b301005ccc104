"""A described function as a stub to complete: imports, signature, and a docstring with examples."""

import ast
import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence

from fledge.data.sources.problems import RowProblem

_TASK = re.compile(r"write a (?:python )?function to (\w)", re.IGNORECASE)
_WIDTH = 96
_INDENT = "    "
_QUOTES, _OTHER_QUOTES = '"""', "'''"


def make_stub(text: str, code: str, tests: Sequence[str]) -> str:
    """The stub of the function in `code` that the tests call, described by `text`.

    Tests of the form `assert f(x) == y` are examples in the docstring.
    """
    module = _parsed(code, "field `code`")
    asserts = [node for test in tests for node in _parsed(test, "field `test_list`").body]
    function = _tested(module, asserts)
    imports = [ast.unparse(node) for node in module.body if _is_import(node)]
    before = [*imports, "", ""] if imports else []
    signature = f"def {function.name}({ast.unparse(function.args)}):"
    described = _TASK.sub(lambda match: match[1].upper(), text.strip(), count=1)
    lines = textwrap.wrap(f"{_QUOTES}{described.replace(_QUOTES, _OTHER_QUOTES)}", _WIDTH)
    lines += _examples(function.name, asserts)
    return "\n".join([*before, signature, *(_INDENT + line for line in [*lines, _QUOTES])])


def _parsed(code: str, where: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\d" in somebody's pattern
            return ast.parse(code.replace("\r\n", "\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowProblem("no Python", f"{where} is no Python code ({error})") from error


def _tested(module: ast.Module, asserts: Iterable[ast.stmt]) -> ast.FunctionDef:
    """The first function of the module that a test calls."""
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    for node in asserts:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id in functions:
                return functions[inner.id]
    raise RowProblem("no function", "field `code` has no function that field `test_list` calls")


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _examples(name: str, asserts: Iterable[ast.stmt]) -> list[str]:
    lines = []
    for node in asserts:
        match node:
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=called)) as call,
                    ops=[ast.Eq()],
                    comparators=[value],
                )
            ) if called == name:
                lines += [f">>> {ast.unparse(call)}", ast.unparse(value)]
    return lines
