"""docs/troubleshooting.md has an entry for every message that the sources can raise or warn."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [*ROOT.glob("flash_attn/**/*.py"), *ROOT.glob("interfaces/**/*.py")]
PYTHON += [ROOT / "build_support.py", ROOT / "setup.py"]
# What the caller of a function raises: the reasons of a backend, of an operator without gradient.
REASONS = {"unsupported", "_smallest_kernel"}
REASON_NAMES = {"no_gradient", "NO_BATCHES", "_NO_SECOND"}
FIELD = "…"
PAGE = ROOT / "docs/troubleshooting.md"
ROW = re.compile(r"^\| (`+)(.+?)\1 \| \S", re.MULTILINE)


def template(node: ast.expr) -> str:
    """The text of an expression, with FIELD for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return FIELD


def arguments(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a node that may be the text of a message."""
    match node:
        case ast.Raise(exc=error) if error is not None:
            for call in ast.walk(error):
                if isinstance(call, ast.Call) and re.search(
                    "(Error|Exit)$", ast.unparse(call.func)
                ):
                    yield from call.args[:1]
        case ast.Call(func=function) if ast.unparse(function).endswith("warn"):
            yield node.args[0]
        case ast.FunctionDef(name=name) if name in REASONS:
            yield from (x.value for x in ast.walk(node) if isinstance(x, ast.Return) and x.value)
        case ast.Assign(targets=[ast.Name(id=name)]) if name in REASON_NAMES:
            yield node.value
        case ast.keyword(arg=name) if name in REASON_NAMES:
            yield node.value


def normal(text: str) -> str:
    return " ".join(text.split())


def messages(source: str) -> set[str]:
    found = {
        normal(template(argument))
        for node in ast.walk(ast.parse(source))
        for argument in arguments(node)
    }
    return {text for text in found if re.search("[a-z]", text)}


def messages_of_cpp(source: str) -> set[str]:
    """What CUDA reports. (std::invalid_argument is for what Python has checked.)"""
    thrown = re.findall(r"(?:throw std::runtime_error|message <<)((?:[^;\"]|\"[^\"]*\")*);", source)
    texts = (FIELD.join(re.findall(r'"([^"]*)"', statement)) for statement in thrown)
    return {normal(text) for text in texts if text}


def raised() -> dict[str, str]:
    """Each message, and a file that has it."""
    found = {}
    for path in PYTHON:
        if path.name != "demo.py":
            found |= dict.fromkeys(messages(path.read_text()), path.name)
    for path in [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cpp")]:
        found |= dict.fromkeys(messages_of_cpp(path.read_text()), path.name)
    return found


def test_every_message_has_an_entry() -> None:
    page = {normal(match[2]) for match in ROW.finditer(PAGE.read_text())}
    known = raised()
    missing = {text: file for text, file in known.items() if text not in page}
    assert not missing, f"not in {PAGE.name}: {missing}"
    assert page == known.keys(), f"raised nowhere: {page - known.keys()}"


def test_messages_are_found() -> None:
    source = """
def f(x, name):
    if x: raise ValueError(f"{name} must be 1, " + f"got {x}")
    warnings.warn("slow", stacklevel=2)
"""
    assert messages(source) == {"… must be 1, got …", "slow"}
