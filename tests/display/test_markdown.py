"""Markdown that is laid out block by block as it comes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.screen import texts

from ggpipe.display.live.markdown import MarkdownStream

LONG = " ".join(["word"] * 30)
TEXT = f"""# Title

Some **bold** text
in two lines.

1. one

   more of it
2. two

```python
x = 1

y = 2
```

{LONG}
"""


def stream() -> MarkdownStream:
    return MarkdownStream(Console(width=80, force_terminal=True, no_color=True, markup=False))


def shown(of: MarkdownStream) -> str:
    return "\n".join(line.rstrip() for line in "".join(segment.text for segment in of.complete).split("\n"))


def laid_out(*parts: str, thoughts: str = "") -> str:
    own = stream()
    own.feed(thoughts, plain=True)
    for part in parts:
        own.feed(part)
        own.take()
    own.end()
    own.take()
    assert texts(own.rows(80, 5)) == [""]
    return shown(own)


def test_a_text_is_laid_out() -> None:
    lines = laid_out(TEXT).splitlines()
    assert lines[:4] == ["Title", "", "Some bold text", "in two lines."]
    assert lines[4:9] == ["", " 1 one", "   more of it", " 2 two", ""]
    assert lines[9:12] == [" x = 1", "", " y = 2"]
    assert (len(lines), max(map(len, lines)) <= 80) == (15, True)


def test_a_block_is_shown_as_it_comes_until_it_is_whole() -> None:
    own = stream()
    own.feed("One *em*\n\nTwo *em*")
    own.take()
    assert shown(own) == ""
    assert texts(own.rows(80, 9)) == ["One *em*", "", "Two *em*"]
    own.feed("\nthree\n")
    own.take()
    assert shown(own) == "One em\n"
    assert texts(own.rows(80, 9)) == ["", "Two *em*", "three", ""]
    assert texts(own.rows(80, 2)) == ["three", ""]
    assert "".join(segment.text for segment in own.rest()) == "One em\nTwo *em*\nthree\n"


def test_reasoning_stays_as_it_is() -> None:
    assert laid_out("*yes*", thoughts="# hm\n*no*") == "# hm\n*no*\n\nyes\n"


BLOCKS = st.sampled_from(
    ["# a", "para", "two\nlines", "- a\n- b", "1. a\n\n   b", "```\ncode\n\nmore\n```", "```", "> q",
     "| a |\n|---|\n| 1 |", "", "---", "    indented", "*em", "<b>", "\t"]
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(BLOCKS, max_size=6), st.sampled_from(["\n", "\n\n"]), st.lists(st.integers(0, 150), max_size=6))
def test_how_it_comes_changes_nothing(blocks: list[str], between: str, cuts: list[int]) -> None:
    text = between.join(blocks)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    assert laid_out(*(text[a:b] for a, b in pairwise(places))) == laid_out(text)
