"""Modules that people write models with."""

from shoal.nn.combiners import Combiner, FirstN, ReduceMean, ReduceSum

__all__ = ["Combiner", "FirstN", "ReduceMean", "ReduceSum"]
