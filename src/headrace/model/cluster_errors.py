"""Errors of clusters and of the stores that they share; `model/errors.py` has their names."""

from headrace.model.headrace_error import HeadraceError

IN_DOUBT_TEXT = "what was asked may or may not have happened; connect again, and look before you repeat it"
"""What an error says that comes after a request was begun and before it was committed."""


class NotServing(HeadraceError):
    """This node does not serve: another node of the cluster does, or none at the moment. Nothing was done."""

    code = "not_serving"
    retryable = True


class Fenced(HeadraceError):
    """The node has lost its shard while it worked on the request, and nobody knows whether that took effect."""

    code = "fenced"


class StoreUnavailable(HeadraceError):
    """The shared store did not answer, or answered with a failure; whether it did what was asked is unknown."""

    code = "store_unavailable"
    retryable = True


class StoreUnqualified(HeadraceError):
    """The shared store does not keep a promise that a cluster needs, so no node serves on it."""

    code = "store_unqualified"


class StoreWentBack(HeadraceError):
    """The shared store has an earlier state than this node has seen, such as after a restore from a backup."""

    code = "store_went_back"
