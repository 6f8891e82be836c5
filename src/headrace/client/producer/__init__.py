"""Publishing: how a message gets from the caller to the broker, and its receipt back.

The accumulator adds each message to the open batch of its partition, and owns that batch as long as it is open. A batch
is sealed when it is full, has lingered, holds an urgent message or is flushed; from then on the partition sender owns
it, and nobody else adds to it, moves it or resends it. The partition sender numbers its batches and decides which of
them are in flight; the sender encodes a batch and queues it on the connection, in one call for a batch that can go at
once. The connection keeps nothing of a batch but the callback for its answer. The answer goes straight to the sender,
which has the partition sender drop the batch, resolves the outcome for which the caller waits, and uses the capacity
for batches that wait, or else takes the open batch from the accumulator. A batch that is refused or whose connection
breaks stays with its partition sender, which has it sent again in order, until it is stored or its deadline passes.
"""
