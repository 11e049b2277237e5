r"""Reads mathematics that a model wrote: latex2sympy runs in the sandbox, and its result comes out as data.

The process that reads the text knows nothing but that text. It answers in JSON, from which load() builds sympy's
objects again: numbers, symbols and sympy's classes by name, and no text that anything would evaluate.

tidy() writes in plain LaTeX what latex2sympy misreads or does not know. It reads `12\,345` as 12 + 345, `2 3` as 5,
`1.6e-19` with Euler's e, `x'` as x, `\Gamma` as \gamma, and `I` as i.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
from latex2sympy2_extended import logic, sets
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, convert_to_pct, latex2sympy, normalize_latex
from math_verify import LatexExtractionConfig, parse
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy.core.function import AppliedUndef

SECONDS = 5  # for one text; math-verify's default, too
WARM = [
    *(r"\frac{1}{2}", r"\sqrt{2}x^2+3", r"\{1, -2\}", r"[0, \infty)", "x = 2", "1,000", "0.5 %", "2*3^4"),
    *(r"\begin{pmatrix}1\\2\end{pmatrix}", r"\text{a}", r"1 < x \le \pi", "(1,2)"),
]
OWN = {"FiniteSet": sets.FiniteSet, "And": logic.And}  # math-verify's own classes; they keep the order
EAGER: tuple[Any, ...] = (  # they would simplify their arguments
    *(sympy.Add, sympy.Mul, sympy.Pow, sympy.Function, sympy.Rel, sympy.And, sympy.Or, sympy.Not, sympy.Max, sympy.Min),
    *(sympy.Union, sympy.Intersection, sympy.Complement, sympy.MatAdd, sympy.MatMul, sympy.MatPow),
)
NORMAL = LatexExtractionConfig().normalization_config  # math-verify's: units, malformed operators
CASE = ConversionConfig(lowercase_symbols=False)  # R is not r; math-verify's default lowers both
SPACE = r"\\(?:[,;:! ]|thinspace )|[~\s]|\{(?:,|\\,)\}"  # between the digits of a number
UNICODE = str.maketrans({"×": r"\times ", "·": r"\cdot ", "÷": "/", "±": r"\pm "})
UNICODE |= str.maketrans({"∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∈": r"\in "})
UNICODE |= str.maketrans({"€": "", "£": "", "¥": "", "≈": r"\approx ", "π": r"\pi ", "∖": r"\setminus "})
UNICODE |= str.maketrans({"°": r"^\circ ", "∅": r"\emptyset ", "√": r"\sqrt ", "ℝ": r"\mathbb{R}", "∩": r"\cap "})
UNIT = rf"(?<=[\w)}}\].%])(?:{SPACE})*\\(?:text|mathrm|mbox|textrm)\{{[^{{}}]*\}}(?:\^\{{?\d\}}?)?[.\s]*$"
UNIT += r"|(?<=[\d}])\s+[a-z]{4,}(?: [a-z]{2,})*[.\s]*$"  # 5\text{ cm}^2, 5 square feet
ARGUMENT = r"\s*(?:\{([^{}]+)\}|(\\[a-zA-Z]+|[a-zA-Z0-9]))"
TIDY: list[tuple[str, str | Callable[[re.Match], str]]] = [
    (r"[¼½¾⅐-⅞]", lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("⁄", "/")),
    (rf"^(?:{SPACE})+|(?:{SPACE}|(?<!\.)[.,;:]|\\)+$", ""),
    (r"\\[bB]igg?[lrm]?(?![a-zA-Z])|(?<!\\)\\[()]|\\(?:limits|left\.|right\.)", ""),
    (r"^\s*(?:=|\\approx(?![a-zA-Z]))", ""),
    (r"[⁺⁻⁰¹²³⁴-⁹]+", lambda found: f"^{{{unicodedata.normalize('NFKC', found[0]).replace('−', '-')}}}"),
    (r"\*\*", "^"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"\\\{ ?[a-z](?: ?\\in ?\\mathbb\{R\})? ?(?:\\mid|\||:) ?([^{}|:]*)\\\}", r"\1"),  # {x | x > 1}
    (r"\\(?:d|t|c|s|nice|x)frac", r"\\frac"),
    (
        rf"\\[td]?(frac|binom){ARGUMENT}{ARGUMENT}",
        lambda found: "\\{}{{{}}}{{{}}}".format(*filter(None, found.groups())),
    ),
    (r"\{([^{}]*)\\over([^{}a-zA-Z][^{}]*)\}", r"\\frac{\1}{\2}"),
    (rf"\\(?:varnothing|O)(?![a-zA-Z])|\\\{{(?:{SPACE})*\\\}}", r"\\emptyset"),
    (r"^\\text\{(-?[\d.,/]*\d) [a-zA-Z ]+\}$", r"\1"),  # \text{5 cm}
    (r"\\(?:mathbb|Bbb) ?\{?([A-Z])\}?", r"\\mathbb{\1}"),
    (r"\\langle", "("),
    (r"\\rangle", ")"),
    (r"\\lbrace", r"\\{"),
    (r"\\rbrace", r"\\}"),
    (r"\\(?:degree|degrees)(?![a-zA-Z])", r"^\\circ"),
    (r"\^\{?\\circ ?\}? ?[CF]$", ""),
    (r"\\Gamma(?![a-zA-Z(])", r"\\mathcal{Gamma}"),
    (r"(?<![a-zA-Z\\])(?<!text\{)(?<!rm\{)I(?![a-zA-Z(])", r"\\mathcal{I}"),
    (r"(?<=[a-zA-Z])(?:'|\^\{?\\prime\}?)", r"_{prime}"),
    (r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm|it)|mbox|bm|boldsymbol)\{([^{}a-zA-Z]*)\}", r"\1"),  # \text{5}
    (
        r"(?<![\d._^])[1-9]\d{0,2}((?:" + SPACE + r")+)\d{3}(?:\1\d{3})*(?!\d)",
        lambda found: re.sub(r"\D", "", found[0]),
    ),
    (r"(?<=\d)\.\d{3}(?:\\[,;:! ]\d{3})*\\[,;:! ]\d{1,3}(?!\d)", lambda found: "." + re.sub(r"\D", "", found[0])),
    (r"(?<![\d.,])[1-9]\d{0,2}(?:,(?:\\! ?)?\d{3})+(?!,?\d)", lambda found: _thousands(found)),
    (r"(\d*)\.(\d*)(?:(?<=\.)\(|\\(?:overline|bar|dot) ?\{?)(\d+)[)}]?", lambda found: _repeating(*found.groups(""))),
    (r"(\d*)\.(\d*?)(\d{1,6})\3{2,}(?:\\[lc]?dots|…|\.\.\.)", lambda found: _repeating(*found.groups(""))),
    (r"(?<![\d./^_])(\d+)(?:" + SPACE + r")+(\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),  # 2 1/2
    (r"(\d\.\d+|(?<!\d)1)e([+-]?\d+)|(?<=\d)e(\d+)", lambda found: re.sub("e", "E", found[0])),
]


def _thousands(found: re.Match) -> str:
    """12,345 is one number, but not in (12,345) or {12,345}."""
    before = found.string[: found.start()]
    inside = len(re.findall(r"[(\[]|\\\{", before)) > len(re.findall(r"[)\]]|\\\}", before))
    return found[0] if inside else re.sub(r"\D", "", found[0])


def _repeating(whole: str, digits: str, period: str) -> str:
    r"""0.1\overline{6} as a fraction."""
    value = int((whole + digits + period) or 0) - int((whole + digits) or 0)
    return rf"\frac{{{value}}}{{{'9' * len(period)}{'0' * len(digits)}}}"


def tidy(text: str) -> str:
    text = text.translate(UNICODE)
    for pattern, replacement in TIDY:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def elements(text: str) -> list[str]:
    """The parts of a text between commas that are in no brackets."""
    depth, parts = 0, [""]
    for token in re.findall(r"\\?.", text, re.DOTALL):
        depth += (token in ("(", "[", "{", "\\{")) - (token in (")", "]", "}", "\\}"))
        parts = [*parts, ""] if token == "," and depth == 0 else [*parts[:-1], parts[-1] + token]
    return parts


def plus_minus(text: str) -> str:
    r"""1 \pm a as the list 1 + a, 1 - a; in a list or set for each element."""
    opened, inner, closed = re.fullmatch(r"(\\\{)?(.*?)(\\\})?", text, re.DOTALL).groups("")
    parts = []
    for part in elements(inner):
        signs = (("+", "-"), ("-", "+")) if re.search(r"\\(pm|mp)(?![a-zA-Z])", part) else (("", ""),)
        parts += [re.sub(r"\\mp(?![a-zA-Z])", down, re.sub(r"\\pm(?![a-zA-Z])", up, part)) for up, down in signs]
    return opened + ",".join(parts) + closed


def plain(text: str, units: bool = True) -> str:
    r"""LaTeX that latex2sympy reads as meant. With `units`, 5 m and 5\text{ m} become 5, but not 2 + 3 m."""
    # only the last \text: normalize_latex would remove all from the first, of 2\text{ hours }30\text{ minutes}
    text, is_sum = tidy(re.sub(UNIT, "", text) if units else text), re.search(r"[\w})]\s*[-+]", text)
    return normalize_latex(text, replace(NORMAL, units=units and not is_sum))


def latex(text: str, units: bool = True):
    """The value of a LaTeX answer: a sympy object, the list of the values of `1, 2`, or, without a value, plain text.

    Raises TimeoutException.
    """
    text = plain(text, units)
    try:
        return _value(text)
    except Exception:  # noqa: BLE001 latex2sympy raises Exception
        return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # 2 3 is not 23


def _value(text: str):
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return sympy.Float(text) if "." in text else sympy.Integer(int(text))
    if re.search(r"\\(pm|mp)(?![a-zA-Z])", text):
        return _value(plus_minus(text))
    if re.search(rf"(?<![_^\d])\d+(?:{SPACE})+\d", text):
        raise ValueError("two numbers side by side")
    if percent := re.fullmatch(r"([^%]*[^%\\\s])\s*\\?%", text):
        return convert_to_pct(_value(percent[1]))
    try:
        value = latex2sympy(text, is_real=True, normalization_config=None, conversion_config=CASE)
    except Exception:  # latex2sympy raises no other
        if not (last := text.rpartition("=")[2]) or last == text:
            raise
        return _value(last)  # P(X = 2) = 0.3
    is_list = isinstance(value, sets.FiniteSet) and not text.startswith(("{", "\\{"))
    return list(value._unsorted_args) if is_list else value


def read(argument: list) -> list:
    """[text, whether it is a LaTeX answer; else a response in which math-verify finds one] to the possible values, as
    dump() writes them. Runs in the sandbox."""
    text, is_answer = argument
    try:
        return [dump(value) for value in timeout(SECONDS)(_of_answer if is_answer else _of_response)(text)]
    except TimeoutException:
        return []


def _of_answer(text: str) -> list:
    has_units = plain(text) != plain(text, units=False)
    return [latex(text), latex(text, units=False)] if has_units else [latex(text)]


def _of_response(text: str) -> list:
    text = re.sub(r"(?<=\d)(?:\\,|\{,\})(?=\d{3}(?!\d))", "", re.sub(*TIDY[0], text))
    found = parse(text, parsing_timeout=None)
    if not (found and isinstance(found[-1], str)):
        return found[:1]
    factors = re.findall(rf"(?<![\d.,]){re.escape(found[-1])}(?!\d)([xyzniπ]\b|√|:\d)?", text)
    if re.fullmatch(r"[\d.,]+", found[-1]) and factors and all(factors):
        return []  # math-verify takes 2 from 2x, 2π, 2√3, 2:3
    is_percent = isinstance(found[0], sympy.Mul) and found[0].has(sympy.UnevaluatedExpr) and "%" not in found[1]
    value = latex(found[-1] + r"\%" * is_percent)  # math-verify has read it without case and tidy()
    return found[:1] if isinstance(value, str) else [value]


def warm() -> None:
    """Reads some texts first, so that every process of the sandbox starts with all imports and caches."""
    for text in WARM:
        read([text, True])
        read([f"${text}$", False])


def dump(value):
    """A text, a sympy object or a list of them as JSON: the text, [class, arguments], or [kind, its parts]."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ["list", [dump(part) for part in value]]
    if isinstance(value, sympy.MatrixBase):
        return ["matrix", [[dump(item) for item in row] for row in value.tolist()], list(value.shape)]
    name = type(value).__name__
    if isinstance(value, sympy.Rational):
        return ["rational", f"{value.p}/{value.q}"]
    if isinstance(value, sympy.Float):
        return ["float", [int(part) for part in value._mpf_], value._prec]
    if isinstance(value, sympy.Symbol):
        return ["symbol", value.name, {key: bool(is_) for key, is_ in value.assumptions0.items()}]
    if isinstance(value, AppliedUndef):
        return ["function", name, [dump(part) for part in value.args]]
    if type(value) is OWN.get(name):
        return ["own", name, [dump(part) for part in value._unsorted_args]]
    if not isinstance(value, sympy.Basic):
        raise TypeError(f"math-verify found a {name}")
    return [name, [dump(part) for part in value.args]]


