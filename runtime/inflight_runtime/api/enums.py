"""The closed sets of the custom resource. Each lists what works in this release and nothing else.

They repeat the sets of :mod:`inflight_runtime.config.roles` (the resource is one contract, the roles' files another);
rendering one into the other is where mypy refuses a value that only one side knows.
"""

from __future__ import annotations

from typing import Literal

ServerDtype = Literal["auto", "float32", "bfloat16"]
TrainerPrecision = Literal["auto", "float32", "bfloat16"]
OverlongPrompt = Literal["skip", "fail"]
LossKind = Literal["reinforce_tis", "ppo"]
Normalization = Literal["token_sum_per_sequence", "sequence_mean", "token_mean", "group_mean", "constant"]
Baseline = Literal["leave_one_out", "mean"]
OverAge = Literal["keep", "mask", "drop"]
ZeroVariance = Literal["keep", "drop", "refill"]
Transport = Literal["auto", "gloo", "nccl"]
KvCache = Literal["keep", "recompute"]
InferenceEngine = Literal["vllm", "reference"]
TrainerEngine = Literal["single", "fsdp2", "deepspeed"]
ZeroStage = Literal[1, 2, 3]
Schedule = Literal["constant", "linear", "cosine"]
OnDelete = Literal["Retain", "Delete"]
OnFailure = Literal["keep", "delete"]
AccessMode = Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]
Phase = Literal["Pending", "Starting", "Running", "Suspending", "Suspended", "Completing", "Succeeded", "Failed"]
ConditionStatus = Literal["True", "False", "Unknown"]
