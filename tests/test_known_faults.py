"""An index of faults that tensor-parallel decoders have had: for each, the tests that show that it cannot happen here.

An entry is its number in the list of known faults, its kind, and tests by file and name; or the sentence that says why
the kind cannot arise. What no other file tests is tested at the end of this one.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from tiny_models import hub_config, parallel_model, transformers_model
from torch.utils._python_dispatch import TorchDispatchMode

from tp.generation import GenerationOptions, LanguageModel
from tp.kernels.fused_add_rms_norm import fused_add_rms_norm
from tp.kernels.rms_norm import rms_norm
from tp.layers.parameter import named_parts
from tp.models import CausalLM
from tp.parallel import TensorParallelGroup
from tp.training import clip_grad_norm_
from tp.training.data import TrainingBatch
from tp.training.train_step import Learner

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """A kind of fault, the tests of it, and, where part of it has no place here, why."""

    kind: str
    tests: tuple[str, ...]
    cannot_arise: str = ""


FAULTS = {
    1: Fault(
        "a model refused because its heads do not divide by the degree",
        ("test_partition.py::test_heads_of_all_ranks_are_each_head_once_and_kv_heads_exactly_those_read",
         "test_partition.py::test_qwen2_7b_on_eight_ranks",
         "test_partition.py::test_only_degrees_above_the_query_heads_are_refused",
         "test_parity.py::test_heads_that_do_not_divide_and_kv_heads_on_several_ranks",
         "test_known_faults.py::test_every_degree_of_fourteen_heads",
         "test_checkpoint_loading.py::test_a_degree_above_the_heads_is_refused_before_weights_are_looked_for",
         "test_launch_arguments.py::test_generate_refuses"),
    ),
    2: Fault(
        "a vocabulary that does not divide: refused, or its padding seen",
        ("test_layers.py::test_vocabulary_that_does_not_divide_is_padded_and_the_padding_never_seen",
         "test_parity.py::test_sharded_logits_are_the_whole_ones_split",
         "test_gradients.py::test_gradients_equal_those_of_one_rank_in_float64"),
    ),
    3: Fault(
        "fewer KV heads than ranks: cut within a head, and noticed in the middle of a forward or never",
        ("test_parity.py::test_heads_that_do_not_divide_and_kv_heads_on_several_ranks",
         "test_known_faults.py::test_decoding_where_kv_heads_are_on_several_ranks",
         "test_layers.py::test_fused_linears_hold_this_ranks_part_of_each"),
    ),
    4: Fault(
        "a global count taken from a shard, where heads are held more than once",
        ("test_parity_generation.py::test_the_cache_holds_this_ranks_heads_and_together_each_head_once",
         "test_checkpoint_loading.py::test_shared_kv_heads_keep_their_shape_in_the_file",
         "test_checkpoint_writer.py::test_degrees_come_and_go_and_no_bit_changes"),
    ),
    5: Fault(
        "a cut in the wrong place that trains another model without an error",
        ("test_train_step.py::test_twenty_adamw_steps_equal_those_of_one_rank",
         "test_known_faults.py::test_twenty_sgd_steps_differ_no_more_where_nothing_divides",
         "test_partition.py::test_features_go_in_blocks_and_the_remainder_mirrors_that_of_heads"),
    ),
    6: Fault(
        "a head_dim that is not hidden size by heads: assumed, or dropped when saved",
        ("test_config.py::test_head_dim_apart_from_hidden_size_is_kept",
         "test_parity.py::test_logits_of_batches_padded_on_either_side_and_of_prompts_alone",
         "test_checkpoint_writer.py::test_transformers_opens_what_is_saved"),
    ),
    7: Fault(
        "the bias of a row-parallel linear added once a rank",
        ("test_layers.py::test_row_parallel_bias_is_added_once_and_its_gradient_is_whole_on_every_rank",),
    ),
    8: Fault(
        "a bias divided by the degree, whose gradient is then too small",
        ("test_layers.py::test_row_parallel_bias_is_added_once_and_its_gradient_is_whole_on_every_rank",),
    ),
    9: Fault(
        "a fused q, k, v or gate and up, cut again as one block at another degree",
        ("test_checkpoint_writer.py::test_degrees_come_and_go_and_no_bit_changes",
         "test_layers.py::test_fused_linears_hold_this_ranks_part_of_each"),
    ),
    10: Fault(
        "the residual added on each rank before the reduction",
        ("test_residual_stream.py::test_layers_that_write_zero_are_the_identity_on_the_stream",
         "test_residual_stream.py::test_the_final_state_is_the_embedding_plus_every_write"),
    ),
    11: Fault(
        "padding of the vocabulary that wins, is drawn, or enters a normaliser",
        ("test_generation_sampling.py::test_padding_is_never_chosen_though_all_logits_are_negative",
         "test_cross_entropy.py::test_a_rank_without_columns_does_not_take_part_in_the_maximum"),
    ),
    12: Fault(
        "an odd vocabulary whose loss drifts away over a training run",
        ("test_train_step.py::test_an_odd_vocabulary_has_the_loss_of_one_rank_for_fifty_steps",),
    ),
    13: Fault(
        "weights of norms that differ between ranks under sequence parallelism",
        ("test_gradients.py::test_gradients_equal_those_of_one_rank_in_float64",
         "test_training_tools.py::test_replicas_stay_bitwise_equal_over_ten_adam_steps",
         "test_training_tools.py::test_a_replica_that_differs_is_named"),
    ),
    14: Fault(
        "gradients of replicated parameters averaged, or not reduced, or reduced again as they accumulate",
        ("test_gradients.py::test_three_micro_batches_equal_one_batch",
         "test_train_step.py::test_fsdp2_sees_finished_gradients",
         "test_training_tools.py::test_a_replica_that_differs_is_named"),
    ),
    15: Fault(
        "KV heads on several ranks, each training a copy of its own",
        ("test_gradients.py::test_gradients_of_kv_heads_on_several_ranks",),
    ),
    16: Fault(
        "a number of tokens that does not divide, fewer than ranks included",
        ("test_sequence_parallel.py::test_logits_equal_those_of_the_replicated_stream",
         "test_gradients.py::test_ranks_without_tokens_take_part_and_have_gradients",
         "test_gradients.py::test_gradients_equal_those_of_one_rank_in_float64"),
    ),
    17: Fault(
        "bfloat16 with and without sequence parallelism apart by more than rounding",
        ("test_sequence_parallel.py::test_bfloat16_logits_are_the_same_in_both_layouts",
         "test_train_step.py::test_bfloat16_gradient_norms_with_and_without_sequence_parallelism",
         "test_communicator.py::test_sums_accumulate_in_float32_and_round_once"),
    ),
    18: Fault(
        "whole logits taken for a shard by the loss",
        ("test_cross_entropy.py::test_a_known_value", "test_cross_entropy.py::test_whole_logits_are_refused_by_type"),
    ),
    19: Fault(
        "a collective in the forward whose backward is wrong by shards or by a factor",
        ("test_mappings.py::test_outputs_and_gradients_equal_the_dense_program",
         "test_mappings.py::test_gradcheck_against_finite_differences",
         "test_mappings.py::test_gather_along_the_last_dim"),
    ),
    20: Fault(
        "no valid label: 0/0, and its NaN on every rank",
        ("test_cross_entropy.py::test_no_valid_label_gives_zero_and_zero_gradients",
         "test_cross_entropy.py::test_the_mean_is_over_the_labels_of_all_data_parallel_ranks",
         "test_known_faults.py::test_a_step_without_labels_changes_nothing_that_matters"),
    ),
    21: Fault(
        "what several ranks hold counted several times in a gradient norm",
        ("test_training_tools.py::test_a_replicated_gradient_is_counted_once_and_all_are_scaled",
         "test_training_tools.py::test_shared_kv_heads_and_tied_embeddings_count_once"),
    ),
    22: Fault(
        "a norm that is right and a clip that scales nothing, or whole gradients made for it",
        ("test_training_tools.py::test_a_replicated_gradient_is_counted_once_and_all_are_scaled",
         "test_known_faults.py::test_clipping_makes_nothing_larger_than_a_shard"),
    ),
    23: Fault(
        "a dtype or a collective that the backend of an older build does not have",
        ("test_communicator.py::test_bfloat16_sum_of_one_and_two_is_three",
         "test_communicator.py::test_collectives_equal_the_sums_and_concatenations_of_one_process"),
        "gloo is asked for nothing but an exchange of bytes, which every version has; sums are our own",
    ),
    24: Fault(
        "a cast that is no copy, and an input that is written over in float32 alone",
        ("test_known_faults.py::test_norms_leave_what_they_read_alone",
         "triton_kernels/test_triton_norms.py::test_norm_of_three_and_four_leaves_its_input_alone",
         "triton_kernels/test_triton_norms.py::test_fused_add_norm_of_three_and_four"),
    ),
    25: Fault(
        "strides of one operand taken for those of another",
        ("test_known_faults.py::test_norms_take_views_of_any_strides",
         "triton_kernels/test_triton_norms.py::test_views_of_any_strides_equal_contiguous_ones_and_nothing_else_is_written",
         "test_native_kernels.py::test_linear_takes_any_strides_and_shapes"),
    ),
    26: Fault(
        "a backward that writes into the gradient that it was given",
        ("test_layers.py::test_rms_norm_backward_is_that_of_its_formula_and_leaves_its_inputs_alone",
         "test_layers.py::test_rms_norm_backward_of_three_and_four",
         "triton_kernels/test_triton_norms.py::test_gradient_of_three_and_four_with_two_consumers",
         "triton_kernels/test_triton_elementwise.py::test_silu_gradients_and_dy_only_read"),
    ),
    27: Fault(
        "rounding on the other side of the weight, or a weight that widens the stream",
        ("test_layers.py::test_rms_norm_has_the_rounding_points_of_transformers",
         "triton_kernels/test_triton_norms.py::test_norm_is_rounded_before_the_weight_and_its_statistics_are_float32",
         "triton_kernels/test_triton_norms.py::test_eps_counts"),
    ),
    28: Fault(
        "the whole checkpoint read, or held, on every rank",
        ("test_checkpoint_loading.py::test_a_rank_reads_its_share_of_bytes",
         "test_checkpoint_loading.py::test_a_rank_takes_little_more_memory_than_its_shard"),
    ),
    29: Fault(
        "rows of a vocabulary that does not divide lost, or padded twice, in loading",
        ("test_checkpoint_loading.py::test_every_element_is_loaded_at_every_degree",
         "test_checkpoint_writer.py::test_degrees_come_and_go_and_no_bit_changes"),
    ),
    30: Fault(
        "a checkpoint that is not complete, and weights that nobody filled",
        ("test_checkpoint_places.py::test_a_file_that_the_index_names_but_is_absent",
         "test_checkpoint_places.py::test_directories_that_are_no_checkpoints",
         "test_checkpoint_loading.py::test_a_tensor_that_is_missing_unused_or_misshapen_is_named",
         "test_checkpoint_loading.py::test_parts_must_fill_a_parameter",
         "test_checkpoint_loading.py::test_ranks_together_must_hold_every_element_on_exactly_the_ranks_named"),
    ),
    31: Fault(
        "GGUF: biases dropped, rows of q and k in another family's order, names that match nothing only logged",
        ("test_checkpoint_gguf.py::test_logits_of_both_formats_are_equal",
         "test_checkpoint_gguf.py::test_a_float_file_holds_the_same_model_as_a_directory",
         "test_checkpoint_gguf.py::test_a_tensor_that_nobody_takes_is_an_error",
         "test_checkpoint_sources.py::test_llama_rows_of_q_and_k_come_back_in_the_order_of_the_hub"),
    ),
    32: Fault(
        "a setting of the rotary embedding read from where it no longer is, or assumed",
        ("test_config.py::test_both_spellings_of_the_rope_settings_are_one",
         "test_config.py::test_absent_fields_get_the_defaults_of_transformers",
         "test_config.py::test_what_is_not_understood_is_an_error_that_names_it",
         "test_rotary.py::test_the_second_frequency_of_a_base_of_a_million",
         "test_rotary.py::test_cos_and_sin_equal_those_of_transformers"),
    ),
    33: Fault(
        "ranks that draw tokens of their own",
        ("test_generation_engine.py::test_draws_do_not_depend_on_ranks_batch_waves_or_chunks",
         "test_generation_sampling.py::test_the_choice_is_the_same_at_every_degree"),
    ),
    34: Fault(
        "a callback or condition of one rank, for which the others wait",
        ("test_generation_control.py::test_a_stop_condition_on_rank_0_alone_stops_all_ranks",
         "test_generation_control.py::test_an_error_on_rank_0_is_an_error_on_every_rank",
         "test_trust_agreement.py::test_requests_and_models"),
    ),
    35: Fault(
        "one position counter for prompts of different lengths",
        ("test_generation_engine.py::test_a_batch_gives_what_each_prompt_gives_alone_without_a_cache",
         "test_parity.py::test_logits_of_batches_padded_on_either_side_and_of_prompts_alone"),
    ),
    36: Fault(
        "end ids of generation_config.json not looked at, or only one of them",
        ("test_checkpoint_places.py::test_ends_of_sequence_come_from_the_generation_config",
         "test_generation_loading.py::test_a_loaded_model_generates_what_transformers_does",
         "test_generation_control.py::test_what_ends_a_sequence"),
        "sequences that have ended leave the batch, so that nothing need be emitted for them",
    ),
    37: Fault(
        "ranks with caches of different sizes",
        ("test_generation_control.py::test_all_ranks_use_the_smallest_capacity",
         "test_checkpoint_memory.py::test_all_ranks_use_the_smallest_capacity",
         "test_checkpoint_memory.py::test_too_little_names_needed_free_and_longest_on_every_rank"),
    ),
    38: Fault(
        "logits of every position of a prompt",
        ("test_generation_engine.py::test_only_last_positions_go_through_the_head",),
    ),
    39: Fault(
        "a chat prompt made by hand, or special tokens twice",
        ("test_generation_chat.py::test_with_and_without_a_system_turn",
         "test_generation_chat.py::test_special_tokens_are_not_doubled"),
    ),
    40: Fault(
        "a rank that fails while the others wait; collectives that do not match",
        ("test_launch_commands.py::test_a_rank_that_fails_ends_the_run",
         "test_trust_processes.py::test_a_rank_that_dies_or_stops_ends_the_run",
         "test_launch_failures.py::test_the_first_failure",
         "test_shared_memory.py::test_different_collectives_are_an_error_on_all_ranks",
         "test_trust_agreement.py::test_different_collectives_over_gloo"),
    ),
    41: Fault(
        "more ranks than devices, or a device chosen after the first collective",
        ("test_communicator.py::test_more_ranks_than_gpus_is_refused_before_nccl_starts",
         "test_communicator.py::test_the_device_is_bound_before_the_process_group_is_made"),
    ),
    42: Fault(
        "measurements that compare unlike runs, or do not say when more ranks are slower",
        ("test_bench_engine.py::test_time_in_collectives_is_that_of_their_own_clock",
         "test_bench_engine.py::test_every_degree_does_the_same_work",
         "test_launch_output.py::test_threads_are_dealt_out_to_ranks"),
    ),
    43: Fault(
        "captured collectives that give other numbers, or spoil what comes after",
        ("test_decode_graphs.py::test_logits_and_cache_are_those_of_plain_steps",
         "test_decode_graphs.py::test_a_capture_refused_on_one_rank_is_refused_on_all",
         "test_decode_graphs.py::test_a_closed_group_is_not_replayed"),
        "nothing is compiled by torch; a CUDA graph is compared with its step before it is used",
    ),
    44: Fault(
        "random weights alike where they are shards, or different where they are replicas",
        ("test_initialisation.py::test_gathered_weights_are_bitwise_equal_at_every_degree",),
    ),
}  # fmt: skip


@functools.cache
def _tests_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("number", FAULTS)
def test_every_fault_has_tests_that_exist(number: int) -> None:
    fault = FAULTS[number]
    assert fault.tests or fault.cannot_arise
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert name.startswith("test_") and name in _tests_in(file), test


def test_no_fault_is_left_out() -> None:
    assert list(FAULTS) == list(range(1, 45))
    assert len({fault.kind for fault in FAULTS.values()}) == len(FAULTS)


# --- 1 and 3: heads that do not divide, in decode steps and at every degree ---


def _ids_and_logprobs(group: TensorParallelGroup, config: dict[str, Any], weights: Any) -> Any:
    model = parallel_model(config, weights, group, model_class=LanguageModel)
    result = model.generate([[5, 80, 17, 42], [9]], GenerationOptions(6))
    return [(sequence.new_ids, sequence.logprobs) for sequence in result.sequences]


def _assert_same_choices(ranks: RankPool, heads: int, kv_heads: int, degrees: list[int]) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * 3, "head_dim": 8}
    weights = transformers_model("qwen2", **sizes).state_dict()
    config = hub_config("qwen2", **sizes)
    (expected,) = ranks(1).run(_ids_and_logprobs, config, weights)
    for t in degrees:
        for sequences in ranks(t).run(_ids_and_logprobs, config, weights):
            for (ids, logprobs), (expected_ids, expected_logprobs) in zip(sequences, expected, strict=True):
                assert ids == expected_ids
                assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)


@pytest.mark.parametrize("heads, kv_heads, t", [(4, 1, 4), (4, 2, 4), (12, 3, 4), (6, 3, 4), (9, 3, 2), (9, 3, 4)])
def test_decoding_where_kv_heads_are_on_several_ranks(ranks: RankPool, heads: int, kv_heads: int, t: int) -> None:
    _assert_same_choices(ranks, heads, kv_heads, [t])


@pytest.mark.parametrize("degrees", [[2, 3, 4], pytest.param([5, 7], marks=pytest.mark.long)])
def test_every_degree_of_fourteen_heads(ranks: RankPool, degrees: list[int]) -> None:
    _assert_same_choices(ranks, 14, 2, degrees)


# --- 5: float32 training, measured against a model that divides evenly ---

EVEN = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 256,
        "vocab_size": 96}  # fmt: skip
ODD = {"hidden_size": 42, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10, "intermediate_size": 203,
       "vocab_size": 97}  # fmt: skip


def _sgd_losses(group: TensorParallelGroup, config: dict[str, Any], weights: Any, dtype: torch.dtype) -> list[float]:
    model = parallel_model(config, weights, group, dtype)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 96, (12,), generator=generator)
        losses.append(learner.step([TrainingBatch(ids[:-1], ids[1:], (4, 7))], 0.1).loss)
    return losses


@pytest.mark.long
def test_twenty_sgd_steps_differ_no_more_where_nothing_divides(ranks: RankPool) -> None:
    """A wrong cut trains another model; how much is rounding, a model that divides evenly shows."""
    worst: dict[tuple[str, int, torch.dtype], float] = {}
    for name, sizes in (("even", EVEN), ("odd", ODD)):
        config, weights = hub_config("qwen2", **sizes), transformers_model("qwen2", **sizes).state_dict()
        for dtype in (torch.float64, torch.float32):
            (alone,) = ranks(1).run(_sgd_losses, config, weights, dtype)
            assert alone[0] - alone[-1] > 0.1  # it learns: the weights are others after it
            for t in (2, 4):
                losses = ranks(t).run(_sgd_losses, config, weights, dtype)[-1]
                worst[name, t, dtype] = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    for t in (2, 4):
        assert worst["odd", t, torch.float64] <= 1e-9
        assert worst["odd", t, torch.float32] <= 8 * max(worst["even", t, torch.float32], 2**-22)


# --- 20: a step without labels ---


def _step_without_labels(group: TensorParallelGroup) -> tuple[float, float, float]:
    weights = transformers_model("qwen2").state_dict()
    model = parallel_model(hub_config("qwen2"), weights, group)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(7)
    nothing = learner.step([TrainingBatch(ids, torch.full((7,), -100), (7,))], 0.1)
    gradients = max(float(parameter.grad.abs().max()) for parameter in model.parameters() if parameter.grad is not None)
    return nothing.loss, gradients, learner.step([TrainingBatch(ids[:-1], ids[1:], (6,))], 0.1).loss


def test_a_step_without_labels_changes_nothing_that_matters(ranks: RankPool) -> None:
    ((*_, expected),) = ranks(1).run(_step_without_labels)
    for loss, gradients, after in ranks(3).run(_step_without_labels):
        assert (loss, gradients) == (0.0, 0.0)
        assert after == pytest.approx(expected, rel=1e-5)


# --- 22: clipping ---


class _LargestResult(TorchDispatchMode):
    """The most elements that any operation allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and "_." not in f"{func}":
            self.numel = max(self.numel, result.numel())
        return result


