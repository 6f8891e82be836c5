"""Subjects: publishing, live subscriptions, requests and responders."""
