"""The lower bounds of what hvdtrain requires, as setup.py claims them."""

import ast
import re

# Extras of those who change hvdtrain, of which only the pinned versions are used.
_OF_DEVELOPERS = {"test", "lint", "docs", "dist"}
_RANGE = re.compile(r"([A-Za-z][\w.-]*)>=(\d[\w.]*)")


def lowest(setup_py_text: str) -> dict[str, str]:
    """Return the lowest version of each package that is claimed, by its name."""
    found: dict[str, str] = {}
    for text in _texts(ast.parse(setup_py_text)):
        match = _RANGE.fullmatch(text)
        if match and found.setdefault(match[1], match[2]) != match[2]:
            raise ValueError(f"setup.py has {match[1]}>={found[match[1]]} and >={match[2]}")
    return found


def _texts(tree: ast.AST) -> list[str]:
    if isinstance(tree, ast.Constant):
        return [tree.value] if isinstance(tree.value, str) else []
    children = list(ast.iter_child_nodes(tree))
    if isinstance(tree, ast.Dict):
        children = [
            value
            for key, value in zip(tree.keys, tree.values, strict=True)
            if not (isinstance(key, ast.Constant) and key.value in _OF_DEVELOPERS)
        ]
    return [text for child in children for text in _texts(child)]
