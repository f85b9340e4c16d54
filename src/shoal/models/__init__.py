"""Ready-made click models over rows of a table: DeepFM, DLRM, DCN-v2, two towers, or a module of yours."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "shoal.models.build": (
            "MODELS",
            "build_model",
        ),
        "shoal.models.dcn": ("DcnV2",),
        "shoal.models.deepfm": ("DeepFm",),
        "shoal.models.dlrm": ("Dlrm",),
        "shoal.models.inputs": ("Inputs",),
        "shoal.models.interactions": (
            "fm",
            "pair_dots",
        ),
        "shoal.models.mlp": ("Mlp",),
        "shoal.models.two_tower": ("TwoTower",),
    },
)
