"""The runtime of Inflight: what runs in the pods of an RLTrainingJob, and locally under `inflight run`."""
