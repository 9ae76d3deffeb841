"""docs/flags.md and ggpipe/api/keywords.py are what the table of options says."""

from __future__ import annotations

from ggpipe.options.table import OPTIONS
from scripts import keywords
from scripts.flag_reference import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run scripts/flag_reference"


def test_the_keywords_are_up_to_date() -> None:
    assert keywords.MODULE.read_text() == keywords.module(), "run scripts/flag_reference"


def test_each_flag_is_on_the_page() -> None:
    text = PAGE.read_text()
    for row in OPTIONS:
        for flag in (name.strip() for flags in row.flags for name in flags.split("/") if name.strip()):
            assert f"`{flag}" in text, flag
