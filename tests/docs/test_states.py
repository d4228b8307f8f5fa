"""The diagrams of states in docs/architecture.md are those of the code."""

from .states import DOCUMENT, written


def test_the_diagrams_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text()
    assert text == written(text), "run: python -m tests.docs.states"
