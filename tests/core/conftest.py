from pathlib import Path

import pytest
from helpers import pretend
from helpers.cases import CUT, DENSE, NOT_CUT, in_chunks
from helpers.marks import device_type

# What is skipped with --device, by the name of a file or a test, and why.
PROCESSES = "its processes talk by gloo, on CPUs"
CPU_ALONE = {
    "test_processes": PROCESSES,
    "test_fully_sharded": PROCESSES,
    "test_package": "it starts processes that have no --device",
    "test_slips": "it has values that Python reads on a CPU alone, and messages with its name",
    "test_nothing_is_changed": "recognize calls a function on the CPU, where its modules must be",
    "test_products_meet_no_denormal_numbers": "denormal numbers are slow on a CPU alone",
    "test_averages_of_parameters_and_buffers": "torch averages buffers of integers on CPUs alone",
}
# What is skipped with --device pretend besides.
FORWARD = "forward mode does not know a pretended device"
INFERENCE = "inference mode does not know a pretended device"
NOT_PRETENDED = {
    "test_compiled": "neither torch.compile nor torch.func knows a pretended device",
    "test_warnings": "values on devices other than CPU and CUDA are not checked",
    "test_pgcl_in_one_file": "a pretended device does not know an assigned .data",
    "test_a_copy_continues_bit_for_bit": "files do not know a pretended device",
    "test_a_grad_scaler_backs_off_until_gradients_are_finite": "GradScaler scales on a CPU or CUDA",
    "test_activation_checkpointing": "checkpoint does not know a pretended device",
    "test_derivatives_of_dense": FORWARD,
    "test_first_and_second_derivatives_of_dense": FORWARD,
    "test_gradcheck": FORWARD,
    "test_a_dual_temperature_has_the_derivative": FORWARD,
    "test_transforms_of_any_number_of_pairs": FORWARD,
    "test_inference_mode_before_training": INFERENCE,
    "test_only_finite_training_forwards_change_the_state": INFERENCE,
}


def pytest_collection_modifyitems(items):
    skipped = {} if device_type() == "cpu" else CPU_ALONE
    if device_type() == pretend.NAME:
        skipped = skipped | NOT_PRETENDED
    for item in items:
        for name in (Path(item.path).stem, item.name.partition("[")[0]):
            if name in skipped:
                item.add_marker(pytest.mark.skip(reason=skipped[name]))


if pretend.IS_POSSIBLE:  # before the first backward, in which autograd counts the devices
    pretend.register()


@pytest.fixture
def device():
    """The device of --device; without it, one that is pretended."""
    if device_type() != "cpu":
        yield device_type()
        return
    if not pretend.IS_POSSIBLE:
        pytest.skip("no device can be pretended here")
    with pretend.registered():
        yield pretend.NAME


@pytest.fixture(params=[DENSE, NOT_CUT, CUT], ids=["dense", "not cut", "cut"])
def engine(request):
    """The option `engine`, for each way to compute a loss; small batches are cut in one of them."""
    with in_chunks(request.param.chunk):
        yield request.param.engine
