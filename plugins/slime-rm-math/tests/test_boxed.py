import pytest

from slime_rm_math.boxed import last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ {a}{b{c}} } tail }", "{a}{b{c}}"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"$\boxed 5$ apples", "5"),
        (r"$\boxed 1 + 2$", "1 + 2"),
        (r"\boxed 5 is it", "5"),
        (r"\boxed 5.", "5"),
        (r"\boxed\frac12", r"\frac12"),
        (r"\fbox{7}", "7"),
        (r"\fbox{7} \boxed{8} \fbox{9}", "8"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        # Escaped braces are no braces.
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\}", r"a \\"),
        # A box that is cut off hides the earlier ones.
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed", None),
        (r"\boxed ", None),
        (r"\boxed{", None),
        (r"\boxed{\}", None),
        # Other commands, and none at all.
        (r"\boxedtext{5}", None),
        (r"\boxedtext{5} \boxed{6} \boxedtext{7}", "6"),
        ("boxed{5}", None),
        ("", None),
        ("\\boxed{\U0001d7d9 é 数}", "\U0001d7d9 é 数"),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize("text", [r"\boxed{" * 50_000, r"\boxed{" + "{" * 10**6, r"\boxedx" * 100_000, "\\" * 10**6])
def test_gigantic_texts_take_linear_time(text: str) -> None:
    # Quadratic time would take minutes.
    assert last_boxed(text) is None
