"""The shared words of Headrace: messages, batches, errors and limits."""
