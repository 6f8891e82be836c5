"""Who may do what: security definitions, the decision about a request, and tokens."""
