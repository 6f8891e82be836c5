"""Leased subscriptions: messages handed out one by one, in the order the reader chose, when the writer chose."""
