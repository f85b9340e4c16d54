"""Modules that people write models with."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "shoal.nn.bag": ("HashEmbeddingBag",),
        "shoal.nn.collection": ("EmbeddingBagCollection",),
        "shoal.nn.clip": (
            "clip_grad_norm",
            "clip_grad_value",
        ),
        "shoal.nn.combiners": (
            "Combiner",
            "FirstN",
            "ReduceMean",
            "ReduceSum",
        ),
        "shoal.nn.dcp": ("load_dcp",),
        "shoal.nn.embedding": ("HashEmbedding",),
        "shoal.nn.optimizer": ("SparseOptimizer",),
        "shoal.nn.protocol": ("EmbeddingTable",),
    },
)
