"""TPU, GPU and CPU traces by hand, with the nanoseconds counted by hand.

The names are those of XLA's `xplane_schema.h` and of published traces; none of this ran on a TPU
or GPU.
"""

from collections.abc import Mapping

import pytest
from jax.profiler import ProfileData

from jaxrel.throughput.device_split import Parts, split_step
from jaxrel.throughput.device_trace import DeviceTrace, read_events, read_trace
from tests.throughput.traces import Lines, Row, host, profile, split

pytestmark = pytest.mark.core

TPU_OPS: list[Row] = [
    ("%while.1 = (s32[], f32[8]) while((s32[], f32[8]) %t), condition=%c, body=%b", 100, 900),
    ("%fusion.1 = f32[8]{0:T(256)} fusion(f32[8] %p), kind=kLoop, calls=%f", 100, 300),
    ("%all-reduce-start.4 = f32[8] all-reduce-start(f32[8] %g), to_apply=%add", 300, 310),
    ("%fusion.2 = f32[8] fusion(f32[8] %q), kind=kOutput, calls=%f.1", 310, 500),
    ("%all-reduce-done.1 = f32[8] all-reduce-done(f32[8] %all-reduce-start.4)", 500, 600),
    ("%copy.1 = f32[8]{0} copy(f32[8] %x)", 600, 650),
    ("%psum.7 = f32[8]{0} all-reduce(f32[8] %y), to_apply=%add", 650, 750),
    ('%attention.3 = f32[8] custom-call(%z), custom_call_target="tpu_custom_call"', 750, 800),
]  # fmt: skip
# Compute 200 + 190 + 50. All-reduce 300-600, of which 310-500 is beside a fusion; psum 100.
# Copy 50 and the loop's own 800-900.
TPU_PARTS = Parts(
    step_ns=1000,
    compute_ns=440,
    exposed_communication_ns=210,
    overlapped_communication_ns=190,
    callback_ns=0,
    other_ns=150,
    idle_ns=200,
)


def test_tpu_operations_and_the_flight_between_start_and_done() -> None:
    found = split({"/device:TPU:0": {"XLA Ops": TPU_OPS}, "/host:CPU": host(0, 1000)})
    assert found.source == "tpu"
    assert found.devices == {"TPU:0": TPU_PARTS}
    assert (found.slowest, found.worst) == ("TPU:0", TPU_PARTS)


def test_tpu_asynchronous_line_by_flow() -> None:
    lines: Lines = {
        "XLA Modules": [("jit_step(12)", 0, 1000)],
        "Steps": [("1", 0, 1000)],
        "XLA Ops": [
            ("%fusion.1 = f32[8] fusion(f32[8] %p), kind=kLoop, calls=%f", 110, 390),
            ("%recv-done.2 = (f32[8]) recv-done(%recv.2), is_host_transfer=true", 600, 700),
        ],
        "Async XLA Ops": [
            ("all-gather-start.3", 100, 110, {"flow": 7}),
            ("copy-start.9", 420, 600, {"flow": 8}),
            ("all-gather-done.3", 400, 420, {"flow": 7}),
        ],
    }  # fmt: skip
    sparse: Lines = {"XLA Ops": [("%all-to-all.1 = f32[8] all-to-all(f32[8] %p)", 0, 1000)]}
    planes = {
        "/device:TPU:3": lines,
        "/device:TPU:3 SparseCore 0": sparse,
        "/host:CPU": host(0, 1000),
    }
    # The gather flies 100-420, of which 110-390 beside the fusion; a copy that flies is no time.
    expected = Parts(
        step_ns=1000,
        compute_ns=280,
        exposed_communication_ns=40,
        overlapped_communication_ns=280,
        callback_ns=100,
        other_ns=0,
        idle_ns=580,
    )
    assert split(planes).devices == {"TPU:3": expected}


def test_tpu_flights_of_two_cores_do_not_mix() -> None:
    start: Row = ("%all-gather-start.1 = f32[8] all-gather-start(f32[4] %p)", 0, 10)
    done: Row = ("%all-gather-done.1 = f32[8] all-gather-done(f32[8] %all-gather-start.1)", 90, 95)
    found = split(
        {
            "/device:TPU:0": {"XLA Ops": [start, done]},
            "/device:TPU:1": {"XLA Ops": [done]},  # its start was before the profile
            "/host:CPU": host(0, 100),
        }
    )
    exposed = {name: parts.exposed_communication_ns for name, parts in found.devices.items()}
    assert exposed == {"TPU:0": 95, "TPU:1": 5}
    assert found.exposed_communication_s == 50e-9
    assert found.worst.exposed_communication_ns == 95


