"""The actor: leases groups, plays the environment against the inference servers, hands in what came out.

An environment needs only the names exported here.
"""

from inflight_runtime.actor.environments import (
    Answer,
    Environment,
    HfDatasetProblems,
    JsonlProblems,
    Messages,
    PromptTooLongError,
    Reward,
    SingleTurnEnvironment,
)
from inflight_runtime.actor.loading import EnvironmentLoadError, load_environment

__all__ = [
    "Answer",
    "Environment",
    "EnvironmentLoadError",
    "HfDatasetProblems",
    "JsonlProblems",
    "Messages",
    "PromptTooLongError",
    "Reward",
    "SingleTurnEnvironment",
    "load_environment",
]
