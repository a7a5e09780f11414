"""Transport of messages between ranks, and of errors from one rank to all others."""
