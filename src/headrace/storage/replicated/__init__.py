"""The replicated disk: a local disk whose changes are in a shared store before they count."""
