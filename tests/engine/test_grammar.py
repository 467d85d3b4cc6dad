"""Grammars over a real vocabulary: what they allow is drawn, what they do not is not."""

import numpy as np
import pytest

from lqs._engine import Grammar, GrammarError, SamplerProbe

OK, NO_CANDIDATE, GRAMMAR = 0, 2, 3


@pytest.fixture(scope="module")
def model(default_model):
    return default_model


def write(model, grammar: Grammar, seed: int = 0, **options) -> str:
    """The text that a grammar makes of noise."""
    probe = SamplerProbe(model.n_vocab, grammar=grammar, seed=seed, **options)
    rng = np.random.default_rng(seed)
    tokens = []
    for position in range(64):
        row = rng.standard_normal(model.n_vocab).astype(np.float32)
        code, token, _ = probe.draw(row, position)
        assert code == OK
        if token in model.eog:
            break
        assert probe.accept(token) == OK
        tokens.append(token)
    return model.detokenize(tokens).decode()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"top_k": 40},
        {"top_k": 1000, "top_p": 0.9},
        {"min_p": 0.2},
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_way_to_draw_keeps_to_the_grammar(model, options, seed):
    grammar = Grammar(model, 'root ::= "yes" | "no" | "perhaps"')
    assert write(model, grammar, seed, **options) in {"yes", "no", "perhaps"}


def test_the_allowed_best_is_drawn_though_it_is_far_down(model):
    (token,) = model.tokenize(b"yes", False, False)
    grammar = Grammar(model, 'root ::= "yes"')
    row = np.zeros(model.n_vocab, np.float32)
    row[token] = -30
    other = [i for i in range(model.n_vocab) if i != token]
    row[other] += np.arange(len(other), dtype=np.float32) / len(other)
    before = row.copy()
    probe = SamplerProbe(
        model.n_vocab,
        grammar=grammar,
        temperature=0,
        banned=model.tokenize(b"y", False, False) + model.tokenize(b"ye", False, False),
    )
    assert probe.draw(row, 0)[:2] == (OK, token)
    assert np.array_equal(row, before)


def test_one_prototype_serves_many_sequences(model):
    grammar = Grammar(model, 'root ::= "a" [0-9] [0-9]')
    assert [write(model, grammar, seed)[:1] for seed in range(3)] == ["a", "a", "a"]


def test_a_grammar_that_is_done_allows_the_end_of_the_turn_only(model):
    grammar = Grammar(model, 'root ::= "a"')
    (token,) = model.tokenize(b"a", False, False)
    probe = SamplerProbe(model.n_vocab, grammar=grammar, temperature=0)
    strict = SamplerProbe(model.n_vocab, grammar=grammar, temperature=0, banned=list(model.eog))
    for each in (probe, strict):
        assert each.accept(token) == OK
    row = np.zeros(model.n_vocab, np.float32)
    assert probe.draw(row, 1)[1] in model.eog
    assert strict.draw(row, 1)[0] == NO_CANDIDATE
    assert probe.accept(min(model.eog), True) == OK


def test_a_token_against_the_grammar_is_a_code_and_not_the_end_of_the_process(model):
    probe = SamplerProbe(model.n_vocab, grammar=Grammar(model, 'root ::= "a"'))
    assert probe.accept(model.tokenize(b"z", False, False)[0]) == GRAMMAR


@pytest.mark.parametrize(
    "gbnf",
    ["", " ", "root ::= (", 'start ::= "a"', "root ::= other", 'root ::= root | "a"', 'root ::= "a"\0', "root ::= *"],
)
def test_a_text_that_is_no_grammar_blames_the_caller(model, gbnf):
    with pytest.raises(GrammarError):
        Grammar(model, gbnf)
