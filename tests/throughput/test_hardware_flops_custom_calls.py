"""Library calls of GPU, TPU and CPU, made by hand after the forms in XLA's and JAX's sources."""

import pytest

from jaxrel.throughput.custom_calls import Estimate
from jaxrel.throughput.hardware_flops import count_hlo
from tests.throughput.hlo import call

GEMM = (
    ', backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],'
    '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"epilogue":"DEFAULT"}}'
)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_cublas_sums_over_the_axes_that_its_configuration_names(target: str) -> None:
    operands = ["bf16[3,16,8]{2,1,0}", "bf16[3,16,32]{2,1,0}"]
    result = "(bf16[3,8,32]{2,1,0}, s8[4194304]{0})"
    found = count_hlo(call(target, operands, result, GEMM))
    assert found.uncounted == ()
    assert found.per_device.contraction == 3 * 2 * 8 * 32 * 16
    assert found.by_operation == {target: 3 * 2 * 8 * 32 * 16}


IMAGE, KERNEL, OUTPUT = "bf16[4,32,32,64]{3,2,1,0}", "bf16[32,3,3,64]{3,2,1,0}", "bf16[4,16,16,32]"
# 16 outputs x 3 taps, less the last tap that lies on padding, in both dimensions.
CONVOLUTION = 2 * 4 * 64 * 32 * (16 * 3 - 1) ** 2


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("__cudnn$convForward", [IMAGE, KERNEL], OUTPUT),
        ("__cudnn$convBiasActivationForward", [IMAGE, KERNEL, "bf16[32]{0}"], OUTPUT),
        ("__cudnn$convBackwardInput", [OUTPUT, KERNEL], IMAGE),
        ("__cudnn$convBackwardFilter", [IMAGE, OUTPUT], KERNEL),
    ],
)
def test_cudnn_gradients_have_the_products_of_the_forward(
    target: str, operands: list[str], result: str
) -> None:
    window = ", window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_o01i->b01f"
    found = count_hlo(call(target, operands, f"({result}, u8[0]{{0}})", window))
    assert found.uncounted == ()
    assert found.per_device.contraction == CONVOLUTION


Q, K = "bf16[3,128,8,64]{3,2,1,0}", "bf16[3,96,8,64]{3,2,1,0}"
SCORES = 3 * 8 * 128 * 96


def fmha(mask: str) -> str:
    shape = '"intermediate_tensor_shape":{"dimensions":["3","8","128","96"]}'
    config = f'{{"cudnn_fmha_backend_config":{{"mask_type":"{mask}",{shape}}}}}'
    return f", api_version=API_VERSION_STATUS_RETURNING, backend_config={config}"


def test_cudnn_attention_is_two_products_forward_and_five_backward() -> None:
    result = "(bf16[3,8,128,64]{3,1,2,0}, f32[3,8,128]{2,1,0}, u8[0]{0})"
    forward = count_hlo(call("__cudnn$fmhaSoftmax", [Q, K, K], result, fmha("NO_MASK")))
    assert forward.per_device.contraction == 2 * (2 * SCORES * 64)
    # Its softmax is not counted, and says so; no contraction hides in it.
    assert forward.per_device.elementwise is forward.per_device.transcendental is None
    assert "elementwise and transcendental: no estimate" in forward.uncounted[0]
    assert forward.notes == ()

    operands = [Q, K, K, "f32[3,8,128]{2,1,0}", Q, Q]
    target = "__cudnn$fmhaScaleBiasSoftmaxDropoutBackward"
    backward = count_hlo(call(target, operands, f"({Q}, {K}, {K}, u8[0]{{0}})", fmha("CAUSAL")))
    assert backward.per_device.contraction == 5 * (2 * SCORES * 64)
    assert len(backward.notes) == 1 and "mask CAUSAL" in backward.notes[0]


@pytest.mark.parametrize("transposed", [False, True])
def test_onednn_products(transposed: bool) -> None:
    lhs = "f32[2,64,16]" if transposed else "f32[2,16,64]"
    flag = str(transposed).lower()
    config = f', backend_config={{"onednn_matmul_config":{{"transpose_a":{flag}}}}}'
    found = count_hlo(call("__onednn$matmul", [lhs, "f32[2,64,8]"], "f32[2,16,8]", config))
    assert found.per_device.contraction == 2 * 2 * 16 * 8 * 64


@pytest.mark.parametrize(
    ("target", "config"),
    [
        (
            "tpu_custom_call",
            '{"custom_call_config": {"body": "TUzvU{x=,(", "cost_estimate":'
            ' {"flops": 1024, "transcendentals": 32, "bytes_accessed": 9},'
            ' "needs_hlo_passes": false}}',
        ),
        (
            "tpu_custom_call",
            '{"custom_call_config":{"cost_estimate":{"flops":"1024","transcendentals":"32"}}}',
        ),
        (
            "__gpu$xla.gpu.triton",
            "{cost_estimate = {flops = 1024 : i64, transcendentals = 32 : i64}, num_warps = 4}",
        ),
    ],
)
def test_a_kernel_counts_as_its_author_declares_it(target: str, config: str) -> None:
    text = call(target, ["f32[8,128]"], "f32[8,128]", f", backend_config={config}")
    found = count_hlo(text)
    assert found.per_device.contraction == 1024
    assert found.per_device.transcendental == 32
    assert "as its author declares" in found.notes[0]
    assert found.reasons == {f"custom call {target}: unknown to XLA, which adds -1": 1025}


@pytest.mark.parametrize("target", ["tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2"])
def test_a_kernel_that_declares_nothing_is_uncounted_unless_the_user_knows_it(target: str) -> None:
    text = call(target, ["f32[8,128]"], "f32[8,128]", ', backend_config={"body":"AAAA"}')
    found = count_hlo(text)
    assert found.uncounted == (f"custom call {target} (call): no estimate",)
    assert found.per_device.contraction is None

    own = {target: lambda call: Estimate(contraction=2 * call.inputs[0][0].size)}
    assert count_hlo(text, own).per_device.contraction == 2 * 8 * 128
    assert count_hlo(text, own).uncounted == ()


def test_an_estimator_that_raises_leaves_its_call_uncounted() -> None:
    text = call("mine", ["f32[8]"], "f32[8]")
    found = count_hlo(text, {"mine": lambda call: Estimate(call.inputs[7][0].size)})
    assert found.per_device.contraction is None
    assert "custom-call call: cannot be read: IndexError" in found.uncounted[0]


def test_sorts_and_random_bits_of_the_gpu_hide_no_contraction() -> None:
    for target in ("__cub$DeviceRadixSort", "cu_threefry2x32_ffi"):
        found = count_hlo(call(target, ["u32[64]"], "(u32[64], u8[1])"))
        assert found.per_device.contraction == 0
        assert found.per_device.elementwise is None
