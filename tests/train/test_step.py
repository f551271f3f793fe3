"""One step: exact on every mesh, and its numbers are what they say."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrel.checkpoint import Checkpointer
from jaxrel.digest import state_digest, tree_words
from jaxrel.digest_host import leaf_words
from jaxrel.exit_codes import UsageError
from jaxrel.gather import gather
from jaxrel.models import transformer
from jaxrel.train.state import overflowed
from jaxrel.train.step import make_train_step
from tests.train import toys

with_mlp = toys.mlp_step


def run_mlp(step: Any, steps: int = 3) -> Any:
    state, records = step.init(0), []
    for i in range(steps):
        state, record = step(state, step.place(toys.points(i)))
        records.append(jax.device_get(record))
    return state_digest(step.abstract_state, records[-1].words), records, state


@pytest.mark.core
@pytest.mark.parametrize(
    ("remat", "dtype", "meshes"),
    [
        ("full", "float32", [(1, 1), (2, 4)]),
        ("none", "bfloat16", [(1, 2), (8, 1)]),
        ("dots", "float32", [(2, 1), (1, 8)]),
    ],
)
def test_the_same_bits_on_every_mesh(remat: Any, dtype: Any, meshes: Any) -> None:
    model = dataclasses.replace(toys.MODEL, remat=remat, compute_dtype=dtype)
    first = None
    for data, fsdp in meshes:
        step = toys.transformer_step(model, toys.mesh(data, fsdp))
        digest, records, _ = toys.run(step)
        first = first or (digest, records)
        different = toys.differing(step, records[0], first[1][0])
        assert digest == first[0], f"{data} x {fsdp}: after one step {different} differ"
        for mine, theirs in zip(records, first[1], strict=True):
            assert mine.loss == theirs.loss
            assert mine.grad_norm == theirs.grad_norm
            np.testing.assert_array_equal(mine.group_loss, theirs.group_loss)
            np.testing.assert_array_equal(mine.group_grad_norm, theirs.group_grad_norm)


@pytest.mark.core
def test_another_seed_is_another_digest() -> None:
    step = with_mlp(toys.mesh(1, 2))
    words = [jax.jit(tree_words)(step.init(seed)) for seed in (0, 0, 1)]
    digests = [state_digest(step.abstract_state, w) for w in words]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("groups", "hook", "meshes"),
    [
        (2, True, [(1, 1), (1, 2)]),
        (8, True, [(1, 1), (4, 2), (8, 1)]),
        (16, False, [(1, 1), (2, 1), (1, 8)]),  # one row a group
    ],
)
def test_the_same_bits_with_as_many_groups_as_devices_and_more(
    groups: int, hook: bool, meshes: Any
) -> None:
    digests = [
        run_mlp(with_mlp(toys.mesh(*where), hook=hook, groups=groups))[0] for where in meshes
    ]
    assert len(set(digests)) == 1


def reference(step: Any, loss_fn: Any, batch: Any, groups: int) -> Any:
    """Loss and gradient of each group, one at a time, on one device, by plain JAX."""
    state = step.init(0)
    params, rng = jax.device_get(state.params), jax.device_get(jax.random.key_data(state.rng))
    rng = jax.random.fold_in(jax.random.wrap_key_data(rng), 0)
    one = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    values = []
    for g in range(groups):
        rows = jax.tree.map(lambda x, g=g: x.reshape(groups, -1, *x.shape[1:])[g], batch)
        values.append(one(params, rows, jax.random.fold_in(rng, g)))
    losses = np.array([float(loss) for (loss, _), _ in values])
    norms = np.array([float(optax.tree.norm(g)) for _, g in values])
    mean = jax.tree.map(lambda *g: np.mean(np.stack(g), axis=0), *[g for _, g in values])
    return losses, norms, mean


@pytest.mark.parametrize(
    ("where", "reduction"),
    [
        ((4, 1, 1), "fast"),
        ((1, 4, 1), "invariant"),
        ((2, 2, 2), "fast"),
        ((2, 2, 2), "invariant"),
        ((1, 1, 2), "invariant"),
        ((1, 1, 1), "fast"),
    ],
)
def test_group_values_are_those_of_one_group_at_a_time(where: Any, reduction: str) -> None:
    step = with_mlp(toys.mesh(*where), reduction=reduction)
    losses, norms, mean = reference(step, toys.mlp()[1], toys.points(0), 8)
    _, record = step(step.init(0), step.place(toys.points(0)))
    np.testing.assert_allclose(record.group_loss, losses, rtol=1e-5)
    np.testing.assert_allclose(record.group_grad_norm, norms, rtol=1e-5)
    np.testing.assert_allclose(record.loss, losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(record.grad_norm, optax.tree.norm(mean), rtol=1e-5)
    ranks = step.layout.rank_values(record.group_grad_norm)
    by_place = norms[step.layout.group_ids()]  # [data, local groups, fsdp]
    np.testing.assert_allclose(ranks, np.sqrt(np.mean(by_place**2, axis=1)), rtol=1e-5)


def test_the_update_is_that_of_optax() -> None:
    _, loss_fn = toys.mlp()
    step = with_mlp(toys.mesh(2, 2), clip_norm=0.1)
    _, _, mean = reference(step, loss_fn, toys.points(0), 8)
    before = jax.device_get(step.init(0))
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    updates, _ = optimizer.update(mean, optimizer.init(before.params), before.params)
    wanted = optax.apply_updates(before.params, updates)
    after, record = step(step.init(0), step.place(toys.points(0)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), after.params, wanted
    )
    assert int(after.step) == 1
    assert record.metrics["mean_error"].shape == ()


def _plain(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_the_record_digests_the_new_state() -> None:
    step = with_mlp(toys.mesh(2, 4))
    state, record = step(step.init(0), step.place(toys.points(0)))
    leaves = jax.tree.leaves(jax.tree.map(_plain, state))
    twins = [leaf_words(np.asarray(x)) for x in leaves]
    np.testing.assert_array_equal(record.words, twins)


def test_a_tensor_axis_changes_no_bit_while_its_degree_stays() -> None:
    meshes = [(1, 1, 2), (2, 2, 2), (1, 4, 2)]
    assert len({run_mlp(with_mlp(toys.mesh(*m)))[0] for m in meshes}) == 1


def test_fast_on_three_axes_follows_the_invariant_run_also_after_a_resume(tmp_path: Path) -> None:
    options = {"optimizer": optax.adamw(3e-3)}
    invariant = toys.transformer_step(toys.MODEL, toys.mesh(1, 8), **options)
    fast = toys.transformer_step(toys.MODEL, toys.mesh(2, 2, 2), reduction="fast", **options)
    wanted = [float(record.loss) for record in toys.run(invariant, 60)[1]]
    group_losses, norms, _ = reference(
        fast, transformer.loss_fn(toys.MODEL), toys.tokens(0), toys.GROUPS
    )
    state, losses = fast.init(0), []
    for i in range(60):
        state, record = fast(state, fast.place(toys.tokens(i)))
        losses.append(float(record.loss))
        if i == 0:
            np.testing.assert_allclose(record.group_loss, group_losses, rtol=1e-5)
            np.testing.assert_allclose(record.group_grad_norm, norms, rtol=1e-5)
        if i == 29:
            with Checkpointer(tmp_path) as checkpoints:
                checkpoints.save(30, state)
                checkpoints.wait()
                state, _ = checkpoints.restore(fast.abstract_state)
    np.testing.assert_allclose(losses, wanted, atol=2e-4)


@pytest.mark.core
def test_what_is_not_finite_is_kept_out() -> None:
    step = with_mlp(toys.mesh(2, 2))
    state, _ = step(step.init(0), step.place(toys.points(0)))
    before = jax.device_get((state.params, state.opt_state))
    bad = toys.points(1)
    bad["x"][5, 3] = np.nan
    after, record = step(state, step.place(bad))
    assert not record.finite
    assert np.flatnonzero(~np.isfinite(record.group_loss)).tolist() == [5 * 8 // toys.ROWS]
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), before)
    assert int(after.step) == 1
    good, record = step(after, step.place(toys.points(1)))
    assert record.finite and int(good.step) == 2


def test_a_gradient_that_overflows_is_kept_out_too() -> None:
    step = with_mlp(toys.mesh(1, 2))
    batch = toys.points(0)
    batch["x"][0], batch["y"][0] = 1e4, 1e18  # the loss is 1e36, the gradient's square 1e44
    after, record = step(step.init(0), step.place(batch))
    assert np.isfinite(record.loss) and not record.finite
    assert int(after.step) == 0


def test_an_update_that_overflows_is_named_in_the_step_that_made_it() -> None:
    step = with_mlp(toys.mesh(2, 2), optimizer=optax.chain(optax.scale(1e38), optax.scale(1e38)))
    _, record = step(step.init(0), step.place(toys.points(0)))
    assert record.finite  # loss and gradient were
    bad = overflowed(step.abstract_state, record.not_finite)
    assert list(bad) == ["params/layers/b", "params/layers/w", "params/odd", "params/out"]
    assert bad["params/odd"] == 3


def test_a_number_of_the_optimizers_own_may_be_infinite() -> None:
    step = with_mlp(toys.mesh(2, 1), optimizer=optax.chain(optax.sgd(1e-3), _with_a_best()))
    _, record = step(step.init(0), step.place(toys.points(0)))
    assert int(record.not_finite.sum()) == 1
    assert overflowed(step.abstract_state, record.not_finite) == {}


def _with_a_best() -> optax.GradientTransformation:
    """Keeps an infinite number in its state, as `reduce_on_plateau` does before its first loss."""
    return optax.GradientTransformation(
        lambda params: jnp.float32(jnp.inf), lambda updates, state, params=None: (updates, state)
    )


def test_one_compilation() -> None:
    compiled = []

    def hear(event: str, duration_secs: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    step = with_mlp(toys.mesh(2, 2), groups=4)
    state = step.init(0)
    batches = [step.place(toys.points(i)) for i in range(3)]
    compiled.clear()
    for batch in batches:
        state, _ = step(state, batch)
    assert len(compiled) == 1


def test_bf16_parameters_are_summed_in_float32() -> None:
    init_fn, loss_fn = toys.mlp(dtype=jnp.bfloat16)
    digests = set()
    for where in [(1, 1), (2, 4)]:
        step = make_train_step(
            init_fn, loss_fn, optax.adamw(1e-2), toys.mesh(*where), groups=8, reduction="invariant"
        )
        digest, _, state = run_mlp(step)
        digests.add(digest)
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert len(digests) == 1


def test_a_model_without_the_hook_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="jaxrel"):
        step = with_mlp(toys.mesh(1, 4), hook=False)
        run_mlp(step, 2)
    assert [r.message for r in caplog.records if "gathers no layer" in r.message] != []
    assert sum("gathers no layer" in r.message for r in caplog.records) == 1


def test_gather_is_the_identity_outside_a_step() -> None:
    tree = {"w": jnp.ones((2, 2)), "b": jnp.zeros(3)}
    assert gather(tree)["w"] is tree["w"]
    assert gather(tree, jnp.bfloat16)["b"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("optimizer", "operation"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "reduce_sum"),
        (optax.adafactor(1e-3), None),
    ],
)
def test_invariant_refuses_optimizers_that_mix_elements(optimizer: Any, operation: Any) -> None:
    with pytest.raises(UsageError, match="not exact across device counts") as error:
        with_mlp(toys.mesh(1, 1), optimizer=optimizer)
    assert operation is None or operation in str(error.value)
    step = with_mlp(toys.mesh(2, 2), optimizer=optimizer, reduction="fast")
    alone = with_mlp(toys.mesh(1, 1), optimizer=optimizer, reduction="fast")
    for a, b in zip(run_mlp(step)[1], run_mlp(alone)[1], strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-4)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.lion(1e-3),
        optax.adamw(optax.cosine_decay_schedule(1, 9)),
    ],
)
def test_invariant_takes_optimizers_that_do_not(optimizer: Any) -> None:
    digests = {run_mlp(with_mlp(toys.mesh(*m), optimizer=optimizer))[0] for m in [(1, 1), (2, 2)]}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("where", "options", "words"),
    [
        ((4, 1), {"groups": 6, "reduction": "fast"}, "batch.groups: got 6"),
        ((1, 1), {"groups": 6}, "batch.groups: got 6: must be a power of two"),
        ((3, 1), {"groups": 6}, "power of two"),
    ],
)
def test_wrong_combinations_are_refused(where: Any, options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_mlp(toys.mesh(*where), **options)


def test_fast_takes_any_number_of_devices_that_divides_the_groups() -> None:
    step = with_mlp(toys.mesh(3, 1), groups=6, reduction="fast")
    _, record = step(step.init(0), step.place(jax.tree.map(lambda x: x[:12], toys.points(0))))
    losses, norms, _ = reference(
        step, toys.mlp()[1], jax.tree.map(lambda x: x[:12], toys.points(0)), 6
    )
    np.testing.assert_allclose(record.group_loss, losses, rtol=1e-5)
    np.testing.assert_allclose(record.group_grad_norm, norms, rtol=1e-5)


def test_integer_parameters_are_refused_by_name() -> None:
    def init_fn(rng: jax.Array) -> Any:
        return {"w": jnp.ones(4), "table": jnp.zeros(4, jnp.int32)}

    with pytest.raises(UsageError, match="parameter table: got int32"):
        make_train_step(init_fn, toys.mlp()[1], optax.sgd(1.0), toys.mesh(1, 1), groups=1)
