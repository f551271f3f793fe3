"""The held-out loss is the mean over rows, on any mesh, whatever fills up the last batch."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrel.config import BatchConfig
from jaxrel.data import corpus
from jaxrel.data.held_out import HeldOut
from jaxrel.data.store import TokenStream
from jaxrel.exit_codes import DataRefusedError
from jaxrel.models import transformer
from jaxrel.train.evaluation import held_out_loss, make_row_losses
from tests.train import toys

BATCH = BatchConfig(global_size=16, sequence=8, groups=8)
MODEL = dataclasses.replace(toys.MODEL, vocabulary=256)
PLAIN = dataclasses.replace(MODEL, dropout=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("text")
    for name in "ab":
        (source / f"{name}.txt").write_text(
            "".join(chr(97 + i * i % 23) for i in range(301)) + name
        )
    return corpus.build([source], source.with_name("corpus"), held_out=0.5).path


def evaluate(where: Any, folder: Path, model: Any = MODEL, limit: int = 9) -> tuple[float, int]:
    step = toys.transformer_step(model, where)
    batches = HeldOut(folder, BATCH, groups=step.layout.process_groups(), limit=limit)
    plain = dataclasses.replace(model, dropout=0.0)
    row_losses = make_row_losses(step, transformer.loss_fn(plain))
    found = held_out_loss(step, row_losses, step.init(3).params, batches)
    assert row_losses._cache_size() == 1  # one compilation, the short batch included
    return found


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_on_every_mesh_and_the_mean_over_rows(folder: Path, dtype: Any) -> None:
    model = dataclasses.replace(MODEL, compute_dtype=dtype)
    loss, rows = evaluate(toys.mesh(1, 1), folder, model)
    for data, fsdp, tensor in ((8, 1, 1), (2, 4, 1)):
        assert evaluate(toys.mesh(data, fsdp, tensor), folder, model) == (loss, rows)
    split = TokenStream(folder, "held_out")
    assert rows == (split.split.tokens - 1) // 8 == 37  # two whole batches and five rows
    tokens = np.stack([split.read(8 * i, 9) for i in range(rows)])
    params = toys.transformer_step(model, toys.mesh(1, 1)).init(3).params
    plain = transformer.loss_fn(dataclasses.replace(model, dropout=0.0))
    wanted, _ = jax.jit(plain)(params, {"tokens": tokens}, jax.random.key(0))
    np.testing.assert_allclose(loss, wanted, rtol=1e-6 if dtype == "float32" else 1e-3)


def test_a_tensor_axis_and_a_model_without_the_hook(folder: Path) -> None:
    loss, _ = evaluate(toys.mesh(1, 1), folder)
    np.testing.assert_allclose(evaluate(toys.mesh(2, 2, 2), folder)[0], loss, rtol=1e-5)

    init_fn, loss_fn = toys.mlp(hook=False)
    del init_fn
    points, losses = toys.points(0), []
    for data, fsdp in ((1, 1), (2, 2)):
        step = toys.mlp_step(toys.mesh(data, fsdp), hook=False)
        row_losses = make_row_losses(step, loss_fn)
        losses.append(np.asarray(row_losses(step.init(0).params, step.place(points))))
    np.testing.assert_array_equal(losses[0], losses[1])
    assert losses[0].shape == (8, 2)


@pytest.mark.core
def test_batches_are_counted_alike_whoever_owns_the_groups(folder: Path) -> None:
    whole = list(HeldOut(folder, BATCH, groups=range(8), limit=9))
    halves = [list(HeldOut(folder, BATCH, groups=g, limit=9)) for g in (range(4), range(4, 8))]
    assert len(whole) == len(halves[0]) == len(halves[1]) == 3
    for (batch, weights), first, second in zip(whole, *halves, strict=True):
        both = np.concatenate([first[0]["tokens"], second[0]["tokens"]])
        np.testing.assert_array_equal(batch["tokens"], both)
        np.testing.assert_array_equal(weights, first[1])
    assert [int(weights.sum()) for _, weights in whole] == [16, 16, 5]


def test_a_limit_and_a_split_without_a_window(folder: Path) -> None:
    assert len(HeldOut(folder, BATCH, groups=range(8), limit=2)) == 2
    long = dataclasses.replace(BATCH, sequence=400)
    with pytest.raises(DataRefusedError, match="303 tokens: fewer than one window of batch.seq"):
        HeldOut(folder, long, groups=range(8), limit=2)
