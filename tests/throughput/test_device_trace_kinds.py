"""What an operation is: by the program's text, by the event's own text, by its name."""

import pytest

from jaxrel.throughput.op_kinds import Kind, kernel_kind, kind_of, read_program
from tests.throughput.hlo import ADD, module

pytestmark = pytest.mark.core

PROGRAM = module(
    "%p = f32[8] parameter(0)",
    "%psum.7 = f32[8] all-reduce(%p), to_apply=%add",
    "%quiet = f32[8] all-gather-start(%p), dimensions={0}",
    "%quieter = f32[8] all-gather-done(%quiet)",
    "%generic = ((f32[8]), f32[1]) async-start(%p), calls=%scattered",
    "%waits = f32[1] async-done(%generic)",
    "%moves = ((f32[8]), f32[8]) async-start(%p), calls=%copied",
    "%fused.1 = f32[1] fusion(%p), kind=kCustom, calls=%scattered",
    "%fused.2 = f32[8] fusion(%p), kind=kCustom, calls=%hidden",
    "%loop = f32[8] while(%p), condition=%c, body=%b",
    "%kernel = f32[8] call(%p), to_apply=%copied",
    "%around = f32[8] call(%p), to_apply=%scattered",
    '%asks = f32[8] custom-call(%p), custom_call_target="xla_ffi_python_cpu_callback"',
    '%pallas = f32[8] custom-call(%p), custom_call_target="tpu_custom_call"',
    "%to_host = (f32[8], u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true",
    "%to_peer = (f32[8], u32[], token[]) send(%p, %t), channel_id=3",
    "%psum.8 = f32[8] add(%p, %p)",
    "ROOT %dot.1 = f32[] dot(%p, %p), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
    before=ADD
    + """
%scattered (x: f32[8]) -> f32[1] {
  %x = f32[8] parameter(0)
  ROOT %s = f32[1] reduce-scatter(%x), dimensions={0}, to_apply=%add
}
%copied (y: f32[8]) -> f32[8] {
  %y = f32[8] parameter(0)
  ROOT %copy.5 = f32[8] copy(%y)
}
%hidden (z: f32[8,8]) -> f32[8,8] {
  %z = f32[8,8] parameter(0)
  %d = f32[8,8] dot(%z, %z), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %h = f32[8,8] all-reduce(%d), to_apply=%add
}
""",
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("psum.7", "communication"),
        ("quiet", "communication"),
        ("quieter", "communication"),
        ("generic", "communication"),
        ("waits", "communication"),
        ("generic.call-start", "communication"),  # as a TPU names its parts
        ("moves", "other"),
        ("fused.1", "communication"),
        ("fused.2", "compute"),  # hides its own communication
        ("loop", "other"),
        ("kernel", "compute"),
        ("around", "other"),  # what it calls shows by itself
        ("asks", "callback"),
        ("pallas", "compute"),
        ("to_host", "callback"),
        ("to_peer", "communication"),
        ("psum.8", "compute"),  # whatever its name says
        ("dot.1", "compute"),
        ("copy.5", "other"),
    ],
)
def test_by_the_text_of_the_program(name: str, kind: Kind) -> None:
    program = read_program(PROGRAM)
    assert program.name == "by_hand"
    assert kind_of(name, program) == kind
    # A whole instruction that only names what it calls.
    assert kind_of(f"%{name} = f32[8] fusion(f32[8] %p), calls=%f", program) == kind


def test_what_the_program_lacks_or_another_names_alike() -> None:
    program = read_program(PROGRAM)
    assert kind_of("all-to-all.3", program) == "communication"
    assert kind_of("%psum.7 = f32[8] add(f32[8] %p, f32[8] %p)", program) == "compute"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("psum.7", "communication"),
        ("psum_invariant.2", "communication"),
        ("ppermute.3", "communication"),
        ("all_gather.7", "communication"),
        ("all-reduce-scatter.1", "communication"),
        ("ragged-all-to-all", "communication"),
        ("async-collective-done.2", "communication"),
        ("recv-done", "communication"),
        ("psum_convert_fusion", "compute"),
        ("async-collective-fusion.4", "compute"),
        ("sender.1", "compute"),
        ("dot.4", "compute"),
        ("wrapped_copy", "compute"),
        ("copy.12", "other"),
        ("copy-done.1", "other"),
        ("infeed", "other"),
        ("while.9", "other"),
        ("async-start.3", "other"),
        ("pure_callback.4", "callback"),
        ("debug_print.1", "callback"),
        ("%x.1 = f32[8]{0:T(8,128)} all-gather(f32[1] %p), dimensions={0}", "communication"),
        ('%y = () custom-call(), custom_call_target="xla_python_gpu_callback"', "callback"),
        ("%z = f32[8] add(f32[8] %a, f32[8] %b", "compute"),  # cut off
        ("", "compute"),
    ],
)
def test_by_the_event_alone(name: str, kind: Kind) -> None:
    assert kind_of(name, None) == kind


@pytest.mark.parametrize(
    ("kernel", "operation", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)", None, "communication"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(...)", "fusion.1", "communication"),
        ("all_reduce_kernel<float>", "all-reduce.2", "communication"),
        ("MemcpyP2P", "collective-permute.1", "communication"),
        ("MemcpyH2D", None, "other"),
        ("Memset", "fusion.2", "other"),
        ("loop_multiply_fusion_4", "loop_multiply_fusion.4", "compute"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "custom-call.3", "compute"),
    ],
)
def test_kernels_of_a_gpu(kernel: str, operation: str | None, kind: Kind) -> None:
    assert kernel_kind(kernel, operation, None) == kind


def test_text_that_is_no_program_gives_names_alone() -> None:
    for text in ("", "nonsense {", PROGRAM.replace("(", "")):
        assert kind_of("psum.7", read_program(text)) == "communication"
