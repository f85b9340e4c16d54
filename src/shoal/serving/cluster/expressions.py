"""Small expressions in settings, evaluated without Python's `eval`: arithmetic, and conditions over integers."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
MAX_LENGTH = 1000
MAX_DEPTH = 50


def evaluate_number(text: str) -> int | float:
    """The value of arithmetic such as ``60 * 1000 * 1000``: ints and floats with + - * / // % and parentheses."""
    tree = _parse(text)
    operators = {**_ARITHMETIC, ast.Div: operator.truediv}

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner = value(node.operand)
            return -inner if isinstance(node.op, ast.USub) else inner
        if isinstance(node, ast.BinOp) and type(node.op) in operators:
            return operators[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"the value must be a number, got {text!r}; numbers can use + - * / // % and parentheses")

    try:
        return value(tree)
    except ZeroDivisionError:
        raise ValueError(f"{text!r} divides by zero") from None


class Condition:
    """An integer condition such as ``i % 3 == 2``: integers, names, + - * // %, comparisons, and/or/not, True/False.

    Raises:
        ValueError: the text is anything else.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tree = _parse(text)
        self.names: set[str] = set()
        self._check(self._tree)

    def __call__(self, names: Mapping[str, int]) -> bool:
        """Whether the condition holds; False if it divides by zero. Raises KeyError for a name without a value."""
        try:
            return bool(self._value(self._tree, names))
        except ZeroDivisionError:
            return False

    def _check(self, node: ast.expr) -> None:
        match node:
            case ast.Constant(value=int()):
                return
            case ast.Name():
                self.names.add(node.id)
                return
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                children = [node.left, node.right]
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not()):
                children = [node.operand]
            case ast.BoolOp():
                children = node.values
            case ast.Compare() if all(type(op) in _COMPARISONS for op in node.ops):
                children = [node.left, *node.comparators]
            case _:
                raise ValueError(
                    f"condition {self.text!r}: {ast.unparse(node)!r} is not allowed; conditions must consist of "
                    "integers, names, + - * // %, comparisons, and/or/not, True and False"
                )
        for child in children:
            self._check(child)

    def _value(self, node: ast.expr, names: Mapping[str, int]) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[node.id]
            case ast.BinOp():
                return _ARITHMETIC[type(node.op)](self._value(node.left, names), self._value(node.right, names))
            case ast.UnaryOp():
                inner = self._value(node.operand, names)
                if isinstance(node.op, ast.Not):
                    return not inner
                return -inner if isinstance(node.op, ast.USub) else inner
            case ast.BoolOp():
                values = (self._value(each, names) for each in node.values)
                return all(values) if isinstance(node.op, ast.And) else any(values)
            case ast.Compare():
                left = self._value(node.left, names)
                for op, right_node in zip(node.ops, node.comparators, strict=True):
                    right = self._value(right_node, names)
                    if not _COMPARISONS[type(op)](left, right):
                        return False
                    left = right
                return True
        raise AssertionError(f"unchecked node {ast.dump(node)}")


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"an expression must have at most {MAX_LENGTH} characters, got {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not an expression") from None
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    raise ValueError(f"expression {text!r} must be nested at most {MAX_DEPTH} levels deep")