def load(data):
    """The inverse of dump: the same classes, with their arguments in the same order. Nothing is simplified.

    Raises ValueError, TypeError, and what sympy's classes raise on arguments that do not fit.
    """
    if isinstance(data, str):
        return data
    kind, *rest = data
    match kind:
        case "list":
            return [_expression(part) for part in rest[0]]
        case "rational":
            return sympy.Rational(*map(int, str(rest[0]).split("/")))
        case "float":
            return sympy.Float._new(tuple(map(int, rest[0])), int(rest[1]), zero=False)
        case "symbol":
            return sympy.Symbol(str(rest[0]), **{str(key): bool(is_) for key, is_ in rest[1].items()})
        case "matrix":
            return sympy.Matrix(*rest[1], [_expression(item) for row in rest[0] for item in row])
        case "function":
            return sympy.Function(str(rest[0]))(*map(_expression, rest[1]))
        case "own":
            return OWN[rest[0]](*map(_expression, rest[1]), evaluate=False)
    arguments = [_expression(part) for part in rest[0]]
    if not arguments and isinstance(constant := getattr(sympy.S, kind, None), sympy.Basic):
        return constant  # Pi, Exp1, Infinity, EmptySet, Reals, BooleanTrue
    cls = getattr(sympy, kind, None)
    if not (isinstance(cls, type) and issubclass(cls, sympy.Basic)):
        raise ValueError(f"sympy has no class {kind!r}")
    return cls(*arguments, evaluate=False) if issubclass(cls, EAGER) else cls(*arguments)


def _expression(data):
    value = load(data)
    if isinstance(value, str | list):  # sympy would evaluate a text
        raise ValueError("a text or a list within an expression")
    return value
