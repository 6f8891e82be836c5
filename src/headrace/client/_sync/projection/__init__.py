"""Projections of events into databases, and aggregates that are folded from them."""
