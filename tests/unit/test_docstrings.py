"""Docstrings are divided into parts, and every public name has the parts that the reference shows."""

from scripts import docstrings

DOCUMENTED = """Publish a message.

    More about it.

    Parameters:
        topic: where it goes; a long
            explanation.
        **settings: others.

    Returns:
        Where it is.

    Raises:
        TopicNotFound: if there is none.
        headrace.Timeout: if it takes long.

    Example:
        >>> publish("a")
        1
    """


def test_a_docstring_is_divided_into_its_parts() -> None:
    found = docstrings.parse(DOCUMENTED)
    assert found.summary == "Publish a message.\n\nMore about it."
    assert found.parameters == {"topic": "where it goes; a long explanation.", "settings": "others."}
    assert found.returns == "Where it is."
    assert list(found.raises) == ["TopicNotFound", "headrace.Timeout"]
    assert found.example == '>>> publish("a")\n1'


def test_lines_with_param_are_parameters_too() -> None:
    found = docstrings.parse(
        "Read it.\n\n    :param offset: where.\n    :param until: how far,\n        at most.\n    "
    )
    assert found.parameters == {"offset": "where.", "until": "how far, at most."}


def test_parts_that_are_missing_are_found() -> None:
    def undocumented(offset: int) -> int:
        """Do something."""
        return offset

    def quiet(offset: int) -> None:
        """Do something.

        Parameters:
            offset: where.

        Raises:
            LookupError: if there is none.
        """

    def lacking(function: object) -> list[str]:
        return list(docstrings._lacking("f", function, docstrings.parse(function.__doc__)))  # type: ignore[arg-type]

    assert lacking(undocumented) == ["parameters", "returns", "raises"]
    assert lacking(quiet) == []


def test_public_names_have_all_parts() -> None:
    lines = [f"{name}: {', '.join(parts)}" for name, parts in sorted(docstrings.missing_parts().items())]
    assert not lines, "add these parts to the docstrings:\n" + "\n".join(lines)
