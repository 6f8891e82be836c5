"""The middleware `compress`: stores batches compressed, however producers send them."""

from collections.abc import Mapping
from typing import Any

from headrace.model.codec import Codec
from headrace.model.middleware import Middleware, check_choice, check_options


class CompressMiddleware(Middleware):
    """Compresses the batches of a topic; small ones are compressed together with others that arrive with them."""

    needs = ()
    inline = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_options(options, {"codec": str})
        self.codec = Codec[check_choice("codec", options.get("codec", "zstd"), ("lz4", "zstd")).upper()]
