"""Options that are lists of texts of one form."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import Complaints, RangeError


class Pattern(NamedTuple):
    """What each text of an option must look like."""

    argument: str
    text: re.Pattern[str]
    rule: str

    def check(self, function: str, given: Iterable[str]) -> None:
        """Raise RangeError for the texts that do not."""
        complaints = Complaints(function)
        for one in given:
            if not self.text.fullmatch(one):
                complaints.add(RangeError, self.argument, self.rule, repr(one))
        complaints.raise_any()
