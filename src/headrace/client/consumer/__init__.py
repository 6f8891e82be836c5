"""Consuming: fetching, group membership, subscriptions, runners."""
