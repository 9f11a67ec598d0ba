"""How many tokens a call will take: counting the input, estimating the output."""

from ._counting import ApproximateCounter, HuggingFaceCounter, TiktokenCounter, TokenCounter
from ._historical import HistoricalEstimator
from ._output import MaxTokensEstimator, OutputEstimate, OutputEstimator, TaskEstimator
from ._scores import EstimateKey, EstimateStatistics

__all__ = [
    "ApproximateCounter",
    "EstimateKey",
    "EstimateStatistics",
    "HistoricalEstimator",
    "HuggingFaceCounter",
    "MaxTokensEstimator",
    "OutputEstimate",
    "OutputEstimator",
    "TaskEstimator",
    "TiktokenCounter",
    "TokenCounter",
]