def _clip(group: TensorParallelGroup) -> tuple[int, int, float, bool]:
    weights = transformers_model("qwen2").state_dict()
    model: CausalLM = parallel_model(hub_config("qwen2"), weights, group)
    for index, parameter in enumerate(named_parts(model)):
        parameter.tensor.grad = torch.full_like(parameter.tensor, 0.1 + index)
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    with _LargestResult() as largest:
        clip_grad_norm_(model, 0.5, group)
    changed = all(
        not torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True) if old.numel()
    )
    shard = max(parameter.numel() for parameter in model.parameters())
    return largest.numel, shard, clip_grad_norm_(model, 1.0, group).item(), changed


@pytest.mark.parametrize("t", [1, 3])
def test_clipping_makes_nothing_larger_than_a_shard(ranks: RankPool, t: int) -> None:
    for largest, shard, norm, changed in ranks(t).run(_clip):
        assert largest <= shard
        assert norm == pytest.approx(0.5, rel=1e-5)
        assert changed


# --- 24 and 25: norms on CPUs; those of GPUs are in triton_kernels ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_leave_what_they_read_alone(dtype: torch.dtype) -> None:
    x, weight = torch.tensor([3.0, 4.0], dtype=dtype), torch.ones(2, dtype=dtype)
    expected = torch.tensor([0.8485281, 1.1313708]).to(dtype)
    y = rms_norm(x, weight, 0.0)
    assert torch.equal(x, torch.tensor([3.0, 4.0], dtype=dtype)) and y.data_ptr() != x.data_ptr()
    torch.testing.assert_close(y, expected)
    residual = x.clone()
    added = torch.zeros_like(x)
    fused_add_rms_norm(added, residual, weight, 0.0)
    assert torch.equal(residual, x)
    torch.testing.assert_close(added, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_take_views_of_any_strides(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, generator=generator).to(dtype)
    a, b = torch.randn(5, 14, generator=generator).to(dtype), torch.randn(7, 5, generator=generator).to(dtype)
    wide = torch.randn(5, 21, generator=generator).to(dtype)
    for x, residual in ((a[:, ::2], b.t()), (wide[:, 7:14], b.t()), (wide[:, :7], wide[:, 14:])):
        outside = wide[:, 7:14].clone()
        plain_x, plain_residual = x.contiguous().clone(), residual.contiguous().clone()
        ulps = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 0}  # torch adds up strided rows in another order
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm(plain_x, weight, 1e-5), **ulps)
        fused_add_rms_norm(plain_x, plain_residual, weight, 1e-5)
        fused_add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(residual, plain_residual)
        torch.testing.assert_close(x.contiguous(), plain_x, **ulps)
        if x.data_ptr() == wide.data_ptr():
            assert torch.equal(wide[:, 7:14], outside)
