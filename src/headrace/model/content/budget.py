"""The budget of steps that bounds how long a content query takes for one message."""

from typing import Any

from headrace.model.limits import CONTENT_STEPS_MAX


class OverBudget(Exception):  # a signal between evaluator and matcher, not an error of users
    """The evaluation of a content query has used up its steps."""


class Evaluation:
    """One evaluation of a query: the document's root, and the steps that are left."""

    __slots__ = ("left", "root")

    def __init__(self, root: Any, left: int = CONTENT_STEPS_MAX) -> None:
        self.root = root
        self.left = left

    def spend(self, steps: int) -> None:
        """Use up steps; ends the evaluation when there are not enough."""
        self.left -= steps
        if self.left < 0:
            raise OverBudget
