"""The public names, for type checkers and for `shoal.lazy`, which imports each on first use."""

from shoal.models.build import MODELS as MODELS
from shoal.models.build import build_model as build_model
from shoal.models.dcn import DcnV2 as DcnV2
from shoal.models.deepfm import DeepFm as DeepFm
from shoal.models.dlrm import Dlrm as Dlrm
from shoal.models.inputs import Inputs as Inputs
from shoal.models.interactions import fm as fm
from shoal.models.interactions import pair_dots as pair_dots
from shoal.models.mlp import Mlp as Mlp
from shoal.models.two_tower import TwoTower as TwoTower
