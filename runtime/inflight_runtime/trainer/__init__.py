"""The trainer: batches from the coordinator in, optimizer steps, weight versions and checkpoints out."""
