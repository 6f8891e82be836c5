"""Topics and subscriptions as tables, and statements over them."""
