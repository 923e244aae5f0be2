import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from slime_rm_math.answer import equal
from slime_rm_math.normal_form import normal_form


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac{1}2", r"\frac{1}{2}"),
        (r"\tfrac1{23}", r"\frac{1}{23}"),
        ("1/2", r"\frac{1}{2}"),
        ("½", r"\frac{1}{2}"),
        (r"\frac{-1}{2}", r"-\frac{1}{2}"),
        (r"\frac{-1}{-2}", r"\frac{1}{2}"),
        ("-1/2", r"-\frac{1}{2}"),
        ("1,234,567", "1234567"),
        (r"1{,}234", "1234"),
        (r"1\,234", "1234"),
        (r"1\!,\!234", "1234"),
        ("1 234", "1234"),
        ("1 2", "1 2"),
        ("12,34", "12,34"),
        ("2.50", "2.5"),
        ("2.0", "2"),
        (".5", "0.5"),
        ("-.50", "-0.5"),
        ("-0", "0"),
        ("007", "7"),
        ("+3", "3"),
        ("１２", "12"),
        ("−3", "-3"),
        ("5.", "5"),
        ("{5}", "5"),
        ("{{5}}", "5"),
        ("{1}{2}", "{1}{2}"),
        ("$5$", "5"),
        (r"\(5\)", "5"),
        (r"\[ 5 \]", "5"),
        (r"\$1,234.50", "1234.5"),
        ("€5", "5"),
        (r"50\%", "50"),
        ("50%", "50"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        ("90°", "90"),
        (r"5\text{ cm}", "5"),
        (r"5 \mathrm{cm}^2", "5"),
        ("5 cm", "5"),
        ("5 cm²", "5"),
        ("5 square units", "5"),
        ("12 miles per hour.", "12"),
        (r"2\pi\text{ cm}", r"2\pi"),
        (r"\frac{3}{4}\text{ inches}", r"\frac{3}{4}"),
        # Not units.
        ("5 million", "5million"),
        (r"5\text{ million}", "5million"),
        (r"5 \text{ or } 6", "5or6"),
        ("2 xy", "2xy"),
        (r"x\text{ cm}", "xcm"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\textbf{\text{(B)}}", "(B)"),
        (r"\left( 1, 2 \right]", "(1,2]"),
        (r"\left. x \right|_{0}", "x|_0"),
        (r"\displaystyle\sum", r"\sum"),
        (r"x\leq 3", r"x\le3"),
        (r"\pi x", r"\pi x"),
        ("2pi", r"2\pi"),
        ("sqrt(2)", r"\sqrt{2}"),
        ("√2", r"\sqrt{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("x²", "x^2"),
        ("x^{2}", "x^2"),
        ("x^{10}", "x^{10}"),
        ("x¹²", "x^{12}"),
        ("1 × 2", r"1\times2"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ('"yes"', "yes"),
        ("", ""),
        ("$", ""),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert normal_form(text) == normal


EQUAL = [
    ("5", "5"),
    ("5.0", "5"),
    ("1,000", "1000"),
    ("x=5", "5"),
    ("5", "x = 5"),
    (r"5\text{ cm}", "5"),
    ("5", r"5\text{ cm}"),
    (r"\frac{1}{2}", "1/2"),
    ("0.5", r"\frac{1}{2}"),
    ("1/2", "0.5"),
    (r"3\frac{1}{2}", "7/2"),
    ("0.333333", "1/3"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("1+x", "x+1"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"2\cos^2 x - 1", r"\cos 2x"),
    ("(1, 2)", "(1,2)"),
    (r"(0.5,\sqrt{8})", r"(\frac12, 2\sqrt2)"),
    ("((1,2),(3,4))", "((1, 2), (3, 4))"),
    (r"\left(-\infty, 3\right]", r"(-\infty,3]"),
    (r"\{2,1\}", r"\{1,2\}"),
    ("2,1", "1,2"),
    ("Evelyn", r"\text{evelyn}"),
    ("Yes", "yes"),
    (r"\text{(B)}", "B"),
    (r"50\%", "50"),
    (r"50\%", "0.5"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("√8", r"2\sqrt{2}"),
]

UNEQUAL = [
    ("6", "5"),
    ("", "5"),
    ("5", ""),
    ("$", "$"),
    ("-5", "5"),
    # An integer label needs an integer in digits.
    ("4/2", "2"),
    (r"\sqrt{4}", "2"),
    ("1+1", "2"),
    ("10^2", "100"),
    ("2.5", "2"),
    ("5 million", "5"),
    ("5 or 6", "5"),
    # A fraction is compared with a fraction as text.
    ("2/4", "1/2"),
    (r"\frac{2}{4}", r"\frac12"),
    ("(2/4,1)", "(1/2,1)"),
    ("-1/2", "1/2"),
    # Tuples.
    ("(1,2)", "[1,2]"),
    ("[1,2)", "[1,2]"),
    ("(2,1)", "(1,2)"),
    ("(1,2,3)", "(1,2)"),
    ("1,2", "(1,2)"),
    ("(4/2,1)", "(2,1)"),
    ("(1,2)", "5.5"),
    # Others.
    ("y=5", "x=5"),
    ("nylevE", "Evelyn"),
    ("Eve", "Evelyn"),
    ("x", "y"),
    ("x+1", "x-1"),
    (r"\sqrt{2}", r"\sqrt{3}"),
    ("0.333", "1/3"),
    ("garbage {{{", r"\sqrt{2}"),
]


@pytest.mark.parametrize(("answer", "label"), EQUAL)
def test_equal(answer: str, label: str) -> None:
    assert equal(answer, label, max_symbolic_chars=256)


@pytest.mark.parametrize(("answer", "label"), UNEQUAL)
def test_unequal(answer: str, label: str) -> None:
    assert not equal(answer, label, max_symbolic_chars=256)


def test_outside_of_the_main_thread() -> None:
    # Where math-verify's own time limits would raise.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(equal, r"\sqrt{8}", r"2\sqrt{2}", max_symbolic_chars=256).result()


def test_long_answers_are_compared_as_text() -> None:
    assert not equal("1+x", "x+1", max_symbolic_chars=2)
    assert equal("1+x", "1 + x", max_symbolic_chars=0)
    assert equal("x" * 10**6, "x" * 10**6, max_symbolic_chars=256)
    assert not equal("5" + " " * 10**6 + "6", "5", max_symbolic_chars=256)


# Where none of the stricter rules applies, math-verify on the plain texts is the judge.
EXPRESSIONS = [
    r"\sqrt{12}",
    r"2\sqrt{3}",
    r"\frac{6}{\sqrt{3}}",
    "0.25",
    r"2^{-2}",
    r"\pi/2",
    r"\frac{\pi}{2}",
    r"\sin^2 x",
    r"1-\cos^2 x",
    "a^2-b^2",
    "(a-b)(a+b)",
    "x^2+x",
    "x(x+1)",
    r"e^{2x}",
    r"(e^x)^2",
    r"\{1,2,3\}",
    r"\{3,2,1\}",
    r"x \ge 3",
    r"3 \le x",
    "y=2x+1",
    "y-1=2x",
    r"3+4i",
    r"4i+3",
    r"\frac{x^2-1}{x-1}",
    "x+1",
]


@pytest.mark.parametrize("at", range(len(EXPRESSIONS)))
def test_agrees_with_math_verify(at: int) -> None:
    label, gold = EXPRESSIONS[at], parse(f"${EXPRESSIONS[at]}$")
    answers = [EXPRESSIONS[(at + offset) % len(EXPRESSIONS)] for offset in (-2, -1, 0, 1, 2)]
    expected = [verify(gold, parse(f"${answer}$")) for answer in answers]
    # Each expression is compared with an equal one and with unequal ones.
    assert 2 <= sum(expected) <= 4
    assert [equal(answer, label, max_symbolic_chars=256) for answer in answers] == expected


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "9^9^9^9",
        "9^{1000000000}",
        r"\frac{9^{9^{9}}}{9^{9^{9}}}",
        "(x+1)^{100000}",
        "100000!",
        "1000!!!",
        r"\binom{1000000}{500000}",
        r"\gcd(9^{9^{9}},3)",
        r"\sum_{n=1}^{1000000000} n",
        r"\prod_{n=1}^{1000000} n",
        r"\int_0^1 e^{-x^2} dx",
        "(" * 100 + "1" + ")" * 100,
        "{" * 100 + "1" + "}" * 100,
        "|x" * 60,
        "x^" * 100 + "1",
        r"\sqrt" * 40 + "2",
        r"\frac{1}{" * 25 + "x" + "}" * 25,
        "9" * 250,
        "7^{100} + 1",
        r"\infty^{\infty}",
        "1=1000000",
    ],
)
def test_what_could_take_for_ever_does_not(answer: str) -> None:
    # Each of these kept some stage of parsing or proving busy for seconds to hours.
    assert not equal(answer, r"\log(n)", max_symbolic_chars=256)
    assert not equal(answer, r"\sqrt{2}", max_symbolic_chars=256)


PIECES = [
    *("\\frac", "\\sqrt", "\\boxed", "\\text", "\\left", "\\right", "\\{", "\\}", "\\\\", "\\infty", "\\sin", "\\"),
    *"{}()[]^_=<,.$%129xe+-*/!|& \n",
    *("0.5", "pi", "é", "𝟙", "²", "½", "\x00", "−"),
]
LATEX = st.lists(
    st.sampled_from(PIECES),
    max_size=24,
).map("".join)


@given(LATEX, LATEX)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_answer_raises(answer: str, label: str) -> None:
    assert equal(answer, label, max_symbolic_chars=256) in (True, False)


@given(st.text(max_size=60), st.text(max_size=60))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_text_raises(answer: str, label: str) -> None:
    assert equal(answer, label, max_symbolic_chars=256) in (True, False)


def test_integers_do_not_import_sympy() -> None:
    code = (
        "import sys; from slime_rm_math.math import grade_boxed; "
        "assert grade_boxed('\\\\boxed{1,005}', ['1005'], max_symbolic_chars=256) == 1.0; "
        "assert grade_boxed('\\\\boxed{\\\\sqrt{3}}', ['1005'], max_symbolic_chars=256) == 0.0; "
        "print(sorted({'sympy', 'math_verify'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
