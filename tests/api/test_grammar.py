"""Grammars as they are read before the native parser reads them."""

import contextlib

import pytest

from lqs.api.ambiguity import CHARACTER, Rules
from lqs.api.grammar import SLACK_MAX, WIDTH_MAX, check_grammar
from lqs.errors import BadRequest

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws   # any value
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def refusal(grammar: str) -> str:
    with pytest.raises(BadRequest) as caught:
        check_grammar(grammar)
    return caught.value.message


def test_what_is_read_is_all_that_is_handed_on():
    """Case B63: a carriage return ends a comment for llama.cpp too, so nothing hides behind it."""
    read = check_grammar('root ::= # one\r a\t"x y" | b # two\na ::= [a-z]+\nb::="b"{2,3}')
    assert read == '\nroot ::= a "x y" | b \na ::= [a-z] + \nb ::= "b" {2,3}\n'
    assert "deeper" in refusal("root ::= #\r" + "(" * 30_000 + '"a"' + ")" * 30_000)
    assert "rules" in refusal('root ::= "a" #' + "".join(f'\rr{i} ::= "a"' for i in range(2000)))


def test_the_grammar_of_json_is_accepted():
    assert check_grammar(JSON).count("::=") == 7


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= (x|y)*\nx ::= " + " | ".join(f'[a-z]* "{i}"' for i in range(3000)) + '\ny ::= "y"',
        "root ::= " + " | ".join(f'"{i}"' for i in range(WIDTH_MAX + 1)),
    ],
    ids=range(2),
)
def test_a_grammar_that_branches_too_much_would_stop_everybody(grammar):
    """Case B63: each way in which a text could go on is tried for every token, by the worker."""
    assert f"more than {WIDTH_MAX} ways" in refusal(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + "a? " * 20_000 + '\na ::= "x"',
        "root ::= " + "a " * 2000 + '\na ::= "x" |',
        "root ::= " + "b " * 20 + "\nb ::= " + "a " * 20 + '\na ::= "x" |',
        'root ::= (("a"?){10}){100}',
        "root ::= ([a-z]?){60}",
        "root ::= (" + "[a-z]* " * 12 + "){3}",
        'root ::= "x" ([a-z] | y)*\ny ::= ' + "z " * (SLACK_MAX + 1) + '\nz ::= [a-z]* | "1"?',
    ],
    ids=range(7),
)
def test_many_parts_in_a_row_that_may_be_empty_would_stop_everybody(grammar):
    """Case B63: the characters of a token are spread over them in every way there is, for every token."""
    assert f"more than {SLACK_MAX} parts" in refusal(grammar)


@pytest.mark.parametrize("grammar", ["root ::= ([a-z]?){12}", 'root ::= [0-9]{0,200} ([a-z]{0,50} "-")*'])
def test_a_few_such_parts_and_a_bounded_repetition_are_fine(grammar):
    assert check_grammar(grammar)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= root | "a"', 'root ::= a\na ::= b? a "x"\nb ::= "b"', 'root ::= a\na ::= b\nb ::= root "x"'],
    ids=range(3),
)
def test_a_rule_that_begins_with_itself_is_refused(grammar):
    assert "begins with itself" in refusal(grammar)


def test_recursion_behind_a_character_is_fine():
    assert check_grammar('root ::= "(" root ")" | "x"')


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= a {" + " " * 65_000,
        "root ::= a {" + " " * 30_000 + "," + " " * 30_000,
        "root ::= " + "a" * 65_000,
        'root ::= "' + "\\a" * 30_000,
        "root ::= " + "a " * 30_000 + '\na ::= "x" |',
        "".join(f"r{i} ::= r{i + 1}\n" for i in range(900)) + 'r900 ::= "a"',
    ],
    ids=range(6),
)
def test_no_text_is_looked_at_twice(grammar):
    """A reader that steps back would take minutes for these: quadratic or cubic in 64 KiB."""
    with contextlib.suppress(BadRequest):
        assert check_grammar(grammar).startswith("\nr")


def test_widths_are_sums_over_alternatives_and_over_parts_that_may_be_empty():
    rules = Rules()
    rules.begin("root")
    for _ in range(3):
        rules.add(CHARACTER)
        rules.repeat(0, 1)
    rules.add(CHARACTER)
    rules.alternative()
    rules.add(CHARACTER)
    rules.begin("twice")
    rules.add(rules.named("root"))
    rules.repeat(2, 2)
    assert rules.width()[0] == 5
