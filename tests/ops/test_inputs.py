"""Rules for every op: argument names, what counts as a tensor, dtypes, and where gradients end."""

import inspect

import pytest
import torch

from shoal import Ragged, ops

SIGNATURES = {
    "slot_v1": "f",
    "slot_v2": "f",
    "make_v1": "slot, sig",
    "make_v2": "slot, sig",
    "v1_to_v2": "f",
    "split_by_indices": "indices, tensor, num_splits",
    "ragged_split_by_indices": "indices, num, num_splits",
    "reorder_by_indices": "input, shard_ids, num_of_shards",
    "fused_reorder_by_indices": "inputs, num_of_shards, dim_sizes, rank0_empty_shard=None",
    "unique_key_with_value_and_offset": "key, dims, generate_buffer=True",
    "fill_with_offset_map": "pos, value, value_offset_map, value_buffer, dims",
    "fill_with_offset_map_gradient": "pos, grad, value_offset_map, dims",
    "finalize_shared_tensor": "shared_tensor_handles, dtype, shape",
    "map_id_to_embedding": "ids, embeddings, input, use_multi_threads=True",
    "map_id_to_embedding_gradient_back_prop": "ids, input, grads",
    "gather_embeddings_by_input": "ids, embeddings, input, use_multi_threads=False",
    "gather_embeddings_by_ids_gradient_back_prop": "ids, grads, index_mapping",
    "fused_gather_embeddings_by_input": "fused_embeddings, fused_embedding_offsets, embedding_dims",
    "fused_gather_embeddings_by_input_gradient": (
        "fused_embeddings_size, grads, embedding_offsets, embedding_dims, scale=1"
    ),
    "reduce_sum": "id_indices, id_values, id_length, name=None",
    "reduce_mean": "id_indices, id_values, id_length, name=None",
    "reduce_sqrtn": "id_indices, id_values, id_length",
    "fused_sorted_segment_sum": "indices, values, shapes",
    "fused_reduce_sum_and_split": "id_indices, id_values, id_length, split_dims, name=None",
    "fused_reduce_and_split_gpu": "splits, embeddings, slice_dims, name=None",
    "fused_value_rowids": "rt",
    "normalize_merged_split": "row_split, row_split_size",
    "aligned_flat_concat": "inputs, scale=1.0",
    "aligned_flat_split": "inputs, flat",
    "fused_embedding_to_layout": (
        "embeddings_list, fid_list_row_split, fid_offset, feature_offset, nfl_offset, batch_size, variant_type,"
        " feature_cfgs, ps_num, fid_list_emb_row_lenth=None, nfl_size=None, feature_size=None, fid_size=None,"
        " emb_size=None, parallel_flag=0, version=3"
    ),
    "fused_embedding_to_layout_grad": (
        "nfl_offset, feature_offset, fid_offset, batch_size, embeddings_list, fid_list_row_split, layout_tensors_grad,"
        " variant_type, feature_cfgs, ps_num, fid_list_emb_row_lenth=None, layout_tensors_grad_scale=None,"
        " parallel_flag=0, version=3"
    ),
    "nest_layout": "feature_cfgs, tensors",
    "flatten_layout": "feature_cfgs, nested",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_specified_names_order_and_defaults(name):
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    plain = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ", ".join(p.name + ("" if p.default is p.empty else f"={p.default}") for p in plain) == SIGNATURES[name]


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def float32(*values):
    return torch.tensor(values, dtype=torch.float32)


def test_results_are_float32_whatever_the_default_dtype(float64_by_default):
    (rows,) = ops.fused_gather_embeddings_by_input(float32(0, 1, 2, 3), [[2, 0]], [2])
    unique = ops.unique_key_with_value_and_offset([[8, 5, 8]], [2])
    handle = ops.fill_with_offset_map([[0, 1]], float32(1, 2, 3, 4), unique.value_offset, unique.value_buffer, [2])
    buffer = ops.finalize_shared_tensor([handle], torch.float32, [None])
    config = ops.FeatureConfigs(
        {"a": ops.FeatureConfig("t", 0, [2])},
        {"v": ops.OutConfig([ops.SliceConfig("a", 0, 2)], 0, [[-1, 2]])},
    )
    (layout,) = ops.fused_embedding_to_layout([[5, 6]], None, [0], [0], [0], 1, "example", config, 1)
    for got, want in (
        (rows, [[2, 3], [0, 1]]),
        (buffer, [1, 2, 3, 4, 1, 2]),
        (layout, [[5, 6]]),
        (ops.reduce_sum([[1]], [[7]], [2]), [[0], [7]]),
        (ops.fused_gather_embeddings_by_input_gradient(2, [], [], []), [0, 0]),
        (ops.aligned_flat_concat([]), []),
    ):
        assert got.dtype == torch.float32
        assert got.tolist() == want


def test_an_empty_list_stands_for_rows_of_the_width_that_is_known():
    assert ops.map_id_to_embedding([[5], []], [[[1, 2]], []], [5]).tolist() == [[1, 2]]
    sums = ops.fused_sorted_segment_sum([[0, 2], []], [[[1], [2]], []], [[3, 1], [2, 2]])
    assert [s.tolist() for s in sums] == [[[1], [0], [2]], [[0, 0], [0, 0]]]
    assert [s.tolist() for s in ops.fused_reduce_sum_and_split([], [], 1, [1, 2])] == [[[0]], [[0, 0]]]
    assert [s.tolist() for s in ops.fused_reduce_and_split_gpu([[0, 0]], [[]], [[1, 2]])] == [[[0]], [[0, 0]]]
    assert ops.fused_gather_embeddings_by_input_gradient(2, [[], [[3.0]]], [[], [1]], [2, 1]).tolist() == [0, 3]


@pytest.mark.parametrize("dims", [[1.5], [None], 3, "x"], ids=str)
def test_widths_are_whole_numbers(dims):
    with pytest.raises(ValueError, match="dim_sizes must be a list of ints"):
        ops.fused_reorder_by_indices([[1]], 2, dims)
    with pytest.raises(ValueError, match="num_splits"):
        ops.split_by_indices([0], [1.0], 1.5)


@pytest.mark.parametrize("scale", [0.5, [0.5], torch.tensor(0.5), torch.tensor([[0.5]])], ids=str)
def test_a_scale_is_a_number_or_a_tensor_of_one(scale):
    assert ops.aligned_flat_concat([[2.0]], scale)[:2].tolist() == [1, 0]
    assert ops.fused_gather_embeddings_by_input_gradient(2, [[[4.0]]], [[1]], [1], scale).tolist() == [0, 2]
    with pytest.raises(ValueError, match="scale must be one number"):
        ops.fused_gather_embeddings_by_input_gradient(2, [[[4.0]]], [[1]], [1], [1.0, 2.0])


def test_a_width_beyond_the_buffer_is_refused_before_memory_is_taken():
    with pytest.raises(ValueError, match="more than the buffer's 4 floats"):
        ops.fused_gather_embeddings_by_input(torch.zeros(4), [[0]], [2**45])
    assert ops.fused_gather_embeddings_by_input(torch.zeros(4), [[]], [8])[0].shape == (0, 8)


def test_rows_with_a_pending_conjugation_or_sign_are_split_as_they_read():
    values = torch.tensor([1 + 2j, 3 - 4j, 5 + 6j])
    first, second = ops.split_by_indices([1, 0, 1], values.conj(), 2)
    assert first.tolist() == [3 + 4j]
    assert second.tolist() == [1 - 2j, 5 - 6j]
    (only,) = ops.split_by_indices([0], values[:1].conj().imag, 1)
    assert only.tolist() == [-2]


def test_no_gradient_flows_where_none_is_specified():
    rows = torch.ones(3, 2, requires_grad=True)
    offsets = ops.unique_key_with_value_and_offset([[8, 5, 8]], [2]).value_offset
    for out in (
        ops.reorder_by_indices(rows, [0, 0, 0], 1)[0],
        ops.gather_embeddings_by_ids_gradient_back_prop([1, 2], rows, [0, 1, 1]),
        *ops.map_id_to_embedding_gradient_back_prop([[1, 2]], [1, 2, 2], rows),
        ops.fused_gather_embeddings_by_input_gradient(4, [rows], [[0, 1, 2]], [2]),
        ops.fill_with_offset_map_gradient([[0, 1]], rows.flatten(), offsets, [2]),
    ):
        assert not out.requires_grad


SECOND = {
    "split_by_indices": lambda x: ops.split_by_indices([0, 1, 0], x, 2)[0],
    "fused_gather": lambda x: ops.fused_gather_embeddings_by_input(x, [[0, 1]], [2])[0],
    "reduce_mean": lambda x: ops.reduce_mean([[0], [1], [0]], x, [2]),
    "fused_reduce_and_split": lambda x: ops.fused_reduce_and_split_gpu([[0, 2, 3]], [x], [[1, 1]])[0],
    "FirstN": lambda x: ops.FirstN(2).combine(Ragged.from_lists([[1, 2], [3]]), x),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_derivative_raises_where_it_would_be_wrong(name):
    x = torch.randn(3, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(SECOND[name](x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        grad.sum().backward()


def test_what_was_made_in_inference_mode_serves_in_training():
    key, rows = Ragged.from_lists([[1, 2], [3]]), torch.ones(3, 2, requires_grad=True)
    with torch.inference_mode():
        ops.ReduceSum().combine(key, rows)
        unique = ops.unique_key_with_value_and_offset([[8, 5, 8]], [1])
    ops.ReduceSum().combine(key, rows).sum().backward()
    assert rows.grad.tolist() == [[1, 1]] * 3
    value = torch.ones(2, requires_grad=True)
    handle = ops.fill_with_offset_map([[0, 1]], value, unique.value_offset, unique.value_buffer, [1])
    ops.finalize_shared_tensor([handle], torch.float32, [None]).sum().backward()
    assert value.grad.tolist() == [2, 1]
