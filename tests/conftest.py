"""Fixtures of all tests. `cases` is the contract table, `oracle` the naive answers, `guard` the tripwires."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is loaded: threads that wait by spinning make the tests several times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from cases import BACKENDS
from ranks import Ranks, server
from thinwire import kernels
from thinwire.tools.train import fashion

SLOW = (
    "test_agreement.py::test_different_calls_are_an_error_that_names_the_rank[3-0-known]",
    *(
        f"test_hostile_payloads.py::test_in_training_not_a_bit_of_weights_moments_or_residuals_changes[{case}]"
        for case in ("3-of the sender", "2-in transit")
    ),
    "test_auto_ranks.py::test_a_resumed_run_goes_on_with_the_choice[AdamW 0]",
    "test_auto_ranks.py::test_a_resumed_run_goes_on_with_the_choice[AdamW 2]",
    "test_auto_ranks.py::test_a_resumed_run_goes_on_with_the_choice[attach 1]",
    "test_auto_ranks.py::test_another_number_of_ranks_measures_again[SGD-0]",
    *(
        f"test_bench_allreduce.py::test_any_compressor[{spec}]"
        for spec in ("quantize:bits=1,rounding=stochastic", "none")
    ),
    "test_bench_codec.py::test_the_installed_command_reports_every_compressor[reference-dtypes0]",
    *(
        f"test_bench_codec_gpu.py::test_in_the_interpreter[{spec}]"
        for spec in ("quantize:bits=8", "randomk:ratio=1/64")
    ),
    "test_bench_recipe.py::test_the_cnn_and_several_seeds",
    "test_bench_recipe.py::test_threads_in_place_of_processes",
    "test_bench_step.py::test_a_small_run",
    "test_budget.py::test_segments_change_no_bit[8]",
    "test_bytes.py::test_auto_sends_least_and_says_why[8]",
    "test_bytes.py::test_the_report_has_the_bytes_of_the_formula[8]",
    *(
        f"test_checkpoints.py::test_a_resumed_run_is_the_run_that_never_stopped[{name}]"
        for name in (
            "AdamW ddp",
            "AdamW ddp warm-up",
            "SGD ddp sharded",
            "SGD plain warm-up",
            "attach adaptive",
            "attach ddp sharded",
            "attach ddp stochastic",
            "attach plain randomk",
            "attach warm-up",
        )
    ),
    *(
        f"test_checkpoints.py::test_another_number_of_ranks[{name}]"
        for name in ("SGD plain-2-3", "SGD plain-4-2", "attach ddp-2-3", "attach plain-4-2")
    ),
    "test_checkpoints.py::test_in_new_processes",
    "test_conservation.py::test_nothing_is_lost_between_nodes[2-4-15]",
    "test_conservation.py::test_nothing_is_lost_in_200_steps",
    "test_conservation.py::test_nothing_is_lost_in_a_small_or_a_larger_world[4-60]",
    "test_conservation.py::test_nothing_is_lost_in_a_small_or_a_larger_world[8-30]",
    "test_ddp.py::test_compressed_replicas_stay_identical[quantize-3-100]",
    "test_ddp.py::test_compressed_replicas_stay_identical[randomk-2-300]",
    "test_examples.py::test_the_resume_example_goes_on_with_another_number_of_ranks",
    "test_examples.py::test_training_examples_learn_with_few_bytes[plain_loop.py]",
    "test_faults.py::test_all_ranks_raise[namespaces cut dense]",
    "test_failures.py::test_the_others_learn_which_rank_is_late[2-0-True-dense]",
    "test_failures.py::test_the_others_learn_which_rank_is_late[3-0-True-sharded]",
    "test_failures.py::test_the_others_learn_which_rank_is_late[3-2-False-sharded]",
    "test_failures.py::test_the_others_learn_which_rank_was_killed[8-5-inside-gather-parent]",
    "test_groups.py::test_nodes[shape1]",
    "test_handles.py::test_many_at_once_give_what_one_by_one_gives[8]",
    "test_killed_in_a_step.py::test_between_backward_and_step[3-2-gather-0]",
    "test_killed_in_a_step.py::test_between_backward_and_step[3-0-sharded-0]",
    "test_killed_in_a_step.py::test_when_all_is_exchanged[sharded]",
    "test_kernels.py::test_cpu_kernels_are_compiled_once_and_release_the_gil",
    "test_not_finite_ranks.py::test_a_poisoned_step_changes_nothing[8]",
    "test_optimizers.py::test_replicas_stay_identical[AdamW-False-gather-2-300]",
    "test_optimizers.py::test_replicas_stay_identical[SGD-False-sharded-4-100]",
    "test_pass_on.py::test_the_late_or_lost_rank_is_named[True]",
    "test_pending.py::test_a_rank_that_stands_still_inside_is_named[gather]",
    "test_pending.py::test_a_process_can_end_while_a_handle_is_under_way[True]",
    "test_plain_loop.py::test_compressed_replicas_stay_identical[sharded-2-300]",
    "test_plain_loop.py::test_compressed_replicas_stay_identical[topk-3-100]",
    "test_plan_torchrun.py::test_a_model_of_ones_own",
    "test_plan_torchrun.py::test_hosts_with_several_ranks",
    *(
        f"test_plan_torchrun.py::test_nonsense_is_told_once[{name}]"
        for name in ("no model", "one rank", "world", "host", "no file", "no function", "no module")
    ),
    "test_results.py::test_ones_are_counted[8]",
    "test_results.py::test_plain_sums_are_added_in_the_order_of_ranks[8]",
    "test_results.py::test_sixteen_bits_are_the_same_everywhere_and_near_the_sum[8]",
    "test_results.py::test_the_result_is_the_sum_of_what_ranks_sent[8]",
    "test_train_auto.py::test_it_says_what_it_chose_and_goes_on_with_it[adamw]",
    "test_train_faults.py::test_a_job_that_is_killed_again_and_again",
    *(f"test_report_page.py::test_narrow_screens_have_no_sideways_scroll[{width}]" for width in (360, 768)),
    "test_train_faults.py::test_a_loss_that_is_never_finite_again_ends_the_run[none]",
    *(
        f"test_train_faults.py::test_a_checkpoint_is_there_or_not_whenever_it_is_killed[{moment}]"
        for moment in ("after the manifest", "before its name")
    ),
    *(
        f"test_train_resume.py::test_a_resumed_run_is_the_run_that_never_stopped[{name}]"
        for name in ("batch norm", "dense adamw", "text", "topk sgd, three")
    ),
    "test_train_resume.py::test_another_number_of_workers_goes_on_from_the_same_step[2-3]",
    "test_train_input.py::test_a_limit_of_file_size_is_told_alike",
    "test_train_torchrun.py::test_a_bug_shows_one_traceback_and_its_rank",
    "test_train_torchrun.py::test_told_to_stop_it_leaves_a_checkpoint",
    "test_train_torchrun.py::test_machines_without_a_common_disk_keep_their_own_ranks",
    *(
        f"test_triton.py::test_interpreted_kernels_are_the_reference[{name}]"
        for name in ("topk-bits", "topk-small", "topk-global", "stochastic")
    ),
    *(
        f"test_memory.py::test_a_thousand_calls_do_not_grow[reference-5000-{name}]"
        for name in ("topk", "quantize", "randomk", "none")
    ),
    *(f"test_memory.py::test_a_thousand_calls_do_not_grow[cpu-1000000-{name}]" for name in ("randomk", "none")),
)
"""Larger or other variants of what smaller tests show: `make test` leaves them out, `make test-all` does not."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.endswith(SLOW):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The server of ranks starts before that of `tools.workers`, whose processes would be slower, and hold on to freed
    memory. A variable in the developer's shell must not change which kernels any of them have."""
    os.environ.pop(kernels.ENVIRONMENT_VARIABLE, None)
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        server()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of processes that all tests with ranks share."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def fashion_package() -> Path:
    """The folder of Debian's package for Fashion-MNIST. `make test` installs it where it can, and CI needs it."""
    if not fashion.INSTALLED.is_dir():
        reason = f"no {fashion.INSTALLED} on this machine: apt-get install {fashion.PACKAGE}"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    return fashion.INSTALLED


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with each backend's kernels."""
    with kernels.force(request.param):
        yield request.param
