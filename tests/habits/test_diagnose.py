"""What `jaxrel diagnose` refuses, reads, times, and says of its measurements."""

import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxrel.config import Config, JobConfig
from jaxrel.exit_codes import UsageError
from jaxrel.habits import diagnose_show
from jaxrel.habits.diagnose import Diagnose, diagnose
from jaxrel.habits.diagnose_document import ADVICE, Findings, document
from jaxrel.habits.diagnose_measure import Steps, fixed_work, time_locally
from jaxrel.habits.diagnose_products import Bench, Product, Timed, flops, products
from jaxrel.habits.diagnose_trace import Moments, moments
from jaxrel.plan import waterfall as rows
from jaxrel.plan.peaks import Peak
from jaxrel.throughput.device_trace import Activity, DeviceTrace
from jaxrel.throughput.hardware_flops import count_hlo
from jaxrel.throughput.hlo_text import Array
from jaxrel.throughput.meter import StepFlops
from jaxrel.throughput.peak import measured_peak

ROOT = Path(__file__).parents[2]
TINY = ROOT / "scripts" / "configs" / "tiny.yaml"

# Refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"seconds": 0.0}, "--seconds: got 0: expected a number above 0"),
        ({"seconds": float("nan")}, "--seconds: got nan: expected a number above 0"),
        ({"stages": 4}, "--microbatches: got nothing: expected it, --stages and --microbatches"),
        ({"microbatches": 4}, "--stages: got nothing: expected it, --stages and --microbatches"),
        ({"interleave": 2}, "--interleave: got 2: expected --stages with it"),
        ({"stages": 0, "microbatches": 4}, "stages: got 0: expected at least 1"),
        ({"svg": "absent/a.svg"}, "--svg: got 'absent/a.svg': expected a file in a folder"),
        ({"svg": str(ROOT)}, f"--svg: got '{ROOT}': expected a file in a folder"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        diagnose(Config(), Diagnose(**flags))
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize("job", [JobConfig(detect=True), JobConfig("h:1", 0, 2)])
def test_a_job_of_several_processes_is_refused(job: JobConfig) -> None:
    with pytest.raises(UsageError) as refused:
        diagnose(replace(Config(), job=job), Diagnose())
    assert str(refused.value).startswith("job: got more than one process: expected one;")


def test_a_refusal_does_not_wait_for_jax() -> None:
    code = "import jaxrel.habits.diagnose, sys; print({'jax', 'orbax', 'grain'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n"


# The products of a program


def compiled(function: Any, *shapes: tuple[int, ...]) -> str:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile().as_text() or ""


def test_products_count_as_often_as_they_run_in_their_own_shapes() -> None:
    def function(x: Any, w: Any, big: Any) -> Any:
        def layer(x: Any, _: Any) -> Any:
            return jnp.tanh(x @ w), None

        y, _ = jax.lax.scan(layer, x, None, length=5)
        return y, big @ big

    text = compiled(function, (64, 128), (128, 128), (256, 256))
    found = products(text)
    by_shape = {(p.lhs.dims, p.rhs.dims): n for p, n in found.items()}
    assert by_shape == {((64, 128), (128, 128)): 5, ((256, 256), (256, 256)): 1}
    assert flops(found) == 5 * 2 * 64 * 128 * 128 + 2 * 256**3
    assert flops(found) == count_hlo(text).per_device.contraction


def test_products_with_shared_axes_and_branches() -> None:
    def function(x: Any, w: Any, which: Any) -> Any:
        batched = jnp.einsum("bij,bjk->bik", x, w)
        wide = lambda x: jnp.einsum("bij,bik->jk", x, x)  # noqa: E731
        narrow = lambda x: jnp.ones((64, 64))  # noqa: E731
        return batched, jax.lax.cond(which[0] > 0, wide, narrow, x)

    text = compiled(function, (4, 32, 64), (4, 64, 16), (1,))
    assert flops(products(text)) == 2 * 4 * 32 * 64 * 16 + 2 * 4 * 32 * 64 * 64
    assert flops(products(text)) == count_hlo(text).per_device.contraction


def test_what_is_no_dot_stands_as_one_of_the_same_flops() -> None:
    def function(image: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID")

    text = compiled(function, (2, 3, 10, 10), (8, 3, 3, 3))
    # 8 x 8 places of 8 features, each a sum of 3 x 3 x 3 products.
    assert flops(products(text)) == 2 * 2 * 8 * 8 * 8 * 27
    gemm = """HloModule m
ENTRY %main (a: bf16[64,128], b: bf16[32,128]) -> bf16[64,32] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[32,128]{1,0} parameter(1)
  ROOT %c = bf16[64,32]{1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{\
"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]},"alpha_real":1}}
}"""
    left, right = Array("bf16", (64, 128)), Array("bf16", (32, 128))
    assert products(gemm) == Counter([Product(left, right, "bf16", ((1,), (1,)))])


def test_damaged_text_gives_no_products_and_no_error() -> None:
    text = compiled(lambda x: x @ x, (128, 128))
    assert products("") == products("HloModule m") == Counter()
    assert (
        flops(products(text.replace("lhs_contracting_dims={1}", "lhs_contracting_dims={7}"))) == 0
    )


def test_every_product_is_run_as_often_as_it_is_counted() -> None:
    def square(edge: int, dtype: str = "f32") -> Product:
        array = Array(dtype, (edge, edge))
        return Product(array, array, dtype, ((1,), (0,)))

    batched = Product(
        Array("f32", (3, 8, 4)), Array("f32", (3, 4, 5)), "f32", ((2,), (1,)), ((0,), (0,))
    )
    bench = Bench(
        Counter({square(16): 2, square(512): 1, batched: 4, square(8, "c64"): 1}),
        jax.local_devices(),
    )
    bench.run(0.1)
    bench.run(0.1)
    seconds = {timed.product: timed.seconds for timed in bench.timed()}
    assert {timed.product: timed.times for timed in bench.timed()} == {
        square(16): 2, square(512): 1, batched: 4,
    }  # fmt: skip
    assert list(bench.failed) == [square(8, "c64")]
    assert seconds[square(512)] > 100 * seconds[square(16)]
    # Were it done once in many rounds, it would seem to be faster than a device can be.
    peak = measured_peak("float32").flops
    assert peak is not None and 2 * 512**3 / seconds[square(512)] < 3 * peak


# Moments of a trace


def step(*activities: tuple[str, Any, int, int]) -> DeviceTrace:
    made = [Activity(device, kind, (begin, end)) for device, kind, begin, end in activities]
    return DeviceTrace("gpu", tuple(made), (0, 100))


def ns(found: Moments) -> tuple[int, ...]:
    parts = (found.compute, found.communication, found.callbacks, found.idle)
    return tuple(round(1e9 * part) for part in parts)


def test_a_wait_for_a_callback_is_the_callback() -> None:
    # One device asks its host from 20 to 60; the others wait for it in a collective.
    trace = step(
        ("0", "compute", 0, 20), ("0", "callback", 20, 60), ("0", "communication", 60, 70),
        ("1", "compute", 0, 30), ("1", "communication", 30, 70),
        ("2", "compute", 0, 30), ("2", "communication", 30, 70),
    )  # fmt: skip
    assert ns(moments(trace, shared=False)) == (30, 10, 30, 30)
    assert ns(moments(trace, shared=True)) == (30, 10, 30, 30)


def test_devices_that_share_cores_compute_by_turns() -> None:
    trace = step(
        ("0", "compute", 0, 40), ("0", "communication", 40, 90),
        ("1", "communication", 0, 40), ("1", "compute", 40, 80), ("1", "communication", 80, 90),
    )  # fmt: skip
    assert ns(moments(trace, shared=True)) == (80, 10, 0, 10)
    assert ns(moments(trace, shared=False)) == (40, 50, 0, 10)


def test_who_computes_while_no_other_does() -> None:
    trace = step(
        ("0", "compute", 0, 20), ("1", "compute", 10, 25), ("2", "compute", 5, 95),
        ("2", "compute", 90, 200), ("0", "communication", 20, 100),
    )  # fmt: skip
    alone = moments(trace, shared=False).alone
    assert {device: round(1e9 * s) for device, s in alone.items()} == {"0": 5, "1": 0, "2": 75}
    assert ns(moments(trace, shared=False)) == (20, 0, 0, 5)


def test_a_loop_that_the_cpu_runs_as_one_kernel_computes() -> None:
    loops = step(
        ("0", "other", 0, 50), ("0", "compute", 10, 20), ("0", "communication", 20, 30),
        ("0", "other", 50, 90), ("1", "communication", 0, 90),
    )  # fmt: skip
    assert ns(moments(replace(loops, source="cpu"), shared=True)) == (50, 40, 0, 10)
    assert ns(moments(loops, shared=True)) == (10, 80, 0, 10)


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="shows no step"):
        moments(DeviceTrace("cpu", (), (0, 1)), shared=True)
    with pytest.raises(ValueError, match="shows no step"):
        moments(replace(step(("0", "compute", 0, 1)), window=None), shared=False)


# What is said


PEAK = Peak(100.0, "given by the user")
PRODUCT = Product(Array("f32", (2, 2)), Array("f32", (2, 2)), "f32", ((1,), (0,)))
PARTS = Moments(2.0, 1.2, 0.5, 0.0, 0.3, dict.fromkeys(("GPU:0", "GPU:1", "GPU:2"), 0.01))
FOUND = Findings(
    steps=Steps(real=[1.4, 1.5, 1.6], synthetic=[1.0, 1.0, 1.1], fetch=[0.8, 0.8, 0.8]),
    flops=StepFlops(120.0, 150.0, "as the test says"),
    peak=PEAK,
    devices=3,
    tokens=10,
    products=[Timed(PRODUCT, 5, 0.12)],
    moments=[PARTS] * 3,
    one_device=0.7,
    local={"GPU:0": 0.01, "GPU:1": 0.0101, "GPU:2": 0.0099},
    shared=False,
)


def seconds(found: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: round(row["seconds"], 9) for row in found["waterfall"]}


def test_the_document_by_hand() -> None:
    found = document(FOUND)
    assert seconds(found) == {
        rows.MODEL: 0.4,  # 120 / 3 devices / 100
        rows.RECOMPUTATION: 0.1,
        rows.KERNELS: 0.1,  # 5 x 0.12 - 0.5
        rows.COMPUTATION: 0.0,  # of the trace's 1.2 of 2 seconds: 0.6 without the profiler
        rows.COMMUNICATION: 0.25,
        rows.STRAGGLERS: 0.0,
        rows.CALLBACKS: 0.0,
        rows.IDLE: 0.15,
        rows.DATA: 0.5,
        rows.REST: 0.0,
    }
    assert found["mfu"] == pytest.approx(120 / (3 * 100 * 1.5)) == found["waterfall"][0]["share"]
    assert found["hfu"] == pytest.approx(150 / (3 * 100 * 1.5))
    assert (found["peak_flops"], found["peak_source"]) == (100.0, "given by the user")
    assert found["verdict"] == "largest loss: data loading, 33% of the step"
    assert found["advice"] == ADVICE[rows.DATA]
    assert found["reading"].startswith("below the 38-43% of a published 405B run")
    assert found["straggler"] is None
    assert found["products"] == [
        {
            "shapes": "f32[2, 2] x f32[2, 2]", "times": 5, "seconds": pytest.approx(0.6),
            "efficiency": pytest.approx(16 / 100 / 0.12),
        }
    ]  # fmt: skip
    assert found["notes"][1] == (
        "a batch takes 800 ms to fetch and place, 300 ms of it while devices work"
    )
    assert "the step less one device's share" in found["notes"][2]
    assert sum(row["share"] for row in found["waterfall"]) == pytest.approx(1, abs=1e-9)
    json.dumps(found, allow_nan=False)


def test_a_slow_device_is_named_and_costs_what_the_others_wait() -> None:
    found = document(replace(FOUND, local={"GPU:0": 0.01, "GPU:1": 0.012, "GPU:2": 0.01}))
    # A fifth of the computation of one device, 0.6 of the traced step (its share took 0.7).
    assert seconds(found)[rows.STRAGGLERS] == pytest.approx(0.12)
    assert seconds(found)[rows.COMMUNICATION] == pytest.approx(0.25 - 0.12)
    assert found["straggler"]["device"] == "GPU:1"
    assert found["verdict"].endswith(
        "; GPU:1 is slow: it takes 1.20 times as long as the others for a fixed computation"
    )
    slight = document(replace(FOUND, local={"GPU:0": 0.01, "GPU:1": 0.0105, "GPU:2": 0.01}))
    assert slight["straggler"] is None, "less than a tenth is noise"


def test_of_two_devices_one_may_be_slow() -> None:
    found = document(replace(FOUND, devices=2, local={"GPU:0": 0.01, "GPU:1": 0.03}))
    assert "GPU:1 is slow: it takes 3.00 times" in found["verdict"]


def test_a_device_with_more_work_is_named_when_every_trace_shows_it() -> None:
    busy = replace(PARTS, alone={"GPU:0": 0.0, "GPU:1": 0.02, "GPU:2": 0.4})
    found = document(replace(FOUND, moments=[busy, busy, replace(busy, step=2.5)]))
    # Beyond the median of the others, 0.01, and without what the profiler took.
    assert found["straggler"]["device"] == "GPU:2"
    assert found["straggler"]["seconds"] == pytest.approx(0.39 / 2.5)
    for fewer in ([busy, busy], [busy, busy, PARTS]):
        assert document(replace(FOUND, moments=fewer))["straggler"] is None


def test_callbacks_keep_their_time_and_the_rest_shrinks_under_the_profiler() -> None:
    # 2 seconds under the profiler, 0.4 of them in a callback; 1 second without it.
    called = replace(PARTS, compute=0.8, communication=0.48, callbacks=0.4, idle=0.32)
    few = StepFlops(30.0, 30.0, "few")
    found = document(
        replace(FOUND, moments=[called] * 3, flops=few, products=[Timed(PRODUCT, 1, 0.12)])
    )
    assert seconds(found) == {
        rows.MODEL: 0.1,
        rows.RECOMPUTATION: 0.0,
        rows.KERNELS: 0.02,
        rows.COMPUTATION: 0.18,  # 0.8 x 0.6 / 1.6 - 0.12
        rows.COMMUNICATION: 0.18,
        rows.STRAGGLERS: 0.0,
        rows.CALLBACKS: 0.4,
        rows.IDLE: 0.12,
        rows.DATA: 0.5,
        rows.REST: 0.0,
    }


def test_without_a_trace_one_devices_share_stands_in() -> None:
    found = document(replace(FOUND, moments="RuntimeError: another profiler"))
    assert seconds(found)[rows.COMMUNICATION] == pytest.approx(1.0 - 0.7)
    assert seconds(found)[rows.COMPUTATION] == pytest.approx(0.7 - 0.6)
    assert found["notes"][2] == "no trace of a step: RuntimeError: another profiler"
    neither = document(replace(FOUND, moments="no trace", one_device="no memory"))
    assert seconds(neither)[rows.REST] == pytest.approx(1.0 - 0.6)
    assert "no share of it: no memory" in neither["notes"]


def test_unknown_flops_are_unknown_and_the_rest_still_sums() -> None:
    found = document(replace(FOUND, flops=StepFlops(None, None, "not counted: x")))
    assert found["mfu"] is None and found["hfu"] is None
    assert found["reading"].startswith("unknown")
    assert rows.MODEL not in seconds(found)
    assert sum(row["share"] for row in found["waterfall"]) == pytest.approx(1, abs=1e-9)


def test_more_than_the_peak_is_invalid() -> None:
    found = document(replace(FOUND, flops=StepFlops(600.0, 600.0, "too many")))
    assert found["mfu"] is None
    assert found["reading"].startswith("invalid: MFU above 1")


def test_there_is_advice_for_every_loss() -> None:
    named = {value for name, value in vars(rows).items() if name.isupper() and name[0] != "_"}
    assert set(ADVICE) == named - {rows.MODEL}


def test_the_picture_has_every_row_the_verdict_and_loads_nothing() -> None:
    found = document(FOUND)
    console = Console(record=True, width=120, file=io.StringIO())
    diagnose_show.show(found, console)
    text = console.export_text()
    for part in (*seconds(found), found["verdict"], "MFU      26.67%", "given by the user"):
        assert part in text
    image = diagnose_show.svg(found)
    assert image.startswith("<svg") and "url(http" not in image and "@font-face" not in image
    assert "unknown" in diagnose_show.svg({**found, "mfu": None})


# Measured


def test_each_device_is_timed_by_itself() -> None:
    devices = jax.local_devices()

    def work(device: Any) -> Any:
        return lambda: time.sleep(0.02 if device is devices[5] else 0.002)

    found = time_locally(devices, work)
    assert list(found) == [f"CPU:{n}" for n in range(8)]
    assert max(found, key=lambda d: found[d]) == "CPU:5"
    assert min(found.values()) >= 0.002
    assert fixed_work(devices[1])().devices() == {devices[1]}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_command_measures_and_writes_nothing_into_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxrel.cli", "diagnose", str(TINY), "--mesh.cpu_devices", "2"]
    command += [
        "--seconds",
        "3",
        "--json",
        "--svg",
        "a.svg",
        "--stages",
        "2",
        "--microbatches",
        "8",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert sum(row["share"] for row in found["waterfall"]) == pytest.approx(1, abs=1e-9)
    assert sum(row["seconds"] for row in found["waterfall"]) == pytest.approx(found["step_s"])
    first = found["waterfall"][0]
    assert first["name"] == rows.MODEL and first["share"] == pytest.approx(found["mfu"])
    assert 0 < found["mfu"] < found["hfu"] < 1, "it recomputes"
    assert found["peak_source"].startswith("measured: ")
    assert rows.BUBBLE in seconds(found)
    assert found["devices"] == 2
    assert "compiling the step" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def _environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAXREL_")}
    return clean | {"PYTHONPATH": str(ROOT)}
