"""The class that every error of Headrace derives from."""

from typing import Any, ClassVar


class HeadraceError(Exception):
    """Something went wrong in Headrace."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, text: str | None = None, **details: Any) -> None:
        super().__init__(text or " ".join((type(self).__doc__ or "").split()))
        self.details = details
        """What a program may want to know besides the text, such as the offsets there are."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by class, text and attributes: constructors differ, and a wrong guess loses the error."""
        return restored_error, (type(self), self.args), self.__dict__.copy()


def restored_error(kind: type[HeadraceError], args: tuple[Any, ...]) -> HeadraceError:
    """An error of that class without a call of its constructor; its attributes follow."""
    error = kind.__new__(kind, *args)
    error.args = args  # OSError's __new__ leaves them to its __init__
    return error
