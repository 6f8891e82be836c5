"""Leased subscriptions: requesting, holding, prefetching and settling leases."""
