"""The public names, for type checkers and for `shoal.lazy`, which imports each on first use."""

from shoal.nn.bag import HashEmbeddingBag as HashEmbeddingBag
from shoal.nn.clip import clip_grad_norm as clip_grad_norm
from shoal.nn.clip import clip_grad_value as clip_grad_value
from shoal.nn.collection import EmbeddingBagCollection as EmbeddingBagCollection
from shoal.nn.combiners import Combiner as Combiner
from shoal.nn.combiners import FirstN as FirstN
from shoal.nn.combiners import ReduceMean as ReduceMean
from shoal.nn.combiners import ReduceSum as ReduceSum
from shoal.nn.configs import EmbeddingBagConfig as EmbeddingBagConfig
from shoal.nn.configs import EmbeddingConfig as EmbeddingConfig
from shoal.nn.embedding import HashEmbedding as HashEmbedding
from shoal.nn.optimizer import SparseOptimizer as SparseOptimizer
from shoal.nn.protocol import EmbeddingTable as EmbeddingTable
from shoal.nn.read.asked import Located as Located
from shoal.nn.sequences import EmbeddingCollection as EmbeddingCollection
from shoal.nn.state.dcp import load_dcp as load_dcp
