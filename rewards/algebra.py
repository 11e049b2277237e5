"""Parses algebra that a model wrote into a sympy expression. Nothing of it is run.

sympy's own parse_expr uses Python's eval(), which reaches every name, attribute and function of Python.
"""

import ast
import operator
import re
from collections.abc import Callable

import sympy

LONGEST = 2000  # characters
CHARACTERS = re.compile(r"[\w\s.+\-*/()]*", re.ASCII)  # no comments, no strings
MAX_BITS = 4096  # bits of a power of numbers
ELEMENTARY = "sqrt exp log ln Abs sign sec csc sin cos tan cot asin acos atan acot sinh cosh tanh asinh acosh atanh"
FUNCTIONS = {name: getattr(sympy, name) for name in ELEMENTARY.split()} | {"abs": sympy.Abs}
CONSTANTS = {"pi": sympy.pi, "E": sympy.E}
OPERATORS: dict[type[ast.AST], Callable] = {ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg}
OPERATORS |= {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def algebra(text: str) -> sympy.Expr:
    """The expression. It may have numbers, symbols, pi, E, + - * / **, parentheses and the functions above, each with
    one argument.

    A decimal becomes an exact fraction. Raises ValueError on any other text, and on a power with too many digits.
    """
    if len(text) > LONGEST or not CHARACTERS.fullmatch(text):
        raise ValueError(f"not algebra, or more than {LONGEST} characters")
    try:
        return _expression(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:  # MemoryError: nested too deeply
        raise ValueError(str(error)) from None


def _expression(node: ast.AST) -> sympy.Expr:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and abs(value) < 1e300:
            return sympy.Rational(str(value))
        case ast.Name(id=name) if re.fullmatch(r"[A-Za-z]\w{0,20}", name) and name not in FUNCTIONS:
            return CONSTANTS.get(name) or sympy.Symbol(name)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_expression(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            left, right = _expression(left), _expression(right)
            of_numbers = isinstance(op, ast.Pow) and left.is_Rational and right.is_Rational
            if of_numbers and max(left.p.bit_length(), left.q.bit_length()) * abs(right) > MAX_BITS:
                raise ValueError("a power with too many digits")
            return OPERATORS[type(op)](left, right)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](_expression(argument))
    raise ValueError(f"{ast.unparse(node)!r} is not algebra")
