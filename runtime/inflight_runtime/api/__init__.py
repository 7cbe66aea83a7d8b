"""The custom resource ``RLTrainingJob`` (``inflight.dev/v1alpha1``): its models, and how a job file is read.

Imports pydantic and PyYAML and nothing else, so that the operator and ``inflight validate`` stay light.
"""

from .errors import JobError, Problem, show
from .job import API_VERSION, KIND, MAX_NAME_LENGTH, Metadata, RLTrainingJob, RLTrainingSpec
from .loading import load_job, parse_job, validate_job
from .status import JobStatus

__all__ = [
    "API_VERSION",
    "KIND",
    "MAX_NAME_LENGTH",
    "JobError",
    "JobStatus",
    "Metadata",
    "Problem",
    "RLTrainingJob",
    "RLTrainingSpec",
    "load_job",
    "parse_job",
    "show",
    "validate_job",
]
