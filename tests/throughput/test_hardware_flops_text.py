"""HLO text that the compiler for CPU does not write, by hand: other spellings, damage."""

import random
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrel.throughput.hardware_flops import count_hlo, hardware_flops
from tests.throughput.hlo import ADD, module


def test_products_that_a_tpu_writes_as_convolutions() -> None:
    operands = [
        "%p0 = bf16[16,64]{1,0:T(8,128)(2,1)} parameter(0)",
        "%p1 = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} parameter(1)",
    ]
    plain = module(
        *operands,
        "ROOT %c = bf16[16,8]{1,0:T(8,128)} convolution(%p0, %p1), dim_labels=bf_io->bf",
    )
    assert count_hlo(plain).per_device.contraction == 2 * 16 * 64 * 8

    batched = module(
        "%p0 = f32[4,16,64]{2,1,0} parameter(0)",
        "%p1 = f32[4,64,8]{2,1,0} parameter(1)",
        "ROOT %c = f32[4,16,8]{2,1,0} convolution(%p0, %p1),"
        " window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
    )
    assert count_hlo(batched).per_device.contraction == 4 * 2 * 16 * 64 * 8


def test_a_ragged_product_counts_a_row_in_one_group() -> None:
    rows = module(
        "%x = bf16[96,16]{1,0} parameter(0)",
        "%w = bf16[4,16,8]{2,1,0} parameter(1)",
        "%sizes = s32[4]{0} parameter(2)",
        "ROOT %y = bf16[96,8]{1,0} ragged-dot(%x, %w, %sizes), lhs_contracting_dims={1},"
        " rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}",
    )
    assert count_hlo(rows).per_device.contraction == 2 * 96 * 16 * 8
    weights = module(
        "%x = bf16[96,16]{1,0} parameter(0)",
        "%g = bf16[96,8]{1,0} parameter(1)",
        "%sizes = s32[4]{0} parameter(2)",
        "ROOT %y = bf16[4,16,8]{2,1,0} ragged-dot(%x, %g, %sizes), lhs_contracting_dims={0},"
        " rhs_contracting_dims={0}, lhs_ragged_dims={0}",
    )
    assert count_hlo(weights).per_device.contraction == 2 * 96 * 16 * 8


def test_operands_with_types_and_names_without_percent_signs() -> None:
    text = """HloModule older
ENTRY main {
  p0 = (f32[<=8,16]{1,0}, f32[16,4]{1,0}) parameter(0)
  a = f32[<=8,16]{1,0} get-tuple-element((f32[<=8,16]{1,0}, f32[16,4]{1,0}) p0), index=0
  b = f32[16,4]{1,0} get-tuple-element((f32[<=8,16]{1,0}, /*index=1*/f32[16,4]{1,0}) p0), index=1
  ROOT c = f32[<=8,4]{1,0} dot(f32[<=8,16]{1,0} a, /*index=1*/f32[16,4]{1,0} b),\
 lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="a(b, {c\\"" x=1}
}
"""
    found = count_hlo(text)
    assert found.uncounted == ()
    assert found.per_device.contraction == 2 * 8 * 16 * 4


def test_what_starts_asynchronously_counts_once() -> None:
    text = module(
        "%p = f32[64]{0} parameter(0)",
        "%s1 = f32[64]{0} all-reduce-start(%p), replica_groups=[2,4]<=[8], to_apply=%add",
        "%d1 = f32[64]{0} all-reduce-done(%s1)",
        "%s2 = ((f32[64]{0}), f32[16]{0}) reduce-scatter-start(%d1), dimensions={0},"
        " replica_groups=[2,4]<=[8], to_apply=%add",
        "%d2 = f32[16]{0} reduce-scatter-done(%s2)",
        "%s3 = ((f32[16]{0}), f32[16]{0}, u32[]) async-start(%d2), calls=%twice",
        "%d3 = f32[16]{0} async-done(%s3)",
        "%s4 = ((f32[16]{0}, f32[16]{0}), f32[]{0}, u32[]) dot-start(%d3, %d3),"
        " lhs_contracting_dims={0}, rhs_contracting_dims={0}",
        "%d4 = f32[] dot-done(%s4)",
        "%s5 = (f32[], f32[], u32[]) copy-start(%d4)",
        "ROOT %d5 = f32[] copy-done(%s5)",
        before=ADD
        + """
%twice (x: f32[16]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  ROOT %y = f32[16]{0} add(%x, %x)
}
""",
        header=", num_partitions=8",
    )
    found = count_hlo(text)
    assert found.uncounted == ()
    assert found.per_device.collective == 64 * 3 / 4 + 64 * 3 / 4
    assert found.per_device.elementwise == 16
    assert found.per_device.contraction == 2 * 16


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true", 2),
        ("[2,4]<=[8], use_global_device_ids=true", 4),
        ("[4,2]<=[2,4]T(1,0), use_global_device_ids=true", 2),
        ("mesh['a'=2,'b'=4] {'b'}, use_global_device_ids=true", 4),
        ("mesh['a'=2,'b'=4] {'a','b'}, use_global_device_ids=true", 8),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}, use_global_device_ids=true", 4),
        ("mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}, use_global_device_ids=true", 4),
        ("{}", 8),
        ("{{0}}", 8),
    ],
)
def test_every_spelling_of_groups(groups: str, members: int) -> None:
    text = module(
        "%p = f32[64]{0} parameter(0)",
        f"ROOT %r = f32[64]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups},"
        " to_apply=%add",
        before=ADD,
        header=", num_partitions=8",
    )
    found = count_hlo(text)
    assert found.uncounted == ()
    assert found.per_device.collective == 64 * (members - 1) / members
    assert found.all_devices.collective == 8 * 64 * (members - 1) / members


