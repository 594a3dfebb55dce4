"""Python sources as trees, for tests of what code may say: each file is read, and each tree walked, once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.AST:
    """The tree of a file."""
    return ast.parse(path.read_text())


@cache
def walked(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree."""
    return tuple(ast.walk(tree))


@cache
def calls(tree: ast.AST) -> tuple[tuple[str, ast.Call], ...]:
    """All calls in a tree, each with the name of what is called."""
    return tuple((_name(node.func), node) for node in walked(tree) if isinstance(node, ast.Call))


def _name(node: ast.expr) -> str:
    """As ast.unparse says it, which takes long; names of modules' members are most of all."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute(value=ast.Name() as owner):
            return f"{owner.id}.{node.attr}"
        case _:
            return ast.unparse(node)
