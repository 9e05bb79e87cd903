"""What optimizers do: who owns which storage, what only their steps change, and the gate."""