def test_a_reduction_of_many_arrays_at_once() -> None:
    shapes = [f"%p{n} = f32[{n + 1}]{{0}} parameter({n})" for n in range(6)]
    text = module(
        *shapes,
        "ROOT %r = (f32[1], f32[2], f32[3], f32[4], f32[5], /*index=5*/f32[6])"
        " all-reduce(%p0, %p1, %p2, %p3, %p4, /*index=5*/%p5), replica_groups={}, to_apply=%add",
        before=ADD,
        header=", replica_count=2",
    )
    found = count_hlo(text)
    assert (found.devices, found.per_device.collective) == (2, 21 / 2)


def test_groups_in_a_spelling_yet_to_come_are_uncounted() -> None:
    text = module(
        "%p = f32[64]{0} parameter(0)",
        "ROOT %r = f32[64]{0} all-reduce(%p), replica_groups=@all, to_apply=%add",
        before=ADD,
    )
    found = count_hlo(text)
    assert found.per_device.collective is None
    assert "all-reduce r: cannot be read: ValueError: replica_groups=@all" in found.uncounted[0]


def loop(start: int, step: int, compare: str) -> str:
    """A loop over a counter that adds 10 elements in each round."""
    return module(
        f"%start = s32[] constant({start})",
        "%x = f32[10]{0} parameter(0)",
        "%t = (s32[], f32[10]{0}) tuple(%start, %x)",
        "ROOT %loop = (s32[], f32[10]{0}) while(%t), condition=%going, body=%round",
        before=f"""
%round (t: (s32[], f32[10])) -> (s32[], f32[10]) {{
  %t = (s32[], f32[10]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[10]{{0}} get-tuple-element(%t), index=1
  %step = s32[] constant({step})
  %next = s32[] subtract(%i, %step)
  %y = f32[10]{{0}} tanh(%x)
  ROOT %u = (s32[], f32[10]{{0}}) tuple(%next, %y)
}}
%going (t: (s32[], f32[10])) -> pred[] {{
  %t = (s32[], f32[10]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %limit = s32[] constant(7)
  ROOT %more = pred[] compare({compare}
}}
""",
    )


@pytest.mark.parametrize(
    ("start", "step", "compare", "rounds"),
    [
        (0, -1, "%i, %limit), direction=LT", 7),
        (0, -1, "%limit, %i), direction=GT", 7),
        (0, -1, "%i, %limit), direction=LE", 8),
        (1, -2, "%i, %limit), direction=LT", 3),
        (0, -2, "%i, %limit), direction=LT", 4),
        (9, -1, "%i, %limit), direction=LT", 0),
        (0, -1, "%i, %limit), direction=NE", 7),
        (12, 1, "%i, %limit), direction=GT", 5),
        (12, 1, "%i, %limit), direction=GE", 6),
        (12, 3, "%limit, %i), direction=LE", 2),
        # These do not end, or only after the counter overflows.
        (0, -2, "%i, %limit), direction=NE", None),
        (0, 1, "%i, %limit), direction=LT", None),
        (0, 0, "%i, %limit), direction=LT", None),
        (0, -1, "%i, %limit), direction=EQ", None),
        (0, -1, "%i, %i), direction=LE", None),
    ],
)
def test_rounds_of_a_loop_read_from_its_text(
    start: int, step: int, compare: str, rounds: int | None
) -> None:
    found = count_hlo(loop(start, step, compare))
    assert found.per_device.transcendental == (None if rounds is None else 10 * rounds)
    assert bool(found.uncounted) == (rounds is None)


