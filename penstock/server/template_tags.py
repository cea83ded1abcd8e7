"""Tags of chat templates that Jinja does not have. The package jinja2 is imported with this module."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, which marks answers for training: what is inside is written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