def test_gpu_streams_run_beside_each_other() -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    step = {"hlo_module": "jit_step"}
    lines: Lines = {
        "Stream #13(Compute)": [
            ("loop_add_fusion", 100, 400, step | {"hlo_op": "loop_add_fusion"}),
            ("gemm_fusion_dot_3", 400, 450),  # of a graph: no statistics
        ],
        "Stream #14(Compute)": [(nccl, 300, 600, step | {"hlo_op": "all-reduce-start.1"})],
        "Stream #15(MemcpyD2H,MemcpyP2P)": [
            ("MemcpyD2H", 650, 700, step | {"hlo_op": "copy-start.2"}),
            ("MemcpyP2P", 700, 800, step | {"hlo_op": "collective-permute-start.2"}),
        ],
        "XLA Ops": [("all-reduce-start.1", 0, 1000)],  # drawn from the streams by a viewer
    }
    found = split({"/device:GPU:0": lines, "/host:CPU": host(0, 1000)})
    assert found.source == "gpu"
    expected = Parts(
        step_ns=1000,
        compute_ns=350,
        exposed_communication_ns=150 + 100,
        overlapped_communication_ns=150,
        callback_ns=0,
        other_ns=50,
        idle_ns=350,
    )
    assert found.devices == {"GPU:0": expected}


def test_cpu_threads_by_the_ordinal_of_the_device() -> None:
    def row(name: str, start: int, end: int, ordinal: int) -> Row:
        stats: Mapping[str, object] = {
            "hlo_op": name,
            "hlo_module": "jit_step",
            "device_ordinal": ordinal,
        }
        return name, start, end, stats

    planes: Mapping[str, Lines] = {
        "/host:CPU": {
            **host(10, 110),
            "tf_XLAPjRtCpuClient/1": [
                row("dot.1", 0, 40, 0),  # began before the step
                ("end: dot.1", 40, 41),
                row("psum.3", 40, 60, 0),
                ("Rendezvous", 41, 59),
                row("dot.1", 60, 90, 1),  # the same thread serves another device
            ],
            "tf_XLAPjRtCpuClient/2": [row("psum.3", 90, 100, 1), row("while.2", 60, 100, 1)],
        }
    }
    found = split(planes)
    assert found.source == "cpu"
    first, second = found.devices["CPU:0"], found.devices["CPU:1"]
    assert (first.compute_ns, first.exposed_communication_ns, first.idle_ns) == (30, 20, 50)
    assert (second.compute_ns, second.exposed_communication_ns, second.idle_ns) == (30, 10, 60)
    assert found.slowest == "CPU:0"


def test_devices_stand_in_the_order_of_their_numbers() -> None:
    fusion: Row = ("%fusion.1 = f32[8] fusion(f32[8] %p), kind=kLoop, calls=%f", 0, 50)
    planes: dict[str, Lines] = {f"/device:TPU:{n}": {"XLA Ops": [fusion]} for n in (10, 2, 0)}
    found = split({**planes, "/host:CPU": host(0, 100)})
    assert list(found.devices) == ["TPU:0", "TPU:2", "TPU:10"]


@pytest.mark.parametrize(
    ("planes", "reason"),
    [
        ({}, "no operation of a device"),
        ({"/host:CPU": host(0, 100)}, "no operation of a device"),
        ({"/device:TPU:0": {"XLA Ops": TPU_OPS}}, "lacks the marks"),
        (
            {"/device:TPU:0": {"XLA Ops": TPU_OPS}, "/host:CPU": host(2000, 3000)},
            "no operation of a device within the step",
        ),
    ],
)
def test_a_trace_without_the_step_has_a_reason(planes: Mapping[str, Lines], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        split(planes)


def test_an_empty_profile_is_an_empty_trace() -> None:
    trace = read_trace(read_events(ProfileData.from_serialized_xspace(b"")))
    assert trace == DeviceTrace(None, (), None)
    with pytest.raises(ValueError, match="no operation"):
        split_step(trace)
    assert profile({}) is not None