def test_select_and_scatter_and_two_branches() -> None:
    text = module(
        "%x = f32[8]{0} parameter(0)",
        "%source = f32[4]{0} parameter(1)",
        "%zero = f32[] constant(0)",
        "%s = f32[8]{0} select-and-scatter(%x, %source, %zero), window={size=3 stride=2 pad=0_1},"
        " select=%ge, scatter=%add",
        "%yes = pred[] constant(true)",
        "ROOT %c = f32[8]{0} conditional(%yes, %s, %s), true_computation=%one,"
        " false_computation=%two",
        before=ADD
        + """
%ge (a.1: f32[], b.1: f32[]) -> pred[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %r = pred[] compare(%a.1, %b.1), direction=GE
}
%one (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%y)
}
%two (z: f32[8]) -> f32[8] {
  %z = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%z)
}
""",
    )
    found = count_hlo(text)
    assert found.by_operation["select-and-scatter"] == 4 * 2 + 4
    assert found.by_operation.keys() == {"select-and-scatter", "negate"}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("%x = f32[4]{0} teleport(%p)", "teleport x: no rule for this operation"),
        ("%x = f32[4]{0} dot(%p, %p)", "dot x: cannot be read: KeyError"),
        (
            "%x = f32[4]{0} dot(%p, %p), lhs_contracting_dims={0",
            "dot x: cannot be read: ValueError",
        ),
        ("%x = f32[4]{0} dot(%nobody, %p), lhs_contracting_dims={0}", "dot x: cannot be read"),
        ("%x = f32[4,?]{0} add(%p, %p)", "add x: cannot be read: ValueError"),
        ("%x = f32[4]{0} fusion(%p), kind=kLoop, calls=%gone", "computation gone: not in the text"),
        ("%x = f32[4]{0} fusion(%p), kind=kLoop", "fusion x: cannot be read"),
        ("%x = f32[4]{0} call(%p), to_apply=%main", "computation main: it calls itself"),
        ("%x = f32[4]{0} while(%p), body=%gone", "while x: cannot be read"),
        ("%x = (f32[4]{0}, custom-call(%p", "line 5: a bracket is not closed"),
        ("%x = f32[4]{0} custom-call(%p)", "custom-call x: cannot be read: KeyError"),
        ("what is this?", "line 5: no instruction"),
        ("%x = f32[4]{0}", "line 5: no opcode"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_and_the_figures_are_unknown(
    line: str, named: str
) -> None:
    found = count_hlo(module("%p = f32[4]{0} parameter(0)", line, "ROOT %r = f32[4] add(%p, %p)"))
    assert any(text.startswith(named) for text in found.uncounted), found.uncounted
    assert found.per_device.contraction is None
    assert found.by_operation == {"add": 4}


def test_a_damaged_line_gives_the_true_figure_or_none() -> None:
    """Each line of a training step, cut at a place of chance, one at a time."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((3, 8, 8)), jnp.ones((4, 8))).compile().as_text()
    assert text is not None
    lines, whole = text.splitlines(), count_hlo(text).per_device.contraction
    assert whole == 3 * 4 * (2 * 4 * 8 * 8)
    dice = random.Random(0)
    places = [n for n, line in enumerate(lines) if line.startswith("  ")]
    for n in places:
        cut = lines[n][: dice.randrange(2, len(lines[n]))]
        if re.search(r"=%[\w.]+$", cut):
            continue  # a shorter name may be another computation's
        damaged = count_hlo("\n".join([*lines[:n], cut, *lines[n + 1 :]]))
        assert damaged.per_device.contraction in (None, whole), cut
    assert len(places) > 100


class Broken:
    """A program whose text is not to be had."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def as_text(self) -> str | None:
        if self.text == "raise":
            raise NotImplementedError("text view unsupported")
        return self.text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("raise", "no HLO text: NotImplementedError: text view unsupported"),
        (None, "no entry computation in the HLO text"),
        ("", "no entry computation in the HLO text"),
        ("func.func public @main() {}", "no entry computation in the HLO text"),
        (module("ROOT %p = f32[] parameter(0)") * 2, "2 programs in the HLO text"),
    ],
)
def test_a_program_without_text_is_unknown(text: str | None, named: str) -> None:
    found = hardware_flops(Broken(text))
    assert found.uncounted == (f"the program: {named}",)
    assert found.per_device.contraction is found.all_devices.elementwise is None
