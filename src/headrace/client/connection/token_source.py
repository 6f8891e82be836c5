"""The token that a client authenticates with: given, or read from a file whenever a connection is made."""

import os
from typing import TypeGuard

from headrace.client.connection.environment import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from headrace.model.arguments import shown
from headrace.model.errors import Forbidden, HeadraceError, InvalidArgument, NotAuthenticated
from headrace.wire.native import Hello

BEARER = "bearer"
_TOKEN_BYTES_MAX = 16 << 10


class TokenSource:
    """Where the token comes from. It never shows the token itself."""

    def __init__(self, token: str = "", path: str = "") -> None:
        self._token = token
        self._path = path

    def __repr__(self) -> str:
        return f"TokenSource({'***' if self._token else self._path or 'none'})"

    def __bool__(self) -> bool:
        return bool(self._token or self._path)

    def greeting(self, hello: Hello) -> Hello:
        """The first frame of a new connection; a file is read again, as its token may have been replaced."""
        token = self._token or (_read(self._path) if self._path else "")
        if not token:
            return hello
        fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
        return Hello(**{**fields, "mechanism": BEARER, "credentials": token.encode()})


NO_TOKEN = TokenSource()


def token_source(token: object = None, token_file: object = None, addressed_file: str = "") -> TokenSource:
    """The token that is given, or that of a file, or that of the address's file; else those of the environment."""
    if token is not None and token_file is not None:
        raise InvalidArgument("give token or token_file, not both")
    if token is not None:
        return TokenSource(_checked(token, "token"))
    if token_file is not None:
        if not isinstance(token_file, str | os.PathLike):
            raise InvalidArgument(f"token_file is a path, not {shown(token_file)}")
        return TokenSource(path=os.fspath(token_file))
    if addressed_file:
        return TokenSource(path=addressed_file)
    if os.environ.get(TOKEN_VARIABLE):
        return TokenSource(_checked(os.environ[TOKEN_VARIABLE], f"${TOKEN_VARIABLE}"))
    return TokenSource(path=os.environ.get(TOKEN_FILE_VARIABLE, ""))


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return _checked(file.read(_TOKEN_BYTES_MAX), f"the token in {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the token file {path} cannot be read: {error}; give another with token_file") from error


def _checked(token: object, what: str) -> str:
    """The token without white space around it; errors never show it."""
    text = token.strip() if isinstance(token, str) else ""
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidArgument(
            f"{what} is empty or no token: it is one word, such as `headrace auth token create` prints"
        )
    return text


def is_refusal(error: HeadraceError | None) -> TypeGuard[HeadraceError]:
    """Whether a broker refuses the client itself: waiting for a connection does not help."""
    return isinstance(error, NotAuthenticated | Forbidden)
