"""How fast Headrace is, beside others that do the same."""
