"""One spelling for the many ways to write an answer in LaTeX or plain text."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from slime_rm_math.numeral import MAX_DIGITS, canonical
from slime_rm_math.unit import without_unit

# Before NFKC, which would turn x² into x2.
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SUPERSCRIPT_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑", "-"),
        **dict.fromkeys("·⋅∙", "\\cdot "),
        **dict.fromkeys("÷⁄∕", "/"),
        **dict.fromkeys("“”„", '"'),
        **dict.fromkeys("°£€¥", ""),
        "×": "\\times ",
        "√": "\\sqrt ",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "±": "\\pm ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "∈": "\\in ",
        "∅": "\\emptyset ",
    }
)

_SYNONYMS = {
    "dfrac": "\\frac",
    "tfrac": "\\frac",
    "cfrac": "\\frac",
    "leq": "\\le",
    "geq": "\\ge",
    "leqslant": "\\le",
    "geqslant": "\\ge",
    "neq": "\\ne",
    "lbrace": "\\{",
    "rbrace": "\\}",
    "lbrack": "[",
    "rbrack": "]",
    "varnothing": "\\emptyset",
    "ldots": "\\dots",
    "cdots": "\\dots",
}
# fmt: off
_INVISIBLE = frozenset((
    "left", "right", "middle", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr",
    "Biggl", "Biggr", "displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "nobreak",
    "mathstrut", "boxed", "fbox", "degree",
))
# fmt: on
# `\left.` and `\right.` show nothing at all.
_EMPTY_BRACKET = re.compile(r"\\(?:left|right)\s*\.")
_COMMAND = re.compile(r"\\([A-Za-z]+)\s*")
_SPACE_COMMAND = re.compile(r"(?<!\\)\\(?:[,;:> ]|q?quad(?![A-Za-z]))|~")
# Not the second backslash of a line break, as in the matrix row end `\\[`.
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]|\\?\$")
_DEGREES = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_FONT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|hbox|mathrm|mathbf|mathit|mathsf|operatorname)\*?\s*\{([^{}]*)\}"
)
_PLAIN_FUNCTION = re.compile(r"(?<![\\A-Za-z])(sqrt)\s*\(([^()]*)\)")
_PLAIN_CONSTANT = re.compile(r"(?<![\\A-Za-z])(pi)(?![A-Za-z])")
_SHORT_FRACTIONS = (
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([0-9A-Za-z])\s*(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"\\frac\s*\{([^{}]*)\}\s*([0-9A-Za-z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt\s*([0-9A-Za-z])"), r"\\sqrt{\1}"),
)
_SINGLE_SCRIPT = re.compile(r"([\^_])\s*\{\s*([0-9A-Za-z])\s*\}")
# A space must stay where it ends a command (\pi x) or parts two numbers (1 2).
_SPACE = re.compile(r"(?P<keep>(?<=[0-9])\s+(?=[0-9])|(?P<command>\\[A-Za-z]+)\s+(?=[A-Za-z]))|\s+")
_RATIO = re.compile(r"(-?)([0-9]+)/(-?)([0-9]+)")
_FRACTION = re.compile(r"(-?)\\frac\{(-?)([0-9]+)\}\{(-?)([0-9]+)\}")


@lru_cache(maxsize=4096)
def normal_form(text: str) -> str:
    """The answer with spelling that carries no meaning taken away; still valid LaTeX where `text` was.

    Gone are: math delimiters, sizing, spacing and font commands, units after a number, currency, percent and degree
    signs, thousands separators, needless zeros and braces, a full stop at the end. `a/b` of integers becomes
    `\\frac{a}{b}` with its sign in front. Remembered, since the answers of a group share a label and often each other.
    """
    text = plain_latex(text).replace("\\!", "").replace("{,}", ",")
    text = _EMPTY_BRACKET.sub("", _DEGREES.sub("", _SPACE_COMMAND.sub(" ", text)))
    text = _COMMAND.sub(_rename, text)
    text = text.replace("\\%", "").replace("%", "").strip()
    text = _without_fonts(without_unit(text)).strip()
    text = without_unit(text.rstrip(".,;:!\"' ").lstrip("\"' "))
    text = _PLAIN_CONSTANT.sub(r"\\\1 ", _PLAIN_FUNCTION.sub(r"\\\1{\2}", text))
    for pattern, replacement in _SHORT_FRACTIONS:
        text = pattern.sub(replacement, text)
    text = _SINGLE_SCRIPT.sub(r"\1\2", text)
    text = _SPACE.sub(_space, _unbraced(text))
    return canonical(text) or _fraction(text) or text


def plain_latex(text: str) -> str:
    """The same LaTeX without math delimiters, and with commands for Unicode's mathematical characters."""
    text = _SUPERSCRIPTS.sub(lambda match: f"^{{{match.group().translate(_SUPERSCRIPT_DIGITS)}}}", text)
    return _DELIMITER.sub("", unicodedata.normalize("NFKC", text).translate(_SYMBOLS))


def fraction_parts(normal: str) -> tuple[int, int] | None:
    """Top (with the sign) and bottom of a normal form that is one integer over another, of up to 100 digits each."""
    match = _FRACTION.fullmatch(normal)
    if match is None or max(len(match.group(3)), len(match.group(5))) > MAX_DIGITS:
        return None
    return int(match.group(1) + match.group(3)), int(match.group(5))


def is_fraction(normal: str) -> bool:
    """Whether a normal form is one integer over another."""
    return _FRACTION.fullmatch(normal) is not None


def _rename(match: re.Match[str]) -> str:
    name = match.group(1)
    if name in _INVISIBLE:
        return ""
    space = " " if match.group().endswith((" ", "\n", "\t")) else ""
    return _SYNONYMS.get(name, "\\" + name) + space


def _without_fonts(text: str) -> str:
    # Twice: fonts nest, \textbf{\text{A}}, but hardly deeper.
    return _FONT.sub(r"\1", _FONT.sub(r"\1", text))


def _unbraced(text: str) -> str:
    """Without braces around all of it."""
    while text.startswith("{") and text.endswith("}"):
        depth = 0
        for at, character in enumerate(text):
            depth += (character == "{") - (character == "}")
            if depth == 0 and at < len(text) - 1:
                return text
        if depth != 0:
            return text
        text = text[1:-1].strip()
    return text


def _space(match: re.Match[str]) -> str:
    if match.group("keep") is None:
        return ""
    return f"{match.group('command') or ''} "


def _fraction(text: str) -> str | None:
    if ratio := _RATIO.fullmatch(text):
        signs, top, bottom = ratio.group(1) + ratio.group(3), ratio.group(2), ratio.group(4)
    elif latex := _FRACTION.fullmatch(text):
        signs, top, bottom = latex.group(1) + latex.group(2) + latex.group(4), latex.group(3), latex.group(5)
    else:
        return None
    sign = "-" if len(signs) % 2 else ""
    return f"{sign}\\frac{{{top}}}{{{bottom}}}"
