"""How many tokens a call will take: counting the input, estimating the output."""

from ._historical import HistoricalEstimator
from ._output import MaxTokensEstimator, OutputEstimate, OutputEstimator, TaskEstimator
from ._scores import EstimateKey, EstimateStatistics

__all__ = [
    "EstimateKey",
    "EstimateStatistics",
    "HistoricalEstimator",
    "MaxTokensEstimator",
    "OutputEstimate",
    "OutputEstimator",
    "TaskEstimator",
]
