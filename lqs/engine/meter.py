"""Puts meters into a parsed template: where it loops, builds, slices, compares and joins.

The meters are filters that the sandbox defines. No template can write their names itself, since they are
not identifiers.
"""

from __future__ import annotations

from typing import cast

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

EACH, BUILT, CONCAT = "each item", "built value", "joined text"


class Meter(NodeTransformer):
    """Puts a meter around every loop, literal collection, slice, comparison and `~` of a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _wrap(EACH, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _wrap(CONCAT, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        # A tuple on the left of an assignment is a list of names, not a value.
        return self._value(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _wrap(BUILT, node) if isinstance(node.arg, nodes.Slice) else node

    def _value(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _wrap(BUILT, node)

    visit_List = visit_Dict = visit_Compare = _value


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; a render passes it through."""

    tags = {"generation"}  # noqa: RUF012 Jinja declares it so.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _wrap(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)
