"""Grammars are refused in one line where libllama would end the process, or would not come back."""

from __future__ import annotations

import time

import pytest
from support.grammars import GRAMMARS

from ggpipe.errors import UsageError
from ggpipe.text.grammar.gbnf import check

CHAIN = "\n".join(f'r{i} ::= r{i + 1} "x" | r{i + 1} "y"' for i in range(40))

LONG_CHAIN = "\n".join(f"r{i} ::= r{i + 1}" for i in range(5000))


@pytest.mark.parametrize("name", GRAMMARS)
def test_good_grammars_are_taken(name: str) -> None:
    check(GRAMMARS[name].grammar)


@pytest.mark.parametrize(
    "text", ['root ::= ("a"?)*', 'root ::= ((("a"?)*)?)+ "b"', "root ::=", 'root ::= ""', 'root ::= [a-z-] "-"']
)
def test_odd_grammars_are_taken(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no rule 'root'"),
        ('a ::= "b"', "no rule 'root'"),
        ("root ::= a", "line 1: there is no rule 'a'"),
        ('root ::= "a', "line 1: a quote or bracket is not closed"),
        ("root ::= [a-", "line 1: a quote or bracket is not closed"),
        ('root ::= "a"\nroot2 := "b"', "line 2: '::=' must follow the name 'root2'"),
        ('root = "a"', "line 1: '::=' must follow the name 'root'"),
        ('"x" ::= "a"', "line 1: expected the name of a rule"),
        ("root ::= *", "line 1: '*' has nothing to repeat"),
        ('root ::= ""+', "line 1: '+' has nothing to repeat"),
        ('root ::= "a"{5,3}', "line 1: {5,3} is not a valid range"),
        ('root ::= "a"{x}', "line 1: write a repetition as"),
        ('root ::= "a"{2001}', "line 1: more than 2000 repetitions"),
        ('root ::= (("a" | "b"){0,100}){0,100}', "line 1: nested repetitions"),
        ('root ::= "\\q"', "line 1: '\\\\q' is not an escape"),
        ('root ::= "\\x1"', "is not an escape"),
        ('root ::= ("a"', "line 1: ')' is missing"),
        ('root ::= "a")', "line 1: ')' is not allowed here"),
        ('root ::= "a"\n | "b"', "line 2: expected the name of a rule"),
        ("root ::= " + "(" * 100_000, "more than 200 parentheses"),
        ('root ::= root "x" | "y"', "line 1: rule 'root' begins with itself"),
        ('root ::= a\na ::= ("b" | a) "c"', "line 2: rule 'a' begins with itself"),
        ('root ::= b a\nb ::= c\nc ::= "x"?\na ::= b a "x" | "y"', "line 4: rule 'a' begins with itself"),
        (f'root ::= r0\n{CHAIN}\nr40 ::= "z"', "ways to its first character"),
        (f'root ::= r0\n{LONG_CHAIN}\nr5000 ::= "z"', "begin with each other"),
        ('root ::= "' + "x" * 300_000 + '"', "more than 200000 characters"),
        ('root ::= "' + "x" * 2_000_000 + '"', "more than 1000000 characters"),
        ('root ::= "a" <think>', "line 1: tokens as in <think>"),
        ("root ::= !<[7]>", "line 1: tokens as in <think>"),
        ('root ::= "a\0"', "NUL"),
        ('root ::= "\udc80"', "not UTF-8"),
    ],
)  # fmt: skip
def test_bad_grammars_are_refused_in_one_line(text: str, why: str) -> None:
    start = time.process_time()
    with pytest.raises(UsageError) as caught:
        check(text)
    assert str(caught.value).startswith("`grammar` is not a grammar in GBNF: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 20
