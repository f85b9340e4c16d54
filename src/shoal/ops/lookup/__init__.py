"""From ids to embeddings."""

from shoal.ops.lookup.op import (
    gather_embeddings_by_ids_gradient_back_prop,
    gather_embeddings_by_input,
    map_id_to_embedding,
    map_id_to_embedding_gradient_back_prop,
)

__all__ = [
    "gather_embeddings_by_ids_gradient_back_prop",
    "gather_embeddings_by_input",
    "map_id_to_embedding",
    "map_id_to_embedding_gradient_back_prop",
]
